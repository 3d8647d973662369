"""KV pages of sequences whose home is the pool.

Each page of a sequence has a pool page from the moment it is begun, so writing it there can never fail. Pages that a
step writes to are on the device; one that is full is written to the pool, and what is left on the device is a copy:
it saves reading the page over the link, and dropping it costs nothing. A sequence that has to wait is suspended: the
page it was filling is written as well, so that all its device pages are copies, and it goes on later where it was.

    if pool.lack(handle, end) is None: pool.extend(handle, end)       # before a step that computes up to `end`
    pool.commit([(handle, end), ...])                                 # after it

How many copies stay is up to a planner (`keep`); where there is room for more than there are, `bring` copies pages of
running sequences back, a few between two steps.

Host state in plain Python and numpy, owned by the engine's thread.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import numpy as np

from memory_pool.eviction import EvictionPolicy, LeastRecentlyUsed
from memory_pool.kv_handle import ABSENT, KvHandle
from memory_pool.ledger import Crossing, Ledger
from memory_pool.pages import PageAllocator

__all__ = ["ABSENT", "HomePages", "KvHandle", "KvMover", "KvPool", "Lack"]

_ORDERED = 64
"""Copies whose order of leaving is worked out at once: sorting all for each page would take longer than the step."""


class HomePages(Protocol):
    """Pages of the pool; others may take from them as well."""

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can give out now."""
        ...

    def can_alloc(self, n: int, /) -> bool: ...
    def alloc(self, n: int, /) -> Sequence[int]: ...
    def free(self, pages: Iterable[int], /) -> None: ...
    def check_integrity(self) -> None: ...


class KvMover(Protocol):
    """Copies KV pages between device and pool; both return the bytes that crossed the link."""

    def save_kv(self, pool_ids: Sequence[int], device_ids: Sequence[int]) -> int: ...
    def load_kv(self, device_ids: Sequence[int], pool_ids: Sequence[int]) -> int: ...


class Lack(enum.Enum):
    """What there is too little of."""

    POOL = "pool pages"
    DEVICE = "device pages"


class KvPool:
    """Gives sequences their pages, in the pool and on the device, and keeps both in step.

    Args:
        pool: pages of the pool.
        device: KV pages of the device; nobody else takes from them.
        mover: copies pages.
        page_tokens: G.
        token_bytes: bytes of the keys and values of one token, all layers and shards.
        policy: which copies leave the device first; the least recently written by default.
        keep_copies: most device pages that hold copies between two steps; None for all that are free.
        ledger: told what crosses the link, as strategy "home", phase "load".
    """

    def __init__(
        self,
        pool: HomePages,
        device: PageAllocator,
        mover: KvMover,
        *,
        page_tokens: int,
        token_bytes: int,
        policy: EvictionPolicy | None = None,
        keep_copies: int | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.page_tokens = page_tokens
        self._pool, self._device, self._mover = pool, device, mover
        self._token_bytes, self._ledger = token_bytes, ledger or Ledger()
        self._policy: EvictionPolicy = policy or LeastRecentlyUsed()
        self._most_copies = device.num_usable if keep_copies is None else keep_copies
        self._handles: set[KvHandle] = set()
        self._copies: dict[int, tuple[KvHandle, int]] = {}  # device page -> what it is a copy of
        self._leaving: collections.deque[tuple[int, tuple[KvHandle, int]]] = collections.deque()
        self._held = 0
        self._restores = 0

    @property
    def num_device_pages(self) -> int:
        """Device pages there are, taken or not."""
        return self._device.num_usable

    @property
    def num_free_pages(self) -> int:
        """Pool pages that sequences can take now."""
        return self._pool.num_free

    @property
    def num_held_pages(self) -> int:
        """Pool pages that sequences hold."""
        return self._held

    @property
    def num_copies(self) -> int:
        """Device pages that hold copies."""
        return len(self._copies)

    @property
    def usage(self) -> float:
        """Pool pages that sequences hold, as a share of those and the free ones, 0 to 1. Any thread."""
        held = self._held
        return held / max(held + self._pool.num_free, 1)

    @property
    def restores(self) -> int:
        """Pages brought back to the device, since the start."""
        return self._restores

    def pages_for(self, tokens: int) -> int:
        """Pages of that many tokens."""
        return -(-tokens // self.page_tokens)

    def open(self) -> KvHandle:
        """A handle that holds nothing yet; it need not be closed before it is extended."""
        return KvHandle()

    def lack(self, handle: KvHandle, end: int) -> Lack | None:
        """What stands against `extend(handle, end)`; None where it would succeed. Does not mutate."""
        if end <= handle.ready:
            return None
        stop = self.pages_for(end)
        if stop > handle.num_pages and not self._pool.can_alloc(stop - handle.num_pages):
            return Lack.POOL
        needed = stop - handle.computed // self.page_tokens - self._writable(handle)
        return Lack.DEVICE if needed > self._device.num_free + len(self._copies) else None

    def room(self, handle: KvHandle) -> int:
        """How many tokens after those computed `extend` could give pages to. Does not mutate."""
        in_pool = (handle.num_pages + self._pool.num_free) * self.page_tokens - handle.computed
        on_device = self._writable(handle) + self._device.num_free + len(self._copies)
        return max(0, min(in_pool, on_device * self.page_tokens - handle.computed % self.page_tokens))

    def extend(self, handle: KvHandle, end: int) -> None:
        """Takes pages for the tokens from those computed to `end`; cannot fail where `lack` is None.

        Every page that these tokens touch is on the device afterwards, one with earlier tokens with its content.
        """
        assert self.lack(handle, end) is None, f"no room to extend to {end} tokens: ask lack first"
        if end <= handle.ready:
            return
        self._handles.add(handle)
        handle.suspended = False
        first, stop = handle.computed // self.page_tokens, self.pages_for(end)
        more = max(0, stop - handle.num_pages)
        handle._begin(self._pool.alloc(more))
        self._held += more
        table = handle.device_table()
        if first < stop and table[first] in self._copies:
            self._forget_copy(int(table[first]))
        missing = (first + np.flatnonzero(table[first:stop] == ABSENT)).tolist()
        self._drop_copies(len(missing) - self._device.num_free)
        for index, page in zip(missing, self._device.alloc(len(missing)), strict=True):
            handle._place(index, page)
        handle.ready = stop * self.page_tokens
        if handle.computed % self.page_tokens and first in missing:
            self._restore(handle, first)

    def commit(self, progress: Iterable[tuple[KvHandle, int]]) -> None:
        """Books what a step computed and writes the pages that became full to the pool, all in one go.

        Args:
            progress: handles, each once, and the tokens of each that are computed; extended to that before.
        """
        done = list(progress)
        full = [
            (handle, index)
            for handle, computed in done
            for index in range(handle.written // self.page_tokens, computed // self.page_tokens)
        ]
        self._save(full, tokens=len(full) * self.page_tokens)
        for handle, computed in done:
            assert handle.computed <= computed <= handle.num_pages * self.page_tokens, (handle.computed, computed)
            handle.computed = computed
            handle.written = max(handle.written, computed // self.page_tokens * self.page_tokens)
        for handle, index in full:
            self._add_copy(handle, index)
        self._drop_copies(len(self._copies) - self._most_copies)

    def keep(self, copies: int | None) -> None:
        """Sets how many device pages may hold copies between two steps, None for all that are free; drops what is over.

        What a step writes to is not a copy and always on the device.
        """
        self._most_copies = self._device.num_usable if copies is None else copies
        self._drop_copies(len(self._copies) - self._most_copies)

    def bring(self, most_pages: int) -> int:
        """Copies up to so many pages of running sequences back to the device, between two steps.

        As many as may be kept; a page for each sequence stays free, so that what is brought is not dropped at once.

        Returns:
            Pages copied.
        """
        on_device = self._device.num_usable - self._device.num_free
        room = min(self._most_copies - len(self._copies), self._device.num_free - len(self._handles))
        count = min(most_pages, room, self._held - on_device)
        if count <= 0:
            return 0
        found: list[tuple[KvHandle, int]] = []
        for handle in self._handles:
            if not handle.suspended and len(found) < count:
                absent = np.flatnonzero(handle.pool_table()[: handle.written // self.page_tokens] != ABSENT)
                found += [(handle, index) for index in absent[: count - len(found)].tolist()]
        if found:
            homes = [int(handle.home_table()[index]) for handle, index in found]
            pages = self._device.alloc(len(found))
            self._count("to_device", self._mover.load_kv(pages, homes), len(found) * self.page_tokens)
            for (handle, index), page in zip(found, pages, strict=True):
                handle._place(index, page)
                self._add_copy(handle, index)
        return len(found)

    def suspend(self, handle: KvHandle) -> None:
        """Writes the page being filled to the pool and gives back all but copies; `extend` resumes it."""
        first, used = handle.computed // self.page_tokens, self.pages_for(handle.computed)
        if handle.written < handle.computed:
            self._save([(handle, first)], tokens=handle.computed % self.page_tokens)
            handle.written = handle.computed
        handle.suspended, handle.ready = True, handle.computed
        self._leaving.clear()
        self._truncate(handle, used)
        if first < used and handle.device_table()[first] != ABSENT:
            self._add_copy(handle, first)
        self._drop_copies(len(self._copies) - self._most_copies)

    def lose_device(self) -> None:
        """Gives all device pages back without their content; handles are at what is written to the pool."""
        for handle in self._handles:
            handle.computed = handle.ready = handle.written
            self._truncate(handle, self.pages_for(handle.written))
            for index in np.flatnonzero(handle.device_table() != ABSENT).tolist():
                page = int(handle.device_table()[index])
                if page in self._copies:
                    self._forget_copy(page)
                handle._place(index, ABSENT)
                self._device.free([page])
        self._leaving.clear()

    def close(self, handle: KvHandle) -> None:
        """Gives everything back; the handle is as one just opened."""
        self._truncate(handle, 0)
        handle.computed = handle.written = handle.ready = 0
        handle.suspended = False
        self._handles.discard(handle)

    def check_integrity(self) -> None:
        """Raises AssertionError unless tables, allocators and copies agree, and every token computed is somewhere."""
        self._device.check_integrity()
        self._pool.check_integrity()
        homes = [page for handle in self._handles for page in handle.home_table().tolist()]
        assert len(set(homes)) == len(homes) == self._held, "a pool page is lost or held twice"
        assert not homes or min(homes) >= 0, "a page has no home"
        on_device = [page for h in self._handles for page in h.device_table().tolist() if page != ABSENT]
        assert len(set(on_device)) == len(on_device), "a device page is held twice"
        assert len(on_device) + self._device.num_free == self._device.num_usable, "a device page is lost"
        for handle in self._handles:
            self._check(handle)
        for page, (handle, index) in self._copies.items():
            assert handle in self._handles, f"device page {page} is a copy of a page that is gone"
            assert handle.device_table()[index] == page, f"device page {page} is not the copy it is thought to be"
        assert len(self._copies) <= self._most_copies, "too many copies are kept"

    def _check(self, handle: KvHandle) -> None:
        size = self.page_tokens
        assert handle.written <= handle.computed <= handle.num_pages * size, "a page is missing"
        assert handle.num_absent == np.count_nonzero(handle.device_table() == ABSENT), "absent pages are miscounted"
        for index in range(handle.num_pages):
            home, device, pool = (int(row[index]) for row in handle._tables)
            assert pool == (home if device == ABSENT else ABSENT), f"the pool table is wrong at page {index}"
            safe = min(handle.computed, (index + 1) * size) <= handle.written
            assert safe or device != ABSENT, f"page {index} is nowhere"
            assert safe or device not in self._copies, f"page {index} counts as a copy but is not in the pool"
            writable = device != ABSENT and device not in self._copies
            assert not (handle.suspended and writable), f"page {index} of a suspended sequence is held on the device"
            ready = handle.computed // size <= index < handle.ready // size
            assert writable == ready, f"page {index} is thought to be ready: {ready}"

    def _writable(self, handle: KvHandle) -> int:
        """Device pages that the handle may write to."""
        return handle.ready // self.page_tokens - handle.computed // self.page_tokens

    def _truncate(self, handle: KvHandle, pages: int) -> None:
        """Gives back all pages from index `pages` on."""
        device = [page for page in handle.device_table()[pages:].tolist() if page != ABSENT]
        for page in device:
            if page in self._copies:
                self._forget_copy(page)
        homes = handle.home_table()[pages:].tolist()
        self._device.free(device)
        self._pool.free(homes)
        self._held -= len(homes)
        handle._end(pages)

    def _add_copy(self, handle: KvHandle, index: int) -> None:
        page = int(handle.device_table()[index])
        self._copies[page] = handle, index
        self._policy.touch(page)

    def _forget_copy(self, page: int) -> None:
        del self._copies[page]
        self._policy.forget(page)

    def _drop_copies(self, count: int) -> None:
        """Gives the device pages of some copies back."""
        for _ in range(count):
            page = self._first_to_leave()
            handle, index = self._copies[page]
            self._forget_copy(page)
            handle._place(index, ABSENT)
            self._device.free([page])

    def _first_to_leave(self) -> int:
        """The copy that leaves first: of sequences that wait, whose pages nobody reads now, before those of others."""
        while self._leaving:
            page, copied = self._leaving.popleft()
            if self._copies.get(page) == copied:
                return page
        idle = {page for page, (handle, _) in self._copies.items() if handle.suspended}
        order = self._policy.order(idle)
        if len(order) < _ORDERED:
            order += self._policy.order(self._copies.keys() - idle)
        self._leaving.extend((page, self._copies[page]) for page in order[:_ORDERED])
        return self._leaving.popleft()[0]

    def _save(self, pages: Sequence[tuple[KvHandle, int]], *, tokens: int) -> None:
        if pages:
            homes = [int(handle.home_table()[index]) for handle, index in pages]
            device = [int(handle.device_table()[index]) for handle, index in pages]
            assert ABSENT not in device, "a page that is not on the device cannot be written to the pool"
            self._count("to_pool", self._mover.save_kv(homes, device), tokens)

    def _restore(self, handle: KvHandle, index: int) -> None:
        device, home = int(handle.device_table()[index]), int(handle.home_table()[index])
        self._count("to_device", self._mover.load_kv([device], [home]), handle.computed % self.page_tokens)
        self._restores += 1

    def _count(self, direction: Literal["to_pool", "to_device"], moved_bytes: int, tokens: int) -> None:
        crossing = Crossing("kv", "home", direction, "load")
        self._ledger.add(crossing, moved_bytes=moved_bytes, useful_bytes=tokens * self._token_bytes)
