"""Pages that are cold: so many that none is still in the cache when its turn comes again, and how fast they are read.

Pages are dealt round after round in one shuffled order, so a page comes back only after all others. With four times
the last-level cache in pages, what is measured on them is bound by memory. The rate that it is held against is a
streaming read of the same pages by all cores, in the same run.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from launch.benchmarks.machine import last_level_cache_bytes, memory_bytes, usable_cores
from memory_pool.layout import PageLayout
from memory_pool.link import one_device_mesh
from memory_pool.page_memory import PageMemory

CACHE_MULTIPLE = 4
MEMORY_SHARE = 1 / 6
UNKNOWN_CACHE_BYTES = 64 * 2**20
_FILL_PAGES = 64


class ColdSize(NamedTuple):
    """How many bytes are cycled through.

    Attributes:
        num_bytes: in the pool, and as many on the device.
        cache_bytes: last-level cache; None where the system does not tell.
        note: what a reader must know of it, empty when it is as large as it should be.
    """

    num_bytes: int
    cache_bytes: int | None
    note: str


def cold_size(wanted_bytes: int | None) -> ColdSize:
    """Bytes to cycle through: four times the last-level cache, where a sixth of the memory holds that.

    Args:
        wanted_bytes: stands over it; None for that size.
    """
    cache = last_level_cache_bytes()
    want, most = CACHE_MULTIPLE * (cache or UNKNOWN_CACHE_BYTES), int(MEMORY_SHARE * memory_bytes())
    size = min(want, most) if wanted_bytes is None else wanted_bytes
    if cache is None:
        return ColdSize(size, cache, "the size of the last-level cache is not known: figures may be those of a cache")
    if size < want:
        why = "a sixth of the memory" if wanted_bytes is None else "as asked for"
        return ColdSize(
            size, cache, f"{size / cache:.2g} times the last-level cache ({why}), not {CACHE_MULTIPLE}: part is cached"
        )
    return ColdSize(size, cache, "")


class ColdPages:
    """Page arrays full of finite numbers, in the pool and on the device.

    Args:
        layout: of a page.
        num_bytes: of the pages of each of the two, rounded up to whole pages.
        seed: of the numbers and of the order.
    """

    def __init__(self, layout: PageLayout, *, num_bytes: int, seed: int = 0) -> None:
        self.layout = layout
        self.mesh = one_device_mesh()
        count = max(1, -(-num_bytes // layout.page_bytes))
        self.memory = PageMemory(
            layout, self.mesh, pool_devices=1, pool_pages=count + 1, adapter_pages=count + 1, kv_pages=2
        )
        rng = np.random.default_rng(seed)
        self._fill(count, rng)
        self._order = {space: 1 + rng.permutation(count).astype(np.int32) for space in ("pool", "device")}
        self._next = dict.fromkeys(self._order, 0)
        self._words = np.asarray(self.memory.pool).reshape(-1).view(np.uint32)
        self._cores = usable_cores()
        self._threads = ThreadPoolExecutor(self._cores)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool's pages, which a streaming read reads."""
        return self._words.nbytes

    def take(self, space: str, count: int) -> np.ndarray:
        """The next pages in the order of the round.

        Args:
            space: "pool" or "device".
            count: pages; some more than once where there are fewer.

        Returns:
            [count] int32.
        """
        order, start = self._order[space], self._next[space]
        self._next[space] = (start + count) % len(order)
        return order[(start + np.arange(count)) % len(order)]

    def stream_s(self) -> float:
        """Seconds to read all pages of the pool once, each core its own part from end to end."""
        parts = np.array_split(self._words, self._cores)
        started = time.perf_counter()
        # The maximum runs at some 70 GB/s a core on cached numbers, so memory is what it waits for.
        list(self._threads.map(np.maximum.reduce, parts))
        return time.perf_counter() - started

    def _fill(self, count: int, rng: np.random.Generator) -> None:
        layout = self.layout
        shape = (layout.num_layers, _FILL_PAGES, layout.page_width)
        numbers = (0.05 * rng.standard_normal(shape, np.float32)).astype(layout.dtype)
        raw = numbers.view(f"uint{8 * layout.dtype.itemsize}")
        for start in range(0, count, _FILL_PAGES):
            ids = range(1 + start, 1 + min(start + _FILL_PAGES, count))
            self.memory.write(ids, raw[:, : len(ids)])
            self.memory.load_adapters(ids, ids)
