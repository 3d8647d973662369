"""Freed memory that is used again: a step's temporary arrays lie where those of the last step did.

They are tens of MB, which the C library by default takes from the system and gives back at each step: the first touch
of each 4 KB of them is a page fault, zeros to write and another page to translate. Kept, a run of `python -m
launch.bench throughput --case=peers-32 --quantization=int8` has none of 165,000 faults, and takes 12 s of processor
time, not 12.8 (by getrusage, 2 cores).
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGEST_BYTES = 1 << 30
_PADDING_BYTES = 128 << 20
"""More than a heap of a thread, 64 MB: the last one of them is kept too."""


def keep_freed_memory() -> bool:
    """Has memory up to 1 GB that is freed used again rather than given back, by this process from now on.

    To be called when what is large and used once, as a checkpoint that was read, has been freed.

    Returns:
        Whether the C library has such settings; without (musl, macOS) everything stays as it is.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST_BYTES), (_TRIM_THRESHOLD, _LARGEST_BYTES), (_TOP_PAD, _PADDING_BYTES))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)
