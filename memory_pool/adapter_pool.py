"""Where adapters live: every loaded one in the pool, those that a strategy wants there also in device pages.

An adapter takes the pages of its true ranks, in the pool and on the device, wherever they are free. When its first
running sequence starts, the first preferred strategy whose device pages fit the budget now serves it; adapters that
nobody uses make room, and leave their device pages only then.

The pool is host state owned by the engine's thread; only `put` may be called from another, and `status` from any.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from memory_pool import adapter_streams as streams
from memory_pool.adapter_entry import (
    AdapterStatus,
    CapacityError,
    Entry,
    Needs,
    PlacedAdapter,
    Side,
    StoredAdapter,
    flat,
)
from memory_pool.adapter_streams import AdapterFacts, Modules
from memory_pool.adapter_writer import AdapterWriter
from memory_pool.eviction import EvictionPolicy, LeastRecentlyUsed
from memory_pool.ledger import Crossing, Ledger
from memory_pool.page_memory import PageMemory
from memory_pool.pages import PageAllocator
from memory_pool.pool_pages import PoolPages

__all__ = [
    "AdapterFacts",
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
        self._memory, self._layout, self._ledger = memory, memory.layout, ledger
        self._needs, self._preferred, self._fallback = dict(needs), tuple(preferred), fallback
        self._groups, self._max_rank = tuple(groups), max_rank
        self.num_stripes = pages.num_devices if placement == "striped" else 1
        self._writer = AdapterWriter(memory, pages, striped=placement == "striped", keep_for_kv=keep_for_kv)
        self._policy = policy or LeastRecentlyUsed()
        self._device = PageAllocator(memory.num_adapter_pages)
        self._entries: dict[int, Entry] = {}
        self._on_device: set[int] = set()
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

    def put(self, adapter: StoredAdapter) -> None:
        """Copies an adapter into the pool, a few pages between two steps. May be called from any thread.

        Raises:
            CapacityError: its rank is too large, or the pool has no room for it. Nothing is left of it then.
        """
        entry = self._entry(adapter.modules)
        self._writer.write(entry, adapter.modules, self.between_steps)
        with self._lock:
            assert adapter.identity not in self._entries, adapter.identity
            self._entries[adapter.identity] = entry

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
        return bool(entry.references) or bool(self._strategy_now(adapter_id, entry))

    def acquire(self, adapter_id: int) -> None:
        """Takes a reference; the first chooses a strategy and copies what it reads there to the device.

        Cannot fail after `can_acquire`.
        """
        if adapter_id == 0:
            return
        entry = self._entries[adapter_id]
        if not entry.references:
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

    def status(self, adapter_id: int) -> AdapterStatus:
        """Where an adapter is. May be called from any thread.

        Raises:
            KeyError: it is gone.
        """
        entry = self._entries[adapter_id]
        on_device = entry.device_count
        serves = entry.strategy if entry.references or on_device else ""
        return AdapterStatus(
            tier="device" if on_device else "pool",
            strategy=serves or self._strategy_alone(entry),
            pool_bytes=len(entry.pool_pages) * self._memory.page_bytes,
            device_bytes=on_device * self._memory.page_bytes,
            references=entry.references,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless adapters hold exactly the pages that they should, each page once."""
        self._writer.check_integrity([entry for _, entry in self._items()])
        self._device.check_integrity()
        device = flat(entry.device_pages for _, entry in self._items())
        assert len(device) == len(set(device)) == self._device.num_usable - self._device.num_free, "device pages"
        for adapter_id, entry in self._items():
            assert (adapter_id in self._on_device) == bool(entry.device_count), adapter_id
            assert not (entry.retired and not entry.references), f"retired adapter {adapter_id} is still held"
            self._check_entry(adapter_id, entry)

    def _check_entry(self, adapter_id: int, entry: Entry) -> None:
        for side, needed in zip(entry.sides, self._needs.get(entry.strategy, Needs(False, False)), strict=True):
            assert side.device is None or [len(pages) for pages in side.device] == side.counts, adapter_id
            present = side.device is not None or not side.count
            assert present or not (needed and entry.references), f"adapter {adapter_id} is not where it is read"

    def _entry(self, modules: Modules) -> Entry:
        layout = self._layout
        for (layer, name), m in modules.items():
            if len(m.a) > self._max_rank:
                raise CapacityError(
                    f"rank {len(m.a)} of {name} in layer {layer}; this server holds rank <= {self._max_rank}: "
                    "raise --max_lora_rank"
                )
        ranks = streams.stripe_ranks(modules, layout, self.num_stripes)
        counts = [layout.a_pages(r) for r in ranks.tolist()], [layout.b_pages(r) for r in ranks.tolist()]
        numbers = [n * self._memory.num_shards for n in streams.true_numbers(modules, layout)]
        a, b = (Side(*side) for side in zip(counts, numbers, strict=True))
        facts = streams.facts(modules, layout, self._groups)
        return Entry(ranks, streams.scales(modules, layout), facts, (a, b))

    def _missing(self, entry: Entry, strategy: str) -> list[Side]:
        """What a strategy reads on the device and is not there."""
        sides = zip(entry.sides, self._needs[strategy], strict=True)
        return [side for side, needed in sides if needed and side.device is None and side.count]

    def _strategy_now(self, adapter_id: int, entry: Entry) -> str:
        """The best strategy whose device pages fit now; "" while all that could ever fit have to wait."""
        idle = (i for i in self._on_device if i != adapter_id and not self._entries[i].references)
        room = self._device.num_free + sum(self._entries[i].device_count for i in idle)
        for strategy in self._preferred:
            if sum(side.count for side in self._missing(entry, strategy)) <= room:
                return strategy
        return "" if self._strategy_alone(entry) in self._preferred else self._fallback

    def _strategy_alone(self, entry: Entry) -> str:
        """The best strategy for an adapter that has the device for itself."""
        for strategy in self._preferred:
            sides = zip(entry.sides, self._needs[strategy], strict=True)
            if sum(side.count for side, needed in sides if needed) <= self._device.num_usable:
                return strategy
        return self._fallback

    def _serve(self, adapter_id: int, entry: Entry, strategy: str) -> None:
        if strategy not in self._preferred:
            self.fallbacks += 1
        missing = self._missing(entry, strategy)
        if missing:
            self._make_room(sum(side.count for side in missing), keep=adapter_id)
            self._load(strategy, missing)
            self._on_device.add(adapter_id)
        if missing or entry.placed is None or entry.strategy != strategy:
            entry.strategy = strategy
            entry.placed = self._place(entry)

    def _make_room(self, count: int, *, keep: int) -> None:
        idle = [i for i in self._on_device if i != keep and not self._entries[i].references]
        for adapter_id in self._policy.order(idle):
            if self._device.can_alloc(count):
                return
            self._leave_device(adapter_id, self._entries[adapter_id])

    def _load(self, strategy: str, sides: list[Side]) -> None:
        useful = 0
        for side in sides:
            side.device = [self._device.alloc(count) for count in side.counts]
            useful += side.numbers * self._layout.dtype.itemsize
        pool = flat(pages for side in sides for pages in side.pool)
        moved = self._memory.load_adapters(flat(side.on_device for side in sides), pool)
        self._ledger.add(Crossing("adapter", strategy, "to_device", "load"), moved_bytes=moved, useful_bytes=useful)
        control = self._memory.control_bytes(len(pool))
        self._ledger.add(Crossing("control", strategy, "to_pool", "load"), moved_bytes=control, useful_bytes=control)

    def _place(self, entry: Entry) -> PlacedAdapter:
        needs, most = self._needs[entry.strategy], self.most_pages
        a, b = (self._table(*args) for args in zip(entry.sides, needs, most, strict=True))
        return PlacedAdapter(entry.strategy, entry.ranks, entry.scale, a, b, entry.facts)

    def _table(self, side: Side, on_device: bool, most: int) -> np.ndarray:
        table = np.zeros((self.num_stripes, most), np.int32)
        for row, pages in zip(table, side.device or side.pool if on_device else side.pool, strict=True):
            row[: len(pages)] = pages
        return table

    def _leave_device(self, adapter_id: int, entry: Entry) -> None:
        self._device.free(entry.device_pages)
        for side in entry.sides:
            side.device = None
        entry.strategy, entry.placed = "", None
        self._on_device.discard(adapter_id)

    def _drop_if_unused(self, adapter_id: int, entry: Entry) -> None:
        if entry.retired and not entry.references:
            with self._lock:
                del self._entries[adapter_id]
            self._leave_device(adapter_id, entry)
            self._writer.give_back(entry)
            self._policy.forget(adapter_id)

    def _items(self) -> list[tuple[int, Entry]]:
        with self._lock:
            return list(self._entries.items())
