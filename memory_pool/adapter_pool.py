"""Where adapters live: every loaded one in the pool, those that a strategy wants there also in device pages.

An adapter takes the pages of its true ranks, in the pool and on the device, wherever they are free. When its first
running sequence starts, the first preferred strategy whose device pages fit the budget now serves it; adapters that
nobody uses make room, and leave their device pages only then. Whoever plans for all adapters says `wish` instead: the
strategy may then change while an adapter is used, between two steps, after its pages have come (`migrate`).

The pool is host state owned by the engine's thread; only `put` may be called from another, and `status` from any.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from memory_pool.adapter_entry import (
    AdapterFigures,
    AdapterStatus,
    CapacityError,
    Entry,
    Needs,
    PlacedAdapter,
    StoredAdapter,
    flat,
)
from memory_pool.adapter_moves import AdapterCopies, AdapterMoves
from memory_pool.adapter_streams import AdapterFacts
from memory_pool.adapter_writer import AdapterWriter
from memory_pool.eviction import EvictionPolicy, LeastRecentlyUsed
from memory_pool.int8_adapters import quantize_modules
from memory_pool.ledger import Ledger
from memory_pool.page_memory import PageMemory
from memory_pool.pages import PageAllocator
from memory_pool.pool_pages import PoolPages

__all__ = [
    "AdapterFacts",
    "AdapterFigures",
    "AdapterPool",
    "AdapterStatus",
    "CapacityError",
    "Needs",
    "PlacedAdapter",
    "Placement",
    "StoredAdapter",
]

Placement = Literal["pinned", "striped"]


class AdapterPool:
    """Adapters in the pool and on the device.

    Args:
        memory: page arrays.
        pages: pages of the pool, which KV takes too.
        ledger: counts the copies to the device.
        needs: what each strategy reads on the device.
        preferred: strategies to serve with, best first.
        while_all_fit: strategy that is preferred to these as long as the device has room for A and B of all adapters
            in the pool; None for no other.
        fallback: serves an adapter whose pages can never be on the device as any preferred strategy needs them.
        groups: projections that share an input.
        max_rank: largest rank of any module.
        placement: "pinned" puts an adapter on one pool device, the one with most room; "striped" puts rank component c
            on pool device c mod S.
        keep_for_kv: pages of the pool that adapters never take.
        policy: who leaves the device first; least recently used by default.

    Attributes:
        between_steps: runs a function on the engine's thread between two steps and waits for it; here and now unless
            the engine sets it.
        fallbacks: how often `fallback` was chosen.

    Raises:
        CapacityError: the device budget holds no page.
    """

    def __init__(
        self,
        memory: PageMemory,
        pages: PoolPages,
        *,
        ledger: Ledger,
        needs: Mapping[str, Needs],
        preferred: Sequence[str],
        groups: Sequence[tuple[str, ...]],
        max_rank: int,
        while_all_fit: str | None = None,
        fallback: str = "fetch",
        placement: Placement = "pinned",
        keep_for_kv: int = 0,
        policy: EvictionPolicy | None = None,
    ) -> None:
        if memory.num_adapter_pages < 2:
            mb = math.ceil(2 * memory.page_bytes / 2**20)
            raise CapacityError(
                f"the device budget for adapters holds {memory.num_adapter_pages} pages of {memory.page_bytes} bytes, "
                f"and 2 are needed: raise --device_adapter_mb to {mb} or more"
            )
        space = (pages.num_devices, pages.usable_per_device + 1)
        assert space == (memory.pool_devices, memory.pool_pages), space
        self._memory, self._layout = memory, memory.layout
        self._needs, self._fallback = dict(needs), fallback
        self._preferred, self._while_all_fit = tuple(preferred), (while_all_fit,) if while_all_fit else ()
        self._groups, self._max_rank = tuple(groups), max_rank
        self.num_stripes = pages.num_devices if placement == "striped" else 1
        self._writer = AdapterWriter(
            memory, pages, striped=placement == "striped", keep_for_kv=keep_for_kv, ledger=ledger
        )
        self._policy = policy or LeastRecentlyUsed()
        self._device = PageAllocator(memory.num_adapter_pages)
        self._entries: dict[int, Entry] = {}
        self._all_pages = 0  # that A and B of all adapters would take on the device
        self._on_device: set[int] = set()
        self._pinned: set[int] = set()
        self._changed: set[int] | None = None  # from the first `take_changes` on
        self._instead: dict[str, str] = {}
        self._copies = AdapterCopies(memory, self._device, ledger)
        self._moves = AdapterMoves(self._copies, self._needs, self._switch)
        self._lock = threading.Lock()
        self.between_steps: Callable[[Callable[[], None]], None] = lambda function: function()
        self.fallbacks = 0

    @property
    def most_pages(self) -> tuple[int, int]:
        """Lengths MA and MB of page tables: pages of A and of B of the largest adapter on one stripe."""
        ranks = [-(-self._max_rank // self.num_stripes)] * len(self._layout.names)
        return self._layout.a_pages(ranks), self._layout.b_pages(ranks)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all adapters' pages in the pool, all shards."""
        return sum(len(entry.pool_pages) for _, entry in self._items()) * self._memory.page_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory set aside, in use or not, all shards."""
        return self._memory.num_adapter_pages * self._memory.page_bytes

    @property
    def device_bytes_used(self) -> int:
        """Bytes of the device pages that hold adapters, all shards."""
        return (self._device.num_usable - self._device.num_free) * self._memory.page_bytes

    def strategies(self) -> dict[str, int]:
        """Adapters that running sequences use, by the strategy that serves them."""
        counts = dict.fromkeys(self._needs, 0)
        for _, entry in self._items():
            # Read once: it may leave the device meanwhile.
            if entry.references and (strategy := entry.strategy):
                counts[strategy] += 1
        return counts

    def put(self, adapter: StoredAdapter, *, pinned: bool = False) -> None:
        """Copies an adapter into the pool, a few pages between two steps. May be called from any thread.

        Args:
            adapter: under an identity of its own.
            pinned: once it is on the device it does not leave for another adapter.

        Raises:
            CapacityError: its rank is too large, or the pool has no room for it. Nothing is left of it then.
        """
        modules = quantize_modules(adapter.modules) if self._layout.int8_adapters else adapter.modules
        entry = Entry.of(
            modules,
            self._layout,
            stripes=self.num_stripes,
            shards=self._memory.num_shards,
            groups=self._groups,
            max_rank=self._max_rank,
        )
        entry.pinned = pinned
        self._writer.write(entry, modules, self.between_steps)
        with self._lock:
            assert adapter.identity not in self._entries, adapter.identity
            self._entries[adapter.identity] = entry
            self._all_pages += entry.stored_pages
            self._note_change(adapter.identity)
            if pinned:
                self._pinned.add(adapter.identity)

    def retire(self, adapter_id: int) -> None:
        """Drops an adapter as soon as no running sequence uses it."""
        entry = self._entries[adapter_id]
        entry.retired = True
        self._drop_if_unused(adapter_id, entry)

    def can_acquire(self, adapter_id: int) -> bool:
        """Whether a strategy can serve the adapter now. The base model (0) always can be. Does not mutate."""
        if adapter_id == 0:
            return True
        entry = self._entries[adapter_id]
        return bool(entry.references or entry.wish) or bool(self._strategy_now(adapter_id, entry))

    def acquire(self, adapter_id: int) -> None:
        """Takes a reference; the first chooses a strategy and copies what it reads there to the device.

        Cannot fail after `can_acquire`.
        """
        if adapter_id == 0:
            return
        entry = self._entries[adapter_id]
        if not entry.references and not entry.wish:
            strategy = self._strategy_now(adapter_id, entry)
            assert strategy, f"no room on the device for adapter {adapter_id}: call can_acquire first"
            self._serve(adapter_id, entry, strategy)
        entry.references += 1
        self._policy.touch(adapter_id)

    def release(self, adapter_id: int) -> None:
        """Gives a reference back. Device pages stay until another adapter needs the room."""
        if adapter_id == 0:
            return
        entry = self._entries[adapter_id]
        assert entry.references > 0, adapter_id
        entry.references -= 1
        self._drop_if_unused(adapter_id, entry)

    def placed(self, adapter_id: int) -> PlacedAdapter:
        """Tables of an acquired adapter."""
        entry = self._entries[adapter_id]
        assert entry.references > 0, adapter_id
        assert entry.placed is not None, adapter_id
        return entry.placed

    def wish(self, adapter_id: int, strategy: str) -> None:
        """Has an adapter served by a strategy as soon as what it reads on the device is there; it may be in use.

        What is not needed any more leaves the device at once. `migrate` copies the rest. An adapter under a wish is
        served as it stands when it is acquired, and is not evicted.
        """
        entry = self._entries[adapter_id]
        strategy = self._instead.get(strategy, strategy)
        if strategy != entry.wish:
            self._moves.wish(adapter_id, entry, strategy)
            if entry.placed is None:
                here = (name for name in self._best if not entry.missing(self._needs[name]))
                self._switch(adapter_id, entry, next(here, self._fallback))
            self._note_device(adapter_id, entry)
            self._note_change(adapter_id)

    def migrate(self, most_pages: int) -> int:
        """Copies up to so many pages for those who wait for their wish, between two steps.

        Returns:
            Pages copied; 0 where nobody waits or nobody has room.
        """
        copied, touched = self._moves.advance(most_pages)
        for adapter_id in touched:
            self._note_device(adapter_id, self._entries[adapter_id])
        return copied

    def lose(self, strategies: Collection[str], *, instead: str) -> None:
        """Some strategies work no longer: from the next step on, whoever they serve is served by another.

        Args:
            strategies: that are lost for good.
            instead: strategy that reads nothing on the device.
        """
        self._instead |= dict.fromkeys(strategies, instead)
        self._preferred, self._while_all_fit = self._working(self._preferred), self._working(self._while_all_fit)
        for adapter_id, entry in self._items():
            if entry.wish in strategies:
                self.wish(adapter_id, instead)
            if entry.strategy in strategies:
                self._switch(adapter_id, entry, instead)

    def start_over(self, preferred: Sequence[str], *, while_all_fit: str | None = None) -> None:
        """Takes everything off the device and forgets wishes and uses, as though all adapters came just now.

        Args:
            preferred: strategies to serve with from here on, best first.
            while_all_fit: as at the start.
        """
        for adapter_id, entry in self._items():
            assert not entry.references, f"adapter {adapter_id} is in use: start over while nothing runs"
            self._leave_device(adapter_id, entry)
            self._policy.forget(adapter_id)
        self._preferred = self._working(preferred)
        self._while_all_fit = self._working((while_all_fit,) if while_all_fit else ())
        self._changed = None

    def take_changes(self) -> set[int]:
        """Adapters that came, went, or got another strategy since the last call; all at the first."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return set(self._entries) if changed is None else changed

    def figures(self, adapter_id: int) -> AdapterFigures | None:
        """What a planner takes of an adapter; None for one that is gone."""
        entry = self._entries.get(adapter_id)
        if entry is None:
            return None
        pages = entry.pool_pages
        return AdapterFigures(
            ranks=entry.ranks.sum(axis=0),
            home=-1 if self.num_stripes > 1 or not pages else pages[0] // self._memory.pool_pages,
            pages=(entry.sides[0].count, entry.sides[1].count),
            strategy=entry.wish or entry.strategy or self._preferred[0],
            pinned=entry.pinned,
        )

    def status(self, adapter_id: int) -> AdapterStatus:
        """Where an adapter is. May be called from any thread.

        Raises:
            KeyError: it is gone.
        """
        entry = self._entries[adapter_id]
        on_device, wish = entry.device_count, entry.wish
        missing = [side.count - side.copied for side in entry.missing(self._needs[wish])] if wish else ()
        serves = entry.strategy if entry.references or on_device or wish else ""
        return AdapterStatus(
            tier="device" if on_device else "pool",
            strategy=serves or self._strategy_alone(entry),
            pool_bytes=len(entry.pool_pages) * self._memory.page_bytes,
            device_bytes=on_device * self._memory.page_bytes,
            references=entry.references,
            pinned=entry.pinned,
            moving=wish if missing else "",
            missing_bytes=sum(missing) * self._memory.page_bytes,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless adapters hold exactly the pages that they should, each page once."""
        self._writer.check_integrity([entry for _, entry in self._items()])
        self._device.check_integrity()
        self._moves.check_integrity(dict(self._items()))
        device = flat(entry.device_pages for _, entry in self._items())
        assert len(device) == len(set(device)) == self._device.num_usable - self._device.num_free, "device pages"
        for adapter_id, entry in self._items():
            assert (adapter_id in self._on_device) == bool(entry.device_count), adapter_id
            assert not (entry.retired and not entry.references), f"retired adapter {adapter_id} is still held"
            entry.check_integrity(self._needs.get(entry.strategy, Needs(False, False)), adapter_id)

    @property
    def _best(self) -> tuple[str, ...]:
        """Strategies to serve with, best first."""
        fit = self._all_pages <= self._device.num_usable
        return self._while_all_fit + self._preferred if fit else self._preferred

    def _working(self, strategies: Sequence[str]) -> tuple[str, ...]:
        """The same with those in the place of lost ones that serve instead."""
        return tuple(dict.fromkeys(self._instead.get(name, name) for name in strategies))

    def _evictable(self, adapter_id: int) -> list[int]:
        """Adapters that may leave the device for this one."""
        return [i for i in self._on_device if i != adapter_id and self._entries[i].may_leave]

    def _strategy_now(self, adapter_id: int, entry: Entry) -> str:
        """The best strategy whose device pages fit now; "" while all that could ever fit have to wait."""
        room = self._device.num_free + sum(self._entries[i].device_count for i in self._evictable(adapter_id))
        for strategy in self._best:
            if sum(side.count for side in entry.missing(self._needs[strategy])) <= room:
                return strategy
        return "" if self._strategy_alone(entry) in self._best else self._fallback

    def _strategy_alone(self, entry: Entry) -> str:
        """The best strategy for an adapter that has the device for itself, but for what is pinned there."""
        pinned = (self._entries.get(i) for i in tuple(self._pinned))
        room = self._device.num_usable - sum(other.device_count for other in pinned if other and other is not entry)
        for strategy in self._best:
            sides = zip(entry.sides, self._needs[strategy], strict=True)
            if sum(side.count for side, needed in sides if needed) <= room:
                return strategy
        return self._fallback

    def _serve(self, adapter_id: int, entry: Entry, strategy: str) -> None:
        if strategy not in self._best:
            self.fallbacks += 1
        missing = entry.missing(self._needs[strategy])
        if missing:
            self._make_room(sum(side.count for side in missing), keep=adapter_id)
            reserved = self._copies.reserve(missing)
            assert reserved, adapter_id
            self._copies.fill(missing, strategy)
            self._on_device.add(adapter_id)
        if missing or entry.placed is None or entry.strategy != strategy:
            self._switch(adapter_id, entry, strategy)

    def _make_room(self, count: int, *, keep: int) -> None:
        for adapter_id in self._policy.order(self._evictable(keep)):
            if self._device.can_alloc(count):
                return
            self._leave_device(adapter_id, self._entries[adapter_id])

    def _switch(self, adapter_id: int, entry: Entry, strategy: str) -> None:
        entry.strategy = strategy
        entry.placed = entry.place(self._needs[strategy], self.most_pages)
        self._note_change(adapter_id)

    def _note_change(self, adapter_id: int) -> None:
        if self._changed is not None:
            self._changed.add(adapter_id)

    def _note_device(self, adapter_id: int, entry: Entry) -> None:
        (self._on_device.add if entry.device_count else self._on_device.discard)(adapter_id)

    def _leave_device(self, adapter_id: int, entry: Entry) -> None:
        self._copies.drop(entry.sides)
        self._moves.forget(adapter_id)
        entry.strategy, entry.wish, entry.placed = "", "", None
        self._on_device.discard(adapter_id)

    def _drop_if_unused(self, adapter_id: int, entry: Entry) -> None:
        if entry.retired and not entry.references:
            with self._lock:
                del self._entries[adapter_id]
                self._all_pages -= entry.stored_pages
                self._pinned.discard(adapter_id)
                self._note_change(adapter_id)
            self._leave_device(adapter_id, entry)
            self._writer.give_back(entry)
            self._policy.forget(adapter_id)

    def _items(self) -> list[tuple[int, Entry]]:
        with self._lock:
            return list(self._entries.items())
