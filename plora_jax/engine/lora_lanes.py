"""Lays the adapters of a step into lanes, one lane a strategy.

A step has several phases that adapters take part in (`plora_jax.engine.batch.LORA_PHASES`). Each has a lane a strategy;
a lane lists its adapters and says which of them each token belongs to. The tables of a lane change only when its
adapters do: `Lanes.key` says so, and whoever sends them need not send them again.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memory_pool.adapter_pool import PlacedAdapter
from strategies.lanes import BASE, LoraLane


class LaneShape(NamedTuple):
    """Sizes of a lane.

    Attributes:
        tokens: T.
        entries: E, adapters there is room for.
        stripes: S.
        layers: L.
        projections: J.
        a_pages: MA.
        b_pages: MB.
    """

    tokens: int
    entries: int
    stripes: int
    layers: int
    projections: int
    a_pages: int
    b_pages: int


class AdapterUse(NamedTuple):
    """An adapter of a lane and the number of tokens that it serves there."""

    placed: PlacedAdapter
    tokens: int


class LaneTokens(NamedTuple):
    """The part of a `LoraLane` that changes from step to step."""

    owner: Any
    count: Any


class LaneTables(NamedTuple):
    """The part of a `LoraLane` that is the adapters'."""

    ranks: Any
    scale: Any
    a_pages: Any
    b_pages: Any


class Lanes(NamedTuple):
    """The lanes of one phase, numpy arrays.

    Attributes:
        tokens: by strategy.
        tables: by strategy.
        key: equal for equal tables, as long as the placements of `use` live.
        use: adapters by strategy, for the ledger; a strategy without any is absent.
    """

    tokens: Mapping[str, LaneTokens]
    tables: Mapping[str, LaneTables]
    key: Hashable
    use: Mapping[str, Sequence[AdapterUse]]


class _Known(NamedTuple):
    """Lanes that were made, and all that they were made from: the next step has the same rows more often than not."""

    owners: np.ndarray
    changes: int | None
    placed: Mapping[int, PlacedAdapter]
    lanes: Lanes

    def hold(self, owners: np.ndarray, placed: Callable[[int], PlacedAdapter], changes: int | None) -> bool:
        """Whether the same would be made now."""
        same = changes == self.changes and np.array_equal(owners, self.owners)
        return same and all(placed(identity) is adapter for identity, adapter in self.placed.items())


def join(tokens: LaneTokens, tables: LaneTables) -> LoraLane:
    """A lane from its parts."""
    return LoraLane(*tokens, *tables)


class LanePacker:
    """Makes the lanes of one phase.

    Args:
        shape: sizes.
        strategies: names, one lane each.
    """

    def __init__(self, shape: LaneShape, strategies: Sequence[str]) -> None:
        self._shape = shape
        self._nobody = LaneTokens(np.full(shape.tokens, BASE, np.int32), np.int32(0))
        nothing = self._tables(())
        self.empty = Lanes(dict.fromkeys(strategies, self._nobody), dict.fromkeys(strategies, nothing), (), {})
        self._last = self.empty
        self._known: _Known | None = None

    def lanes(self, owners: np.ndarray, placed: Callable[[int], PlacedAdapter], *, changes: int | None = None) -> Lanes:
        """The lanes of some tokens.

        Args:
            owners: [T] identities of adapters, 0 for the base model.
            placed: where an adapter is and by which strategy it is served; the same object as long as nothing about
                that changes.
            changes: take only adapters that change this projection.
        """
        if not owners.any():
            return self.empty
        if self._known is not None and self._known.hold(owners, placed, changes):
            return self._known.lanes
        identities, counts = np.unique(owners[owners > 0], return_counts=True)
        found = {identity: placed(identity) for identity in identities.tolist()}
        lanes = self._lanes(owners, found, counts.tolist(), changes)
        self._known = _Known(owners.copy(), changes, found, lanes)
        return lanes

    def _lanes(
        self, owners: np.ndarray, placed: Mapping[int, PlacedAdapter], counts: Sequence[int], changes: int | None
    ) -> Lanes:
        members: dict[str, list[AdapterUse]] = collections.defaultdict(list)
        tokens = dict(self.empty.tokens)
        for (identity, adapter), count in zip(placed.items(), counts, strict=True):
            if changes is not None and not adapter.ranks[:, changes].any():
                continue
            uses = members[adapter.strategy]
            owner = tokens[adapter.strategy].owner if uses else self._nobody.owner.copy()
            owner[owners == identity] = len(uses)
            uses.append(AdapterUse(adapter, count))
            tokens[adapter.strategy] = LaneTokens(owner, np.int32(len(uses)))
        if not members:
            return self.empty
        key = tuple((name, *(id(use.placed) for use in uses)) for name, uses in sorted(members.items()))
        if key != self._last.key:
            made = {name: self._tables([use.placed for use in uses]) for name, uses in members.items()}
            self._last = Lanes({}, {**self.empty.tables, **made}, key, members)
        return Lanes(tokens, self._last.tables, key, members)

    def _tables(self, adapters: Sequence[PlacedAdapter]) -> LaneTables:
        s = self._shape
        tables = LaneTables(
            ranks=np.zeros((s.stripes, s.entries, s.projections), np.int32),
            scale=np.zeros((s.entries, s.layers, s.projections), np.float32),
            a_pages=np.zeros((s.stripes, s.entries, s.a_pages), np.int32),
            b_pages=np.zeros((s.stripes, s.entries, s.b_pages), np.int32),
        )
        for e, adapter in enumerate(adapters):
            tables.ranks[:, e] = adapter.ranks
            tables.scale[e] = adapter.scale
            tables.a_pages[:, e, : adapter.a_pages.shape[1]] = adapter.a_pages
            tables.b_pages[:, e, : adapter.b_pages.shape[1]] = adapter.b_pages
        return tables
