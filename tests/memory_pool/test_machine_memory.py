from types import SimpleNamespace

import jax
import pytest

from memory_pool.machine_memory import device_bytes, host_bytes

MEMINFO = "MemTotal:       16000 kB\nMemFree:  1 kB\nHugePages_Total:  0\nSwapTotal:  384 kB\n"


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 16384 * 1024), ("max\n", 16384 * 1024), ("4096\n", 4096), (str(2**62), 16384 * 1024)]
)
def test_host_bytes_is_memory_and_swap_or_the_limit_of_the_container(tmp_path, limit, expected):
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text(MEMINFO)
    if limit is not None:
        cgroup.write_text(limit)
    assert host_bytes(meminfo=str(meminfo), cgroup_limits=(str(tmp_path / "none"), str(cgroup))) == expected


def test_host_bytes_without_meminfo_asks_the_system(tmp_path):
    assert host_bytes(meminfo=str(tmp_path / "none"), cgroup_limits=()) > 2**20


def test_device_bytes_are_told_by_accelerators_only():
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 7})
    silent = SimpleNamespace(platform="tpu", memory_stats=lambda: None)
    assert (device_bytes(gpu), device_bytes(silent), device_bytes(jax.local_devices()[0])) == (7, None, None)
