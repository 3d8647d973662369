"""Huge pages under arrays: asked for where there are any, never harmful."""

import platform
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from memory_pool import allocate, device_sharding, one_device_mesh, pool_sharding
from memory_pool.huge_pages import settle, use_huge_pages

OFFERED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
KERNEL = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


def test_huge_pages_leave_arrays_as_they_are():
    mesh = one_device_mesh()
    arrays = [
        allocate((n,), np.uint16, place(mesh)) for n in (0, 7, 3 << 20) for place in (device_sharding, pool_sharding)
    ]
    use_huge_pages(arrays)
    settle((), arrays).join()
    assert not any(np.asarray(array).any() for array in arrays)


@pytest.mark.skipif(
    not OFFERED.exists() or "[never]" in OFFERED.read_text(), reason="the system offers no transparent huge pages"
)
def test_huge_pages_are_under_a_large_array_afterwards():
    array = allocate((32 << 20,), np.uint16, pool_sharding(one_device_mesh()))
    array.block_until_ready()
    start = array.unsafe_buffer_pointer()
    use_huge_pages([array])
    settle((), [array]).join()
    assert _huge_kb(start + (32 << 20)) > 0


def test_moving_to_huge_pages_leaves_arrays_as_they_are():
    arrays = [jnp.arange(n, dtype=jnp.int32) for n in (0, 7, 3 << 20)]
    settle(arrays).join()
    for array in arrays:
        assert (np.asarray(array) == np.arange(array.size)).all()


@pytest.mark.skipif(
    not OFFERED.exists() or "[never]" in OFFERED.read_text() or KERNEL < (6, 1),
    reason="the system moves nothing to huge pages on request",
)
def test_array_that_was_moved_is_on_huge_pages():
    array = jnp.arange(16 << 20, dtype=jnp.int32).block_until_ready()
    start = array.unsafe_buffer_pointer()
    settle([array]).join()
    assert _huge_kb(start + (32 << 20)) > 0


def _huge_kb(address: int) -> int:
    """Huge pages of the mapping that holds an address, KB (man 5 proc)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(x, 16) for x in head.split("-"))
            inside = first <= address < last
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1])
    return 0
