"""Which adapters clients may name, and which loads are still in use.

A name stands for one load of an adapter at a time. A load is known by its identity, which is never used again; it is
kept as long as its name stands for it or a request that asked for it is in flight, waiting ones included. Any thread
may call; only `release` belongs to the engine's thread, as does giving a load back to the store.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from plora_jax.adapters.adapter import Adapter
from plora_jax.engine.clock import Clock
from plora_jax.engine.errors import AdapterExistsError, UnknownAdapterError
from plora_jax.engine.placement import Reasons
from plora_jax.engine.residency import AdapterPlacement, AdapterStorage


@dataclasses.dataclass(frozen=True)
class AdapterStatus:
    """One adapter as an operator sees it.

    Attributes:
        name: what clients call it.
        path: directory it was read from, None where it was made in memory.
        rank: largest rank of its modules.
        nbytes: bytes it takes in the pool.
        device_bytes: bytes that it takes on the device as well.
        tier: "device" or "pool".
        strategy: LoRA strategy that serves it.
        pinned: it does not leave the device for another adapter.
        in_flight: sequences that asked for it and have not ended.
        loaded_s: clock time of this load.
        last_used_s: clock time of the last request, None where there was none.
        reason: why that strategy, one line; None where nobody plans.
    """

    name: str
    path: str | None
    rank: int
    nbytes: int
    device_bytes: int
    tier: str
    strategy: str
    pinned: bool
    in_flight: int
    loaded_s: float
    last_used_s: float | None
    reason: str | None = None


@dataclasses.dataclass
class _Load:
    name: str
    adapter_id: int
    path: str | None
    rank: int
    loaded_s: float
    in_flight: int = 0
    last_used_s: float | None = None
    retired: bool = False


class AdapterTable:
    """Names of adapters and counts of the requests that use them.

    Args:
        store: keeps the matrices.
        base_name: name of the base model, which no adapter may take.
        clock: for the times of loads and of last use.
        post: runs a function on the engine's thread, soon.
        reasons: why adapters are served as they are; None while nobody plans.
    """

    def __init__(
        self,
        store: AdapterStorage,
        *,
        base_name: str,
        clock: Clock,
        post: Callable[[Callable[[], None]], None],
        reasons: Callable[[], Reasons | None] = lambda: None,
    ) -> None:
        self._store, self._base_name, self._clock, self._post = store, base_name, clock, post
        self._reasons = reasons
        self._lock = threading.Lock()
        self._names: dict[str, _Load] = {}
        self._loads: dict[int, _Load] = {}
        self._loading: set[str] = set()

    def load(
        self, name: str, read: Callable[[], Adapter], *, inplace: bool = False, pinned: bool = False
    ) -> AdapterStatus:
        """Reads an adapter in the caller's thread and gives it the name; the running steps go on meanwhile.

        Args:
            name: for clients.
            read: reads and checks the adapter.
            inplace: the name may stand for another load, which is then retired.
            pinned: once it is on the device it does not leave for another adapter.

        Raises:
            AdapterExistsError: the name is taken or being loaded.
            Exception: whatever `read` or the store raise; the name is then as it was.
        """
        self._reserve(name, inplace)
        try:
            adapter = read()
            self._store.put(adapter, pinned=pinned)
            load = _Load(name, adapter.identity, adapter.path, adapter.max_rank, self._clock.now())
            # Once it has its name, another thread may unload it.
            status = self._status(load, None)
            with self._lock:
                replaced = self._names.get(name)
                self._names[name] = self._loads[load.adapter_id] = load
                unused = replaced is not None and self._retire(replaced)
        finally:
            with self._lock:
                self._loading.discard(name)
        if replaced is not None and unused:
            self._drop(replaced)
        return status

    def unload(self, name: str) -> None:
        """Takes the name away at once; the load goes when the last request that uses it ends.

        Raises:
            UnknownAdapterError: there is no such name.
        """
        with self._lock:
            load = self._names.pop(name, None)
            if load is None:
                raise UnknownAdapterError(name)
            unused = self._retire(load)
        if unused:
            self._drop(load)

    def use(self, name: str | None, sequences: int) -> int:
        """Counts new sequences of an adapter.

        Returns:
            The identity of its load; 0 for the base model, which has no count.

        Raises:
            UnknownAdapterError: there is no such name.
        """
        if name is None or name == self._base_name:
            return 0
        with self._lock:
            load = self._names.get(name)
            if load is None:
                raise UnknownAdapterError(name)
            load.in_flight += sequences
            load.last_used_s = self._clock.now()
            return load.adapter_id

    def release(self, adapter_id: int) -> None:
        """A sequence of this load ended and holds nothing of the store any more."""
        if not adapter_id:
            return
        with self._lock:
            load = self._loads[adapter_id]
            assert load.in_flight > 0, f"adapter {load.name!r} is released more often than used"
            load.in_flight -= 1
            last = load.retired and not load.in_flight
            if last:
                del self._loads[adapter_id]
        if last:
            self._store.retire(adapter_id)

    def id_of(self, name: str) -> int:
        """The identity of the load that a name stands for.

        Raises:
            UnknownAdapterError: there is no such name.
        """
        load = self._names.get(name)
        if load is None:
            raise UnknownAdapterError(name)
        return load.adapter_id

    def name_of(self, adapter_id: int) -> str | None:
        """The name a load was given; None for the base model and for loads that are gone."""
        load = self._loads.get(adapter_id)
        return load.name if load else None

    def statuses(self) -> list[AdapterStatus]:
        """All adapters that have a name, in the order of their names."""
        with self._lock:
            loads = sorted(self._names.values(), key=lambda load: load.name)
        statuses, reasons = [], self._reasons()
        for load in loads:
            try:
                statuses.append(self._status(load, reasons))
            except KeyError:
                # Unloaded between the two looks.
                continue
        return statuses

    def _reserve(self, name: str, inplace: bool) -> None:
        with self._lock:
            if name == self._base_name:
                raise AdapterExistsError(name, "is the base model's name: choose another")
            if name in self._loading:
                raise AdapterExistsError(name, "is being loaded by another request")
            if name in self._names and not inplace:
                raise AdapterExistsError(name, "is already loaded: unload it first, or load with load_inplace")
            self._loading.add(name)

    def _retire(self, load: _Load) -> bool:
        """Marks a load whose name is gone; returns whether it can go now."""
        load.retired = True
        if not load.in_flight:
            del self._loads[load.adapter_id]
        return not load.in_flight

    def _drop(self, load: _Load) -> None:
        self._post(lambda: self._store.retire(load.adapter_id))

    def _status(self, load: _Load, reasons: Reasons | None) -> AdapterStatus:
        placement = self._store.status(load.adapter_id)
        return AdapterStatus(
            name=load.name,
            path=load.path,
            rank=load.rank,
            nbytes=placement.pool_bytes,
            device_bytes=placement.device_bytes,
            tier=placement.tier,
            strategy=placement.strategy,
            pinned=placement.pinned,
            in_flight=load.in_flight,
            loaded_s=load.loaded_s,
            last_used_s=load.last_used_s,
            reason=None if reasons is None else _reason(reasons.short(load.adapter_id), placement),
        )


def _reason(planned: str, placement: AdapterPlacement) -> str:
    if placement.moving:
        return f"on its way to {placement.moving}, {placement.missing_bytes:,} bytes are still to come; {planned}"
    return planned
