"""How much memory there is: of the machine, as far as this process may use it, and of a device.

Asked before anything is allocated: a budget beyond it fails only when its pages are touched, and then by a signal.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_MEMINFO = "/proc/meminfo"


def host_bytes(*, meminfo: str = _MEMINFO, cgroup_limits: tuple[str, ...] = _CGROUP_LIMITS) -> int | None:
    """Memory and swap of this machine, bytes; less where the process is held to less. None where nothing tells.

    Args:
        meminfo: file of Linux with the sizes of both.
        cgroup_limits: files with the limit of a container, the first of which that holds a number counts.
    """
    known = [size for size in (_machine_bytes(meminfo), _limit_bytes(cgroup_limits)) if size is not None]
    return min(known, default=None)


def device_bytes(device: Any) -> int | None:
    """Memory of a JAX device that programs may take, bytes; None where it is the machine's or nothing tells."""
    if device.platform == "cpu":
        return None
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def _machine_bytes(meminfo: str) -> int | None:
    try:
        lines = pathlib.Path(meminfo).read_text().splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return sizes["MemTotal"] + sizes.get("SwapTotal", 0)
    except (OSError, ValueError, IndexError, KeyError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _limit_bytes(files: tuple[str, ...]) -> int | None:
    for file in files:
        try:
            return int(pathlib.Path(file).read_text())
        # "max" is no number and no limit.
        except (OSError, ValueError):
            continue
    return None
