"""Takes room in the pool for an adapter and writes its pages there, a few between two steps."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np

from memory_pool import adapter_streams as streams
from memory_pool.adapter_entry import CapacityError, Entry, flat
from memory_pool.adapter_streams import Modules
from memory_pool.ledger import Crossing, Ledger
from memory_pool.page_memory import PageMemory
from memory_pool.pool_pages import PoolPages


class AdapterWriter:
    """The part of the pool that adapters take.

    Args:
        memory: page arrays.
        pages: pages of the pool, which KV takes too.
        striped: stripe s of an adapter lies on pool device s; else all of it on the device with most room.
        keep_for_kv: pages of the pool that adapters never take.
        ledger: told what crosses the link: pages that get into the pool by way of the device.

    Attributes:
        held: pages taken, also by adapters that are being written.
    """

    def __init__(
        self, memory: PageMemory, pages: PoolPages, *, striped: bool, keep_for_kv: int, ledger: Ledger
    ) -> None:
        self._memory, self._pages, self._striped, self._keep_for_kv = memory, pages, striped, keep_for_kv
        self._ledger = ledger
        self._lock = threading.Lock()
        self.held = 0

    def write(self, entry: Entry, modules: Modules, between_steps: Callable[[Callable[[], None]], None]) -> None:
        """Puts an adapter into the pool. May be called from any thread.

        Args:
            entry: the adapter, without pages.
            modules: its matrices.
            between_steps: runs a function on the engine's thread and waits for it.

        Mutates:
            The pages of `entry`.

        Raises:
            CapacityError: no room. Whatever is raised, no page stays taken.
        """
        try:
            between_steps(lambda: self._take(entry))
            for stripe in range(len(entry.ranks)):
                data = streams.pack(
                    modules, self._memory.layout, entry.ranks[stripe], stripe=stripe, stripes=len(entry.ranks)
                )
                self._write_stripe(flat(side.pool[stripe] for side in entry.sides), data, between_steps)
        except BaseException:
            self.give_back(entry)
            raise

    def give_back(self, entry: Entry) -> None:
        """Frees the pool pages of an adapter. May be called from any thread."""
        pages = entry.pool_pages
        with self._lock:
            self.held -= len(pages)
        self._pages.free(pages)

    def check_integrity(self, entries: list[Entry]) -> None:
        """Raises AssertionError unless these adapters hold exactly the pool pages that they should, each once."""
        self._pages.check_integrity()
        pool = flat(entry.pool_pages for entry in entries)
        assert len(pool) == len(set(pool)), "a pool page is held twice"
        assert len(pool) <= self.held <= self._pages.num_usable - self._keep_for_kv, "pool pages"
        assert all(self._pages.references(page) == 1 for page in pool), "a pool page is not held once"
        for side in (side for entry in entries for side in entry.sides):
            assert [len(pages) for pages in side.pool] == side.counts, "a side has other pages than it needs"
            for stripe, pages in enumerate(side.pool):
                homes = {self._pages.device_of(page) for page in pages}
                assert homes <= {stripe} if self._striped else len(homes) <= 1, "a stripe is on another pool device"

    def _take(self, entry: Entry) -> None:
        """On the engine's thread: checks all stripes for room, then takes the pages of all."""
        stripes = list(zip(*(side.counts for side in entry.sides), strict=True))
        devices = list(range(len(stripes))) if self._striped else [self._pages.roomiest()]
        self._check_room([sum(counts) for counts in stripes], devices)
        for device, counts in zip(devices, stripes, strict=True):
            for side, count in zip(entry.sides, counts, strict=True):
                side.pool.append(self._pages.alloc(count, device=device))
        with self._lock:
            self.held += sum(map(sum, stripes))

    def _check_room(self, wanted: list[int], devices: list[int]) -> None:
        total, free = sum(wanted), self._pages.free_by_device
        kv = max(0, self._pages.num_usable - sum(free) - self.held)
        keep = max(0, self._keep_for_kv - kv)
        missing = max(need - free[device] for need, device in zip(wanted, devices, strict=True))
        missing = max(missing, -(-(total + keep - sum(free)) // len(free)))
        if missing <= 0:
            return
        page, per_device = self._memory.page_bytes, self._pages.usable_per_device + 1
        gb = math.ceil((per_device + missing) * len(free) * page / 2**30 * 1000) / 1000
        kept = f", {keep * page / 2**20:.1f} MB of it kept for the longest sequence" if keep else ""
        raise CapacityError(
            f"an adapter of {total * page / 2**20:.1f} MB ({'striped over' if self._striped else 'pinned to one of'} "
            f"{len(free)} pool devices) does not fit: {sum(free) * page / 2**20:.1f} MB of the pool are free, at most "
            f"{max(free) * page / 2**20:.1f} MB on one device{kept}: raise --pool_memory_gb to {gb:g} or more, or "
            "unload adapters"
        )

    def _write_stripe(
        self, ids: list[int], data: np.ndarray, between_steps: Callable[[Callable[[], None]], None]
    ) -> None:
        for start in range(0, len(ids), self._memory.copy_pages):
            chunk = slice(start, start + self._memory.copy_pages)

            def write(chunk: slice = chunk) -> None:
                if moved := self._memory.write(ids[chunk], data[:, chunk]):
                    crossing = Crossing("adapter", "home", "to_pool", "load")
                    self._ledger.add(crossing, moved_bytes=moved, useful_bytes=moved)

            between_steps(write)
