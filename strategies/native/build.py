"""Builds the sources beside it once a machine, and registers their functions with XLA.

The library is kept under ~/.cache/plora_jax/native (or $PLORA_NATIVE_DIR), by a hash of what it is made from. Without a
compiler, or with PLORA_NATIVE=0, nothing is built and the XLA implementations serve.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

try:
    import fcntl
except ImportError:  # Windows has none: two starts at once build twice
    fcntl = None

_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cc")))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w")
_TARGETS = (
    "plora_shrink",
    "plora_expand",
    "plora_delta",
    "plora_add",
    "plora_tile_shrink",
    "plora_tile_expand",
    "plora_tile_delta",
    "plora_tile_add",
    "plora_rows",
    "plora_partial_attention",
    "plora_int8_partial_attention",
    "plora_products",
    "plora_int8_products",
    "plora_block_products",
    "plora_gated",
    "plora_add_rows",
    "plora_rms_norm",
    "plora_add_rms_norm",
    "plora_rotate",
    "plora_write_kv",
    "plora_int8_write_kv",
    "plora_first_best",
)
_BUILD_LIMIT_S = 300


@functools.cache
def unavailable() -> str | None:
    """Builds and registers the kernels at the first call; None when they can be used, else why not."""
    if os.environ.get("PLORA_NATIVE", "1") == "0":
        return "switched off by PLORA_NATIVE=0"
    compiler = _compiler()
    if not compiler:
        return "no C++ compiler (g++ or clang++) was found"
    try:
        library = _load(compiler)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines() or ["it said nothing"]
        line = next((line for line in said if "error" in line), said[0])
        return f"{compiler} could not build the native kernels (exit status {error.returncode}): {line}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"the native kernels could not be built: {error}"
    for target in _TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return None


def function(name: str) -> Any:
    """A function of the library that is not XLA's, as ctypes has it.

    Raises:
        RuntimeError: the library is unavailable.
    """
    if reason := unavailable():
        raise RuntimeError(f"no native {name}: {reason}")
    return getattr(_load(_compiler() or ""), name)


@functools.cache
def matrix_unit_unavailable() -> str | None:
    """None when products can run on the processor's matrix unit, else why not."""
    return _unit_unavailable("plora_matrix_unit", "bfloat16")


@functools.cache
def int8_unit_unavailable() -> str | None:
    """None when products with int8 weights can run on the processor's matrix unit, else why not."""
    return _unit_unavailable("plora_int8_unit", "int8")


@functools.cache
def block_unit_unavailable() -> str | None:
    """None when products with weights of 4 bits can run on the processor, else why not."""
    return _unavailable("plora_block_unit", "products of 8-bit integers (AVX-512 VNNI)")


def _unit_unavailable(asks: str, numbers: str) -> str | None:
    return _unavailable(asks, f"matrix unit for {numbers} (AMX)")


def _unavailable(asks: str, what: str) -> str | None:
    if reason := unavailable():
        return reason
    return None if function(asks)() else f"this processor has no {what}"


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@functools.cache
def _load(compiler: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(_library(compiler)))


def _library(compiler: str) -> Path:
    """Path of the shared library, built when it is not there yet."""
    files = [path.read_bytes() for path in (*_SOURCES, *_HEADERS)]
    made_from = (files, compiler, _FLAGS, jax.__version__, platform.machine(), cpu_flags())
    digest = hashlib.sha256(repr(made_from).encode()).hexdigest()[:20]
    directory = Path(os.environ.get("PLORA_NATIVE_DIR", "~/.cache/plora_jax/native")).expanduser()
    path = directory / f"kernels-{digest}.so"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with _alone_in(directory):
        if not path.exists():  # another process may have built it meanwhile
            _build(compiler, path)
    return path


def _build(compiler: str, path: Path) -> None:
    # Under another name and moved, so that a start that is killed leaves no half library.
    with tempfile.TemporaryDirectory(dir=path.parent) as room:

        def run(*arguments: str) -> None:
            command = [compiler, *_FLAGS, *arguments]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_LIMIT_S)

        def compiled(source: Path) -> str:
            to = str(Path(room) / f"{source.stem}.o")
            run(f"-I{jax.ffi.include_dir()}", "-c", str(source), "-o", to)
            return to

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compiled, _SOURCES))
        run(*objects, "-o", f"{room}/{path.name}")
        os.replace(f"{room}/{path.name}", path)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Waits until no other process is in here; one that is killed is not."""
    if fcntl is None:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def cpu_flags() -> str:
    """What -march=native depends on: a home directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
