"""What is known of one adapter: its pages in the pool and on the device, who serves it, how often it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from memory_pool import adapter_streams as streams
from memory_pool.adapter_streams import AdapterFacts, Modules
from memory_pool.layout import PageLayout


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


class AdapterFigures(NamedTuple):
    """What a planner takes of an adapter.

    Attributes:
        ranks: [J] int32, largest rank of each projection in any layer.
        home: pool device, -1 for one that is striped over all.
        pages: pages of A and of B, all stripes.
        strategy: that serves it or is on its way; for one that nobody asked for, the first preferred.
        pinned: never leaves the device for another.
    """

    ranks: np.ndarray
    home: int
    pages: tuple[int, int]
    strategy: str
    pinned: bool


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
        pinned: its device pages stay there.
        moving: strategy that will serve it when its pages are on the device, else "".
        missing_bytes: bytes of those pages that are still to be copied, all shards.
    """

    tier: str
    strategy: str
    pool_bytes: int
    device_bytes: int
    references: int
    pinned: bool = False
    moving: str = ""
    missing_bytes: int = 0


@dataclasses.dataclass
class Side:
    """A or B of one adapter.

    Attributes:
        counts: pages by stripe.
        numbers: without any padding, all shards.
        pool: its pages in the pool, by stripe.
        device: its device pages, by stripe; None when it is not there.
        coming: device pages that it is being copied to, by stripe; None when it is not.
        copied: how many of those have their content, in the order of the stripes.
    """

    counts: list[int]
    numbers: int
    pool: list[list[int]] = dataclasses.field(default_factory=list)
    device: list[list[int]] | None = None
    coming: list[list[int]] | None = None
    copied: int = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def taken(self) -> list[int]:
        """Device pages that it has or is being copied to."""
        return flat(self.device or self.coming or ())


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
        wish: strategy that a planner wants; "" leaves the choice to the pool.
        pinned: its device pages are never taken for another adapter.
    """

    ranks: np.ndarray
    scale: np.ndarray
    facts: AdapterFacts
    sides: tuple[Side, Side]
    strategy: str = ""
    placed: PlacedAdapter | None = None
    references: int = 0
    retired: bool = False
    wish: str = ""
    pinned: bool = False

    @classmethod
    def of(
        cls,
        modules: Modules,
        layout: PageLayout,
        *,
        stripes: int,
        shards: int,
        groups: Sequence[tuple[str, ...]],
        max_rank: int,
    ) -> Entry:
        """An adapter that has no pages yet.

        Args:
            modules: its matrices.
            layout: of pages.
            stripes: that its rank components are spread over.
            shards: of the mesh.
            groups: projections that share an input.
            max_rank: largest rank of any module.

        Raises:
            CapacityError: its rank is too large.
        """
        for (layer, name), m in modules.items():
            if len(m.a) > max_rank:
                raise CapacityError(
                    f"rank {len(m.a)} of {name} in layer {layer}; this server holds rank <= {max_rank}: "
                    "raise --max_lora_rank"
                )
        ranks = streams.stripe_ranks(modules, layout, stripes)
        counts = [layout.a_pages(r) for r in ranks.tolist()], [layout.b_pages(r) for r in ranks.tolist()]
        numbers = [n * shards for n in streams.true_numbers(modules, layout)]
        a, b = (Side(*side) for side in zip(counts, numbers, strict=True))
        return cls(ranks, streams.scales(modules, layout), streams.facts(modules, layout, groups), (a, b))

    @property
    def stored_pages(self) -> int:
        """Pages of A and B on one memory."""
        return sum(side.count for side in self.sides)

    @property
    def may_leave(self) -> bool:
        """Whether its device pages may be taken for another adapter."""
        return not (self.references or self.wish or self.pinned)

    @property
    def pool_pages(self) -> list[int]:
        return flat(stripe for side in self.sides for stripe in side.pool)

    @property
    def device_pages(self) -> list[int]:
        return flat(side.taken for side in self.sides)

    @property
    def device_count(self) -> int:
        """Device pages that it takes, those on their way included."""
        return sum(side.count for side in self.sides if side.device is not None or side.coming is not None)

    def missing(self, needs: Needs) -> list[Side]:
        """What a strategy reads on the device and is not there."""
        sides = zip(self.sides, needs, strict=True)
        return [side for side, needed in sides if needed and side.device is None and side.count]

    def place(self, needs: Needs, most: tuple[int, int]) -> PlacedAdapter:
        """The tables for its strategy, which reads there what `needs` says; A and B have up to `most` pages."""
        a, b = (_table(*of_side, stripes=len(self.ranks)) for of_side in zip(self.sides, needs, most, strict=True))
        return PlacedAdapter(self.strategy, self.ranks, self.scale, a, b, self.facts)

    def check_integrity(self, needs: Needs, adapter_id: int) -> None:
        """Raises AssertionError unless it has whole sides on the device, those that who serves it reads among them."""
        for side, needed in zip(self.sides, needs, strict=True):
            taken = side.device or side.coming
            assert taken is None or [len(pages) for pages in taken] == side.counts, adapter_id
            present = side.device is not None or not side.count
            assert present or not (needed and (self.references or self.wish)), f"{adapter_id} is not where it is read"


def _table(side: Side, on_device: bool, most: int, *, stripes: int) -> np.ndarray:
    table = np.zeros((stripes, most), np.int32)
    for row, pages in zip(table, side.device or side.pool if on_device else side.pool, strict=True):
        row[: len(pages)] = pages
    return table


def flat(pages: Iterable[Iterable[int]]) -> list[int]:
    """Pages of several lists, one after the other."""
    return [page for some in pages for page in some]
