import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from plora_jax.engine import kept_programs
from plora_jax.engine.compile import use_persistent_cache
from plora_jax.engine.kept_programs import STEPS_FOLDER, KeptPrograms

MODEL = "llama"
START = Path(__file__).parent / "kept_start.py"


@pytest.fixture
def lowered():
    # Of numbers that no run before has had: JAX's cache of the tests has none of it.
    numbers = np.frombuffer(os.urandom(64), np.int32)
    return numbers, _lower(numbers)


@pytest.fixture
def jax_cache(tmp_path):
    """JAX's cache in a folder of the test's own: whichever test used it first in this process decides where it is."""
    before = jax.config.values["jax_compilation_cache_dir"]
    compilation_cache.reset_cache()
    yield use_persistent_cache(tmp_path / "jax")
    compilation_cache.reset_cache()
    use_persistent_cache(before)


def _lower(numbers: np.ndarray) -> jax.stages.Lowered:
    return jax.jit(lambda x: x + numbers).lower(jax.ShapeDtypeStruct((16,), np.int32))


def make(folder) -> KeptPrograms:
    return KeptPrograms(folder, jax.local_devices()[:1])


def test_program_that_was_kept_is_found_by_what_it_is_made_from_and_computes_the_same(tmp_path, lowered):
    numbers, text = lowered
    assert make(tmp_path).find("a", 1) is None
    make(tmp_path).compile(text, "a", 1)
    path = make(tmp_path).find("a", 1)
    assert path is not None
    assert make(tmp_path).find("a", 2) is None
    program = make(tmp_path).load(path)
    assert program is not None
    np.testing.assert_array_equal(program(np.arange(16, dtype=np.int32)), numbers + np.arange(16))


@pytest.mark.parametrize(
    ("what", "value"),
    [("_sources", "other"), ("_versions", ("other",)), ("cpu_flags", "other")],
    ids=["sources", "versions", "processor"],
)
def test_program_is_not_found_where_it_was_made_otherwise(tmp_path, lowered, monkeypatch, what, value):
    make(tmp_path).compile(lowered[1], "a")
    monkeypatch.setattr(kept_programs, what, lambda: value)
    assert make(tmp_path).find("a") is None


def test_program_is_not_found_in_another_environment_or_configuration(tmp_path, lowered, monkeypatch):
    make(tmp_path).compile(lowered[1], "a")
    monkeypatch.setenv("PLORA_NATIVE", "0")
    assert make(tmp_path).find("a") is None
    monkeypatch.undo()
    assert make(tmp_path).find("a") is not None
    with jax.default_matmul_precision("highest"):
        assert make(tmp_path).find("a") is None


@pytest.mark.usefixtures("jax_cache")
def test_program_is_found_in_a_folder_that_was_moved(tmp_path, lowered, monkeypatch):
    make(tmp_path / "a").compile(lowered[1], "a")
    (tmp_path / "a").rename(tmp_path / "b")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "b"))
    use_persistent_cache(tmp_path / "b")
    assert make(tmp_path / "b").find("a") is not None


def test_other_sources_that_lower_to_the_same_text_share_the_program(tmp_path, lowered, monkeypatch):
    make(tmp_path).compile(lowered[1], "a")
    before = make(tmp_path).find("a")
    monkeypatch.setattr(kept_programs, "_sources", lambda: "other")
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: pytest.fail("compiled again"))
    make(tmp_path).compile(lowered[1], "a")
    assert make(tmp_path).find("a") == before


def test_damaged_file_is_not_loaded_and_written_anew(tmp_path, lowered):
    make(tmp_path).compile(lowered[1], "a")
    path = make(tmp_path).find("a")
    assert path is not None
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    assert make(tmp_path).load(path) is None
    path.write_bytes(b"")
    assert make(tmp_path).load(path) is None


@pytest.mark.usefixtures("jax_cache")
def test_program_from_jax_cache_is_not_kept_and_a_warning_says_what_to_do(tmp_path, lowered, caplog):
    lowered[1].compile()
    jax.clear_caches()
    folder = tmp_path / "steps"
    with caplog.at_level(logging.WARNING):
        make(folder).compile(_lower(lowered[0]), "a")
    assert make(folder).find("a") is None
    assert "cannot be kept whole" in caplog.text
    assert f"delete {tmp_path} once" in caplog.text


def test_folder_that_cannot_be_written_warns_and_the_program_serves(tmp_path, lowered, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        program = make(tmp_path / "file" / "steps").compile(lowered[1], "a")
    assert "a compiled program is not kept" in caplog.text
    np.testing.assert_array_equal(program(np.zeros(16, np.int32)), lowered[0])


def test_without_a_folder_nothing_is_kept_or_found(lowered):
    program = make(None).compile(lowered[1], "a")
    np.testing.assert_array_equal(program(np.zeros(16, np.int32)), lowered[0])
    assert make(None).find("a") is None


def test_part_that_does_not_say_what_it_is_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="at 0x"):
        make(tmp_path).find(object())


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16", "quantization": "int8", "tensor_parallel_size": 2}], ids=["plain", "shards"]
)
def test_later_start_lowers_nothing_and_gives_the_same_tokens(tmp_path, pack, options):
    first, second = (_start(pack, tmp_path, options) for _ in range(2))
    assert first["lowered"] > 0
    assert second == {**first, "lowered": 0}
    assert first["compiled in traffic"] == 0
    if options:
        return
    # A half file, as of a full disk, costs a start nothing but time.
    for path in (tmp_path / STEPS_FOLDER).glob("*.program"):
        path.write_bytes(path.read_bytes()[:1000])
    assert _start(pack, tmp_path, options)["tokens"] == first["tokens"]


def _start(pack: Path, folder: Path, options: dict) -> dict:
    command = [sys.executable, str(START), str(pack / "models" / MODEL), str(folder), json.dumps(options)]
    devices = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": devices}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])
