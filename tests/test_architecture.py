"""Rules about the code itself."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("launch", "plora_jax", "strategies", "memory_pool")
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_only_downward(path):
    floor = FLOORS.index(path.relative_to(ROOT).parts[0])
    upward = [name for name in imported(path) if name.split(".")[0] in FLOORS[:floor]]
    assert not upward, f"{path.relative_to(ROOT)} imports {upward} from a floor above"


def test_flags_stay_in_launch():
    strays = [p for p in SOURCES if p.parts[len(ROOT.parts)] != "launch" and "absl.flags" in set(imported(p))]
    assert not strays


def test_memory_spaces_change_only_in_link():
    users = {
        str(p.relative_to(ROOT)) for p in SOURCES if "memory.Space" in p.read_text() or "pinned_host" in p.read_text()
    }
    assert users <= {"memory_pool/link.py"}


def test_single_device_sharding_is_used_nowhere():
    users = [p for p in SOURCES if any(name.endswith("SingleDeviceSharding") for name in imported(p))]
    assert not users


def test_policy_code_runs_without_jax():
    blocked = "import sys; sys.modules.update(dict.fromkeys(('jax', 'jaxlib', 'flax')));"
    modules = ("plora_jax.engine.scheduler", "plora_jax.engine.turns", "plora_jax.engine.clock", "memory_pool.pages")
    program = blocked + "".join(f"import {module};" for module in modules)
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", ["plora_jax", "memory_pool", "strategies"])
def test_every_public_name_can_be_imported(package):
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing


def test_import_contracts_hold():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--config", "pyproject.toml", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
