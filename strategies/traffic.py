"""What each LoRA strategy moves over the link in a step: closed formulas, for the ledger.

The formulas know the sizes of a compiled bucket and what the host knows of the step's lanes; they do not look at the
program. The audit (`memory_pool.auditing`) counts the same program independently, and a test holds the two together.

Moved bytes are those of the arrays that cross, all shards together: T tokens of the bucket, the widest rank, whole
chunks and rounds, for the groups of projections that an adapter of the lane changes. Useful bytes are those that a step
of exactly these tokens and ranks would need (b tokens of an adapter, I and O of one shard, r its rank):

    fetch       A and B of each adapter once                              r (I + O)
    near_data   x once an input group and stripe, y once a stripe         S b I to the pool, S b O back
    split       x the same; each component of m comes from one stripe     S b I to the pool, b r back

S is 1 for adapters that are pinned to a pool device. With tensor parallelism each shard moves its own, so everything
is multiplied by the number of shards, and I, O, K and heads are those of one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from memory_pool.adapter_entry import PlacedAdapter
from memory_pool.layout import PageLayout
from memory_pool.ledger import Crossing, Direction, LinkBytes
from strategies.fetch import chunk_scope
from strategies.low_rank import CHUNK_ROWS

Bytes = tuple[Crossing, LinkBytes]
STRATEGIES = ("resident", "fetch", "near_data", "split")
"""Names of the LoRA strategies, one lane each; `strategies.strategy_table` says how each serves."""

Groups = tuple[tuple[str, ...], ...]
"""Names of the projections that share an input, group by group."""

WORD = 4
"""Bytes of an index, a flag, a scale, a maximum or a sum."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoraBucket:
    """Sizes of one phase's lanes in a compiled program.

    Attributes:
        phase: first part of the lanes' names in the trace.
        tokens: T.
        layout: of pages, of one shard.
        groups: names of the projections that share an input, group by group.
        max_rank: R, most rank components of an adapter on one pool device.
        entries: E, adapters a lane has room for.
        a_pages: MA, pages of a table of A.
        b_pages: MB.
        stripes: S.
        shards: of the mesh axis `tensor`.
    """

    phase: str
    tokens: int
    layout: PageLayout
    groups: Groups
    max_rank: int
    entries: int
    a_pages: int
    b_pages: int
    stripes: int = 1
    shards: int = 1

    @functools.cached_property
    def item(self) -> int:
        """Bytes of a number of x, of y or of what is between, all shards together."""
        return self.shards * self.layout.dtype.itemsize

    @functools.cached_property
    def adapter_item(self) -> int:
        """Bytes of a number of A or B, all shards together."""
        return self.shards * self.layout.adapter_dtype.itemsize

    def x_bytes(self, changed: Groups) -> int:
        """Inputs of some groups to all stripes, of all layers."""
        return self._crossing(sum(self.layout.in_width(group[0]) for group in changed))

    def y_bytes(self, changed: Groups) -> int:
        """Outputs of the projections of some groups from all stripes, of all layers."""
        return self._crossing(sum(self.layout.out_width(name) for group in changed for name in group))

    def m_bytes(self, changed: Groups) -> int:
        """Products with A of the projections of some groups from all stripes, of all layers."""
        return self._crossing(self.max_rank * sum(map(len, changed)))

    def call_bytes(self, changed: Groups) -> int:
        """Layer numbers of one near-data call a group and layer."""
        return WORD * self.shards * self.layout.num_layers * len(changed)

    def _crossing(self, width: int) -> int:
        return self.stripes * self.layout.num_layers * self.tokens * width * self.item

    def changed(self, totals_SJ: np.ndarray) -> Groups:
        """The groups that a lane changes.

        Args:
            totals_SJ: rank components of its adapters.
        """
        found = set(np.flatnonzero(totals_SJ.any(axis=0)).tolist())
        return tuple(g for g in self.groups if found.intersection(map(self.layout.index, g)))

    @functools.cached_property
    def projections(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group)

    @functools.cached_property
    def indices(self) -> tuple[int, ...]:
        """J of each projection."""
        return tuple(self.layout.index(name) for name in self.projections)

    @functools.cached_property
    def component_numbers(self) -> np.ndarray:
        """I + O of each projection, what a rank component has."""
        return np.array([self.layout.in_width(name) + self.layout.out_width(name) for name in self.projections])

    @functools.cached_property
    def table_words(self) -> int:
        """Words of a lane's tables in the pool, on one shard."""
        layers, names = self.layout.num_layers, len(self.layout.names)
        entry = self.stripes * (names + self.a_pages + self.b_pages) + layers * names
        return self.tokens + 1 + self.entries * entry


class LaneFacts(NamedTuple):
    """Numbers of a lane's n adapters on one shard; the same as long as the lane's adapters are.

    Attributes:
        inputs: [n], sum of I over layers and input groups that an adapter changes.
        outputs: [n], sum of O over its matrices.
        ranks: [n], sum of r over its matrices.
        numbers: of A and B of all adapters.
        totals: [S, J], rank components of all adapters.
        pages: entries of the page tables in use.
        components: [n, J], rank components of each adapter on all stripes.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    ranks: np.ndarray
    numbers: int
    totals: np.ndarray
    pages: int
    components: np.ndarray


def lane_facts(adapters: Sequence[PlacedAdapter]) -> LaneFacts:
    """The facts of a lane.

    Args:
        adapters: of the lane, in its order; at least one.
    """
    facts = [adapter.facts for adapter in adapters]
    return LaneFacts(
        inputs=np.array([f.inputs for f in facts]),
        outputs=np.array([f.outputs for f in facts]),
        ranks=np.array([f.ranks for f in facts]),
        numbers=sum(f.a_numbers + f.b_numbers for f in facts),
        totals=np.sum([adapter.ranks for adapter in adapters], axis=0),
        pages=sum(int(np.count_nonzero(p)) for adapter in adapters for p in (adapter.a_pages, adapter.b_pages)),
        components=np.array([adapter.ranks.sum(axis=0) for adapter in adapters]),
    )


class LoraUse(NamedTuple):
    """What a lane that is not empty serves in a step.

    Attributes:
        tokens: [n], tokens of each adapter.
        facts: of the adapters.
    """

    tokens: Sequence[int]
    facts: LaneFacts


def resident(bucket: LoraBucket, use: LoraUse) -> list[Bytes]:
    """Nothing: A and B are on the device."""
    del bucket, use
    return []


def fetch(bucket: LoraBucket, use: LoraUse) -> list[Bytes]:
    """Chunks of A and B to the device."""
    chunks_P = chunks(use.facts.totals)[:, bucket.indices].sum(axis=0)
    layers = bucket.layout.num_layers
    moved = int(chunks_P @ bucket.component_numbers) * CHUNK_ROWS * layers * bucket.adapter_item
    calls = 2 * int(chunks_P.sum()) * layers
    return [
        crossed("adapter", "fetch", "to_device", bucket.phase, moved, use.facts.numbers * bucket.adapter_item),
        control("fetch", bucket.phase, 2 * WORD * calls * bucket.shards),
    ]


def near_data(bucket: LoraBucket, use: LoraUse) -> list[Bytes]:
    """Inputs to the pool, outputs back."""
    y = int(np.dot(use.tokens, use.facts.outputs)) * bucket.stripes * bucket.item
    changed = bucket.changed(use.facts.totals)
    return [
        _inputs("near_data", bucket, use, changed),
        crossed("activation", "near_data", "to_device", bucket.phase, bucket.y_bytes(changed), y),
        control("near_data", bucket.phase, bucket.call_bytes(changed)),
    ]


def split(bucket: LoraBucket, use: LoraUse) -> list[Bytes]:
    """Inputs to the pool, their products with A back."""
    m = int(np.dot(use.tokens, use.facts.ranks)) * bucket.item
    changed = bucket.changed(use.facts.totals)
    return [
        _inputs("split", bucket, use, changed),
        crossed("activation", "split", "to_device", bucket.phase, bucket.m_bytes(changed), m),
        control("split", bucket.phase, bucket.call_bytes(changed)),
    ]


def lora_tables(bucket: LoraBucket, strategy: str, use: LoraUse | None) -> Bytes:
    """A lane's tables to the pool; they go there in each step, also when the lane is empty.

    Args:
        bucket: sizes.
        strategy: of the lane.
        use: None when the lane is empty.
    """
    used = 1
    if use is not None:
        names = len(bucket.layout.names)
        per_adapter = names * (bucket.stripes + bucket.layout.num_layers)
        used += int(np.sum(use.tokens)) + len(use.tokens) * per_adapter + use.facts.pages
    moved = WORD * bucket.shards * bucket.table_words
    return crossed("control", strategy, "to_pool", bucket.phase, moved, WORD * bucket.shards * used)


def lora_loop_counts(bucket: LoraBucket, use: Mapping[str, LoraUse]) -> dict[str, int]:
    """How often what is data in a program runs, for `audit`.

    Args:
        bucket: sizes.
        use: by strategy; one that is absent is an empty lane.
    """
    counts = lane_counts(bucket.phase, use)
    for name in STRATEGIES:
        changed = bucket.changed(use[name].facts.totals) if name in use else ()
        counts |= {group_scope(bucket.phase, name, group): int(group in changed) for group in bucket.groups}
    totals = use["fetch"].facts.totals if "fetch" in use else np.zeros((bucket.stripes, len(bucket.layout.names)), int)
    for s, of_stripe in enumerate(chunks(totals)):
        for name, index in zip(bucket.projections, bucket.indices, strict=True):
            counts[chunk_scope(f"{bucket.phase}.fetch", name, s)] = int(of_stripe[index])
    return counts


def lane_counts(phase: str, use: Mapping[str, LoraUse]) -> dict[str, int]:
    """How often the lanes of a phase are served, and whether any is."""
    counts = {f"{phase}.{name}": int(name in use) for name in STRATEGIES}
    return {any_scope(phase): int(bool(use)), **counts}


def any_scope(phase: str) -> str:
    """The name, in the trace, of what is done for any lane of a phase."""
    return f"{phase}.any"


def group_scope(phase: str, strategy: str, group: Sequence[str]) -> str:
    """The name, in the trace, of what a lane does for a group of projections."""
    return f"{phase}.{strategy}.{group[0]}"


def chunks(totals_SJ: np.ndarray) -> np.ndarray:
    """Chunks of CHUNK_ROWS rank components, of each stripe and projection."""
    return -(-totals_SJ // CHUNK_ROWS)


def _inputs(strategy: str, bucket: LoraBucket, use: LoraUse, changed: Groups) -> Bytes:
    useful = int(np.dot(use.tokens, use.facts.inputs)) * bucket.stripes * bucket.item
    return crossed("activation", strategy, "to_pool", bucket.phase, bucket.x_bytes(changed), useful)


def control(strategy: str, phase: str, size: int) -> Bytes:
    """Tables and numbers of a layer to the pool, all of them of use."""
    return crossed("control", strategy, "to_pool", phase, size, size)


def crossed(item: str, strategy: str, direction: Direction, phase: str, moved: int, useful: int) -> Bytes:
    """Bytes of an object that crossed in one direction."""
    return Crossing(item, strategy, direction, phase), LinkBytes(moved, useful)
