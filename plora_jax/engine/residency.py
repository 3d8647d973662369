"""What the engine needs of the store that keeps adapters (`memory_pool.AdapterPool`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from plora_jax.adapters.adapter import Adapter, AdapterError


class AdapterResidency(Protocol):
    """Counted references of running sequences to adapters. Adapter id 0, the base model, is never asked about."""

    def can_acquire(self, adapter_id: int) -> bool:
        """Whether the adapter can serve a step now; true for one that is held, and for any while none is held."""
        ...

    def acquire(self, adapter_id: int) -> None:
        """Takes a reference; cannot fail after `can_acquire`."""
        ...

    def release(self, adapter_id: int) -> None:
        """Gives a reference back."""
        ...


class AdapterPlacement(Protocol):
    """Where an adapter is and what serves it."""

    @property
    def tier(self) -> str: ...
    @property
    def strategy(self) -> str: ...
    @property
    def pool_bytes(self) -> int: ...
    @property
    def device_bytes(self) -> int: ...
    @property
    def references(self) -> int: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def moving(self) -> str: ...
    @property
    def missing_bytes(self) -> int: ...


class AdapterStorage(AdapterResidency, Protocol):
    """Keeps adapters and says where they are.

    Attributes:
        between_steps: runs a function on the engine's thread between two steps and waits for it; set by the engine.
            Whatever touches device memory or the pool goes through it, in pieces that no stream minds waiting for.
    """

    between_steps: Callable[[Callable[[], None]], None]

    def put(self, adapter: Adapter, /, *, pinned: bool = False) -> None:
        """Takes an adapter in, under its identity. Called from the thread that loads it.

        Args:
            adapter: with its matrices.
            pinned: once it is on the device it does not leave for another adapter.

        Raises:
            ValueError: it can never be served; the message says why.
        """
        ...

    def retire(self, adapter_id: int) -> None:
        """Drops an adapter that no sequence uses any more."""
        ...

    def status(self, adapter_id: int) -> AdapterPlacement:
        """Where an adapter is; raises KeyError where it is gone. Called from any thread."""
        ...


class NoAdapters:
    """The store of a server that serves the base model only."""

    def __init__(self) -> None:
        self.between_steps: Callable[[Callable[[], None]], None] = lambda function: function()

    def can_acquire(self, adapter_id: int) -> bool:
        return not adapter_id

    def acquire(self, adapter_id: int) -> None:
        raise KeyError(adapter_id)

    def release(self, adapter_id: int) -> None:
        raise KeyError(adapter_id)

    def put(self, adapter: Adapter, /, *, pinned: bool = False) -> None:
        raise AdapterError(f"adapter {adapter.name!r} is refused: this server has --enable_lora=false")

    def retire(self, adapter_id: int) -> None:
        raise KeyError(adapter_id)

    def status(self, adapter_id: int) -> AdapterPlacement:
        raise KeyError(adapter_id)
