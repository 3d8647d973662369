"""Compilation, all of it before traffic: one program a bucket, counted, kept on disk between runs."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts every program the backend compiles in this process, those read from JAX's cache included.

    Steps that were kept whole (`kept_programs`) are not among them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self._count += 1

    @property
    def count(self) -> int:
        return self._count


counter = CompileCounter()


def use_persistent_cache(directory: str | os.PathLike[str]) -> Path | None:
    """Keeps compiled programs in `directory`, so that a later start reads them instead of compiling.

    Returns:
        Its path; None where it cannot be written: a warning says why, and every start compiles.

    Mutates:
        The process-wide JAX configuration.
    """
    try:
        path = Path(directory).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory to put for ~.
        logger.warning("compiled programs are not kept: %s; set --compilation_cache_dir to a folder of yours", error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
