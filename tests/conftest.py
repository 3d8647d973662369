"""Settings of the whole test run."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Set before JAX is imported: the tests mean the CPU, whatever else the machine has.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test run is compilation of programs that compute little: half the time without LLVM's optimisations.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

from plora_jax.engine.compile import use_persistent_cache

# A shell has what it starts in the background ignore interrupts; tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
PACK = ROOT / "tests" / "data" / "conformance"


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache() -> None:
    """Programs that several tests need are compiled once, and not at all in a second run."""
    use_persistent_cache(ROOT / ".pytest_cache" / "xla")


@pytest.fixture(scope="module", autouse=True)
def _free_memory() -> Iterator[None]:
    """Engines are cycles of objects with large arrays, and traced programs slow down every later collection."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _names_in_keys() -> Iterator[None]:
    """Launches that profile have JAX's cache tell programs with other names apart, for the whole process."""
    setting = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[setting]
    yield
    jax.config.update(setting, before)


@pytest.fixture(scope="session")
def pack() -> Path:
    """The conformance pack: tiny random models and adapters with golden logits and tokens."""
    return PACK
