"""One small engine of the conformance pack for all tests of this floor: the same sizes everywhere, so that its programs
are compiled once and read from the cache of the test run after that."""

from __future__ import annotations

import pathlib

from plora_jax.engine.build import EngineConfig

ROOT = pathlib.Path(__file__).parents[2]
PACK = ROOT / "tests" / "data" / "conformance"
LLAMA = PACK / "models" / "llama"
CACHE = ROOT / ".pytest_cache" / "xla"
SIZES = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "device_kv_mb": 1,
    "device_adapter_mb": 1,
    "pool_memory_gb": 0.125,
}


def small_config(**options: object) -> EngineConfig:
    """Those sizes, with changes."""
    return EngineConfig(**{"model": str(LLAMA), "compilation_cache_dir": str(CACHE), **SIZES, **options})


def small_flags() -> list[str]:
    """The same as flags."""
    sizes = [f"--{name}={value}" for name, value in SIZES.items()]
    return [f"--model={LLAMA}", f"--compilation_cache_dir={CACHE}", *sizes]
