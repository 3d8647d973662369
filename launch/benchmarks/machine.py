"""The machine and the software that a measurement belongs to."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re

import jax


def describe_machine() -> dict[str, str | int]:
    """CPU, cores this process may use and memory of this machine."""
    return {"cpu": cpu_name(), "cores": usable_cores(), "memory_bytes": memory_bytes()}


def describe_software() -> dict[str, str]:
    """Versions, and the devices that JAX computes on."""
    devices = jax.local_devices()
    kind = devices[0].platform if devices[0].platform == devices[0].device_kind else devices[0].device_kind
    return {
        "plora_jax": importlib.metadata.version("plora_jax"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": f"{len(devices)} x {kind}",
    }


def cpu_name(cpuinfo: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> str:
    """The CPU's own name where the system tells it, else its architecture."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resident_bytes(status: pathlib.Path = pathlib.Path("/proc/self/statm")) -> int:
    """Memory of this process that is in use now; 0 where the system does not tell.

    Args:
        status: file whose second number are its pages.
    """
    try:
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def last_level_cache_bytes(system: pathlib.Path = pathlib.Path("/sys/devices/system/cpu")) -> int | None:
    """Last-level cache of all cores, every cache of that level counted once; None where the system does not tell.

    Args:
        system: directory with one directory a core.
    """
    sizes: dict[tuple[int, str], int] = {}
    for folder in system.glob("cpu[0-9]*/cache/index*"):
        try:
            level, size, cores = ((folder / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
        except OSError:
            continue
        if found := re.fullmatch(r"(\d+)([KMG]?)", size):
            sizes[int(level), cores] = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]
    last = max((level for level, _ in sizes), default=None)
    return sum(size for (level, _), size in sizes.items() if level == last) or None
