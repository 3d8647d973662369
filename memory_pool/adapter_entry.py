"""What is known of one adapter: its pages in the pool and on the device, who serves it, how often it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from memory_pool.adapter_streams import AdapterFacts, Modules


class CapacityError(ValueError):
    """An adapter, or a budget, for which there is no room; the message has the sizes and the flag to raise."""


class StoredAdapter(Protocol):
    """What can be put into the pool; module keys are (layer, projection)."""

    @property
    def identity(self) -> int: ...
    @property
    def modules(self) -> Modules: ...


class Needs(NamedTuple):
    """Which matrices a strategy reads from device pages; it reads the others from the pool."""

    a: bool
    b: bool


class PlacedAdapter(NamedTuple):
    """Where a strategy finds an adapter: its part of a lane's tables. One object until something about it changes.

    Attributes:
        strategy: LoRA strategy that serves it.
        ranks: [S, J] int32, rank components by stripe and projection.
        scale: [L, J] float32.
        a_pages: [S, MA] int32, in the space where the strategy reads A; 0 beyond the end.
        b_pages: [S, MB] int32, in the space where the strategy reads B; 0 beyond the end.
        facts: what useful bytes are made of.
    """

    strategy: str
    ranks: np.ndarray
    scale: np.ndarray
    a_pages: np.ndarray
    b_pages: np.ndarray
    facts: AdapterFacts


@dataclasses.dataclass(frozen=True)
class AdapterStatus:
    """Where an adapter is.

    Attributes:
        tier: "device" when any of its pages is there, else "pool".
        strategy: LoRA strategy that serves it, or would if it had the device for itself.
        pool_bytes: bytes of its pages in the pool, all shards.
        device_bytes: bytes of its device pages, all shards.
        references: running sequences that use it.
    """

    tier: str
    strategy: str
    pool_bytes: int
    device_bytes: int
    references: int


@dataclasses.dataclass
class Side:
    """A or B of one adapter.

    Attributes:
        counts: pages by stripe.
        numbers: without any padding, all shards.
        pool: its pages in the pool, by stripe.
        device: its device pages, by stripe; None when it is not there.
    """

    counts: list[int]
    numbers: int
    pool: list[list[int]] = dataclasses.field(default_factory=list)
    device: list[list[int]] | None = None

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def on_device(self) -> list[int]:
        return flat(self.device or ())


@dataclasses.dataclass
class Entry:
    """One adapter.

    Attributes:
        ranks: [S, J] int32, rank components by stripe and projection.
        scale: [L, J] float32.
        facts: what useful bytes are made of.
        sides: A and B.
        strategy: that serves it, or served it last with the pages that are still on the device; else "".
        placed: tables for that strategy.
        references: running sequences that use it.
        retired: goes with its last reference.
    """

    ranks: np.ndarray
    scale: np.ndarray
    facts: AdapterFacts
    sides: tuple[Side, Side]
    strategy: str = ""
    placed: PlacedAdapter | None = None
    references: int = 0
    retired: bool = False

    @property
    def pool_pages(self) -> list[int]:
        return flat(stripe for side in self.sides for stripe in side.pool)

    @property
    def device_pages(self) -> list[int]:
        return flat(side.on_device for side in self.sides)

    @property
    def device_count(self) -> int:
        return sum(side.count for side in self.sides if side.device is not None)


def flat(pages: Iterable[Iterable[int]]) -> list[int]:
    """Pages of several lists, one after the other."""
    return [page for some in pages for page in some]
