"""Where LoRA matrices live: every loaded adapter in the pool, those in use also on the device.

On the device a projection's matrices are rows: slot s holds one rank component of one adapter, its row of A and its
column of B, for all layers. An adapter takes as many slots as its own rank, wherever they are free, so adapters of
mixed rank share the budget without padding to the largest. Slot 0 stays zero and takes the padding of transfers.

The store is host state owned by the engine's thread; only `put` may be called from another.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from memory_pool import link
from memory_pool.eviction import EvictionPolicy, LeastRecentlyUsed
from memory_pool.ledger import Crossing, Ledger
from memory_pool.pages import PageAllocator
from memory_pool.raw import raw_dtype

PIECE_ROWS = 8
"""Rank components that cross the link at once: one compiled copy serves every rank, and no step waits for long."""


class CapacityError(ValueError):
    """An adapter that can never fit the device budget."""


class Matrices(Protocol):
    """One low-rank change: a [R, I], b [O, R], and the factor on their product."""

    @property
    def a(self) -> np.ndarray: ...
    @property
    def b(self) -> np.ndarray: ...
    @property
    def scale(self) -> float: ...


class StoredAdapter(Protocol):
    """What can be put into the store; module keys are (layer, projection)."""

    @property
    def identity(self) -> int: ...
    @property
    def modules(self) -> Mapping[Any, Matrices]: ...


class AdapterRows(NamedTuple):
    """Rank components of one projection, as raw bits.

    Attributes:
        a: [L, slots, I] rows of A.
        b: [L, slots, O] columns of B.
        scale: [L, slots] float32.
    """

    a: Any
    b: Any
    scale: Any


@dataclasses.dataclass(frozen=True)
class AdapterStatus:
    """Where an adapter is.

    Attributes:
        tier: "device" or "pool".
        strategy: LoRA strategy that serves it.
        pool_bytes: bytes of its rows in the pool.
        device_bytes: bytes of its device slots, 0 when it is not on the device.
        references: running sequences that use it.
    """

    tier: str
    strategy: str
    pool_bytes: int
    device_bytes: int
    references: int


@dataclasses.dataclass
class _Entry:
    rank: int
    pieces: list[dict[str, AdapterRows]]
    useful_bytes: int
    slots: list[int] = dataclasses.field(default_factory=list)
    references: int = 0
    retired: bool = False


class AdapterStore:
    """Adapters in the pool, and the device slots they are copied to when they are used.

    Args:
        projections: (O, I) by projection name.
        num_layers: L.
        dtype: dtype the matrices are held in, on both sides.
        mesh: devices.
        device_bytes: budget for adapters in device memory.
        ledger: counts the copies.
        policy: who leaves the device first; least recently used by default.

    Raises:
        CapacityError: the budget holds fewer than PIECE_ROWS rank components.
    """

    def __init__(
        self,
        projections: Mapping[str, tuple[int, int]],
        num_layers: int,
        *,
        dtype: np.dtype,
        mesh: Mesh,
        device_bytes: int,
        ledger: Ledger,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self._projections, self._num_layers, self._dtype = dict(projections), num_layers, np.dtype(dtype)
        self._mesh, self._ledger, self._policy = mesh, ledger, policy or LeastRecentlyUsed()
        widths = sum(o + i for o, i in self._projections.values())
        self.slot_bytes = num_layers * (widths * self._dtype.itemsize + 4 * len(self._projections))
        slots = device_bytes // self.slot_bytes
        if slots < PIECE_ROWS:
            least = -(-PIECE_ROWS * self.slot_bytes // 2**20)
            raise CapacityError(
                f"a device budget of {device_bytes / 2**20:.1f} MB for adapters holds {slots} rank components of "
                f"{self.slot_bytes} bytes, and {PIECE_ROWS} are needed: raise --device_adapter_mb to {least} or more"
            )
        self._slots = PageAllocator(slots, reserved=1)
        sharding = link.device_sharding(mesh)
        self.device_rows: dict[str, AdapterRows] = {
            name: AdapterRows(*(link.allocate(s, t, sharding) for s, t in self._row_arrays(name, slots)))
            for name in self._projections
        }
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()
        self._warm_up()

    @property
    def num_slots(self) -> int:
        """Device slots, the zero slot included."""
        return self._slots.num_total

    @property
    def pool_bytes(self) -> int:
        return sum(self._pool_bytes(e) for _, e in self._items())

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory set aside, in use or not."""
        return self.num_slots * self.slot_bytes

    def put(self, adapter: StoredAdapter) -> None:
        """Copies an adapter into the pool. May be called from any thread.

        Raises:
            CapacityError: its rank is more than the device budget holds.
        """
        rank = max((m.a.shape[0] for m in adapter.modules.values()), default=0)
        usable = self.num_slots - 1
        if rank > usable:
            need = -(-(rank + 1) * self.slot_bytes // 2**20)
            raise CapacityError(
                f"rank {rank} does not fit the device budget, which holds {usable} rank components: "
                f"raise --device_adapter_mb to {need} or more"
            )
        pieces = [self._piece(adapter.modules, start) for start in range(0, rank, PIECE_ROWS)]
        stored = [jax.tree.map(lambda x: link.store_in_pool(x, self._mesh), piece) for piece in pieces]
        with self._lock:
            assert adapter.identity not in self._entries, adapter.identity
            self._entries[adapter.identity] = _Entry(rank, stored, rank * self.slot_bytes)

    def retire(self, adapter_id: int) -> None:
        """Drops an adapter as soon as no running sequence uses it."""
        entry = self._entries[adapter_id]
        entry.retired = True
        self._drop_if_unused(adapter_id, entry)

    def can_acquire(self, adapter_id: int) -> bool:
        """Whether the adapter is on the device or can be brought there now. The base model (0) always can."""
        if adapter_id == 0:
            return True
        entry = self._entries[adapter_id]
        if entry.slots or not entry.rank:
            return True
        idle = sum(len(e.slots) for _, e in self._items() if not e.references)
        return entry.rank <= self._slots.num_free + idle

    def acquire(self, adapter_id: int) -> None:
        """Takes a reference and brings the adapter to the device; cannot fail after `can_acquire`."""
        if adapter_id == 0:
            return
        entry = self._entries[adapter_id]
        entry.references += 1
        self._policy.touch(adapter_id)
        if not entry.slots and entry.rank:
            self._make_room(entry.rank)
            self._promote(entry)

    def release(self, adapter_id: int) -> None:
        """Gives a reference back. The adapter stays on the device until another needs the room."""
        if adapter_id == 0:
            return
        entry = self._entries[adapter_id]
        assert entry.references > 0, adapter_id
        entry.references -= 1
        self._drop_if_unused(adapter_id, entry)

    def slots(self, adapter_id: int) -> list[int]:
        """Device slots of an acquired adapter, in order of rank component."""
        entry = self._entries[adapter_id]
        assert entry.references > 0, adapter_id
        return entry.slots

    def status(self, adapter_id: int) -> AdapterStatus:
        entry = self._entries[adapter_id]
        return AdapterStatus(
            tier="device" if entry.slots else "pool",
            strategy="resident",
            pool_bytes=self._pool_bytes(entry),
            device_bytes=len(entry.slots) * self.slot_bytes,
            references=entry.references,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless the slots held are exactly those given out."""
        self._slots.check_integrity()
        held = [s for _, e in self._items() for s in e.slots]
        assert len(held) == len(set(held)), "a slot is held twice"
        assert len(held) + self._slots.num_free + 1 == self.num_slots, "a slot is lost"
        for adapter_id, entry in self._items():
            assert len(entry.slots) in (0, entry.rank), adapter_id
            assert not (entry.retired and not entry.references), f"retired adapter {adapter_id} is still held"

    def _row_arrays(self, name: str, rows: int) -> list[tuple[tuple[int, ...], np.dtype]]:
        width_out, width_in = self._projections[name]
        raw = raw_dtype(self._dtype)
        lead = (self._num_layers, rows)
        return [((*lead, width_in), raw), ((*lead, width_out), raw), (lead, np.dtype(np.float32))]

    def _piece(self, modules: Mapping[Any, Matrices], start: int) -> dict[str, AdapterRows]:
        """Rank components [start, start + PIECE_ROWS) of all modules, zero where a module has no such component."""
        piece = {
            n: AdapterRows(*(np.zeros(s, t) for s, t in self._row_arrays(n, PIECE_ROWS))) for n in self._projections
        }
        raw = raw_dtype(self._dtype)
        for (layer, name), m in modules.items():
            a = m.a[start : start + PIECE_ROWS]
            rows = piece[name]
            rows.a[layer, : len(a)] = a.astype(self._dtype).view(raw)
            b = np.ascontiguousarray(m.b[:, start : start + PIECE_ROWS].T)
            rows.b[layer, : len(a)] = b.astype(self._dtype).view(raw)
            rows.scale[layer, : len(a)] = m.scale
        return piece

    def _promote(self, entry: _Entry) -> None:
        entry.slots = self._slots.alloc(entry.rank)
        padded = entry.slots + [0] * (len(entry.pieces) * PIECE_ROWS - entry.rank)
        for i, piece in enumerate(entry.pieces):
            slots = np.array(padded[i * PIECE_ROWS : (i + 1) * PIECE_ROWS], np.int32)
            self.device_rows = link.copy_rows_to_device(self.device_rows, piece, slots)
        crossing = Crossing("adapter", "resident", "to_device", "load")
        self._ledger.add(crossing, moved_bytes=self._pool_bytes(entry), useful_bytes=entry.useful_bytes)

    def _make_room(self, rank: int) -> None:
        idle = [i for i, e in self._items() if e.slots and not e.references]
        for adapter_id in self._policy.order(idle):
            if self._slots.can_alloc(rank):
                return
            entry = self._entries[adapter_id]
            self._slots.free(entry.slots)
            entry.slots = []

    def _drop_if_unused(self, adapter_id: int, entry: _Entry) -> None:
        if entry.retired and not entry.references:
            self._slots.free(entry.slots)
            self._policy.forget(adapter_id)
            with self._lock:
                del self._entries[adapter_id]

    def _items(self) -> list[tuple[int, _Entry]]:
        with self._lock:
            return list(self._entries.items())

    def _pool_bytes(self, entry: _Entry) -> int:
        return len(entry.pieces) * PIECE_ROWS * self.slot_bytes

    def _warm_up(self) -> None:
        """Compiles the copy: a piece of zeros into slot 0."""
        piece = jax.tree.map(lambda x: link.store_in_pool(x, self._mesh), self._piece({}, 0))
        self.device_rows = link.copy_rows_to_device(self.device_rows, piece, np.zeros(PIECE_ROWS, np.int32))
