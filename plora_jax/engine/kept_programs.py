"""Compiled programs kept whole on disk, so that a later start neither traces nor lowers them.

JAX's persistent cache is asked with the lowered program, and lowering the default model's four takes five seconds of
Python. A program here is asked for by everything that it is made from: the sources of this package and of those below
it, versions, the configuration of JAX, the machine's processor, and what the caller adds (shapes, model, sizes). Where
any of that differs the program is lowered; where what comes of it is the text of a program that is kept, as after a
change of sources that changes no program, that one serves, else it is compiled. A file that cannot be read or loaded
counts as absent.

As JAX's cache, the folder holds what is run as it is: nobody else may write there.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import platform
import tempfile
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

from strategies.native import cpu_flags

logger = logging.getLogger(__name__)

STEPS_FOLDER = "steps"
"""Where the compiled steps are kept whole, in the folder of JAX's cache."""

_FOLDERS = ("memory_pool", "strategies", "plora_jax")
_ENVIRONMENT = ("PLORA_", "JAX_", "XLA_", "LIBTPU_")
_OF_CACHES = ("jax_compilation_cache_dir", "jax_persistent_cache", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE")
"""Where JAX's own cache is and what it takes changes no program: a folder may be moved."""

_NAMES_COUNT = "jax_compilation_cache_include_metadata_in_key"
_HIT_EVENT = "/jax/compilation_cache/cache_hits"

_local = threading.local()


def _hits_here() -> int:
    """How many programs this thread has had from JAX's cache."""
    return getattr(_local, "hits", 0)


def _listen(event: str, **kwargs: str | int) -> None:
    if event == _HIT_EVENT:
        _local.hits = _hits_here() + 1


jax.monitoring.register_event_listener(_listen)


class KeptPrograms:
    """A folder of compiled programs. Any thread.

    Args:
        folder: made when the first program is kept; None keeps nothing and finds nothing.
        devices: that the programs run on, in the order of their mesh.
    """

    def __init__(self, folder: Path | None, devices: Sequence[Any]) -> None:
        self._folder, self._devices = folder, list(devices)
        self._warned = False

    def find(self, *parts: Any) -> Path | None:
        """Where the program is that was made from `parts` and these sources; None where none is kept.

        Args:
            parts: all that it is made from besides; their `repr` has to say it.
        """
        if self._folder is None:
            return None
        try:
            program = self._folder / self._note(parts).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        return program if program.is_file() else None

    def load(self, path: Path) -> jax.stages.Compiled | None:
        """A program that was kept; None where the file is damaged or cannot be loaded here.

        Cost:
            Half a second of one core for a step of the default model; other threads of Python go on meanwhile.
        """
        try:
            content = path.read_bytes()
            digest, data = content[:32], content[32:]
            if hashlib.sha256(data).digest() != digest:
                raise ValueError(f"{path} is damaged")
            program, in_tree, out_tree = pickle.loads(zlib.decompress(data))
            return serialize_executable.deserialize_and_load(
                program, in_tree, out_tree, backend=self._devices[0].client, execution_devices=self._devices
            )
        # Backends refuse by many kinds of errors, some of their own; whatever it is, the program can be made anew.
        except Exception as error:
            logger.warning("a kept program is made anew: %s: %s", type(error).__name__, error)
            return None

    def compile(self, lowered: jax.stages.Lowered, *parts: Any) -> jax.stages.Compiled:
        """The program of what was lowered from `parts`: one that is kept with this text, or else compiled and kept."""
        if self._folder is None:
            return lowered.compile()
        # Texts have no names of operations in them unless they are asked for.
        names = jax.config.values[_NAMES_COUNT]
        path = self._folder / f"{_hash(_surroundings(), *parts, lowered.as_text(debug_info=names))}.program"
        found = self.load(path) if path.is_file() else None
        if found is None:
            hits = _hits_here()
            found = lowered.compile()
            if _hits_here() > hits:
                # XLA does not write again what it has read: the file would lack the code.
                self._warn_of_jax_cache()
                return found
            if not self._keep(found, path):
                return found
        self._write(self._note(parts), path.name.encode())
        return found

    def _warn_of_jax_cache(self) -> None:
        assert self._folder is not None
        if not self._warned:
            logger.warning(
                "compiled programs came from JAX's cache and cannot be kept whole, so that starts take seconds longer: "
                "delete %s once",
                self._folder.parent,
            )
        self._warned = True

    def _note(self, parts: Sequence[Any]) -> Path:
        """The file that names the program that these sources make of `parts`."""
        assert self._folder is not None
        return self._folder / f"{_hash(_sources(), _surroundings(), *parts)}.made"

    def _keep(self, compiled: jax.stages.Compiled, path: Path) -> bool:
        try:
            data = zlib.compress(pickle.dumps(serialize_executable.serialize(compiled)), level=1)
        # As above.
        except Exception as error:
            logger.info("a compiled program is not kept: %s: %s", type(error).__name__, error)
            return False
        return self._write(path, hashlib.sha256(data).digest() + data)

    def _write(self, path: Path, content: bytes) -> bool:
        """Under another name first, so that two starts at once, or a killed one, leave no half file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                os.replace(name, path)
            finally:
                Path(name).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a compiled program is not kept: %s", error)
            return False
        return True


def described(arguments: Any) -> str:
    """Shapes, dtypes and shardings of the arrays that a program is called with, and their places in the tree."""
    leaves, structure = jax.tree.flatten(arguments)
    return f"{structure}{[(leaf.shape, str(np.dtype(leaf.dtype)), leaf.sharding) for leaf in leaves]}"


def _hash(*parts: Any) -> str:
    said = "\n".join(map(repr, parts))
    # An address says nothing of what is there.
    assert " at 0x" not in said, said
    return hashlib.sha256(said.encode()).hexdigest()


def _surroundings() -> str:
    """What every program of this process is made from, besides its own parts."""
    device = jax.local_devices()[0]
    environment = sorted(
        pair for pair in os.environ.items() if pair[0].startswith(_ENVIRONMENT) and not pair[0].startswith(_OF_CACHES)
    )
    backend = device.platform, device.device_kind, device.client.platform_version, jax.device_count()
    machine = platform.machine(), cpu_flags(), os.cpu_count()
    # As it is in this thread: a context manager may have changed it here alone.
    settings = sorted(pair for pair in jax.config.values.items() if not pair[0].startswith(_OF_CACHES))
    config = [(name, getattr(jax.config, name, value)) for name, value in settings]
    return repr((_versions(), config, environment, backend, machine))


def _versions() -> tuple[str, ...]:
    return platform.python_version(), *(module.__version__ for module in (jax, jaxlib, flax, np))


@functools.cache
def _sources() -> str:
    """A hash of every source file that can have a part in a program."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
