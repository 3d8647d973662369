"""What each attention strategy moves over the link in a step: closed formulas, as those of `traffic.py`.

Bytes are those of all shards together. Useful are (K and heads of one shard, G tokens of a page, H their width)

    local       pages that are not on the device, each once               2 K G H a page and layer
    distributed q to each pool device that holds pages of its sequence;   heads H to the pool; heads (H + max and sum)
                from each the output, maximum and sum                     back
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from memory_pool.layout import PageLayout
from strategies.lanes import SCRATCH_PAGES
from strategies.traffic import WORD, Bytes, control, crossed


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KvBucket:
    """Sizes of one phase's attention in a compiled program.

    Attributes:
        phase: first part of the strategies' names in the trace.
        groups: N.
        queries: Q, of a group.
        heads: query heads of one shard.
        layout: of pages, of one shard.
        table_pages: M, pages of a table.
        stream_pages: entries of the stream, a multiple of SCRATCH_PAGES.
        pool_devices: D.
        shards: of the mesh axis `tensor`.
    """

    phase: str
    groups: int
    queries: int
    heads: int
    layout: PageLayout
    table_pages: int
    stream_pages: int
    pool_devices: int = 1
    shards: int = 1

    @functools.cached_property
    def item(self) -> int:
        """Bytes of a number, all shards together."""
        return self.shards * self.layout.dtype.itemsize

    @functools.cached_property
    def head_layers(self) -> int:
        """Heads of one query in all layers, on one shard."""
        return self.heads * self.layout.num_layers

    @functools.cached_property
    def round_bytes(self) -> int:
        """Pages of one round in all layers."""
        return SCRATCH_PAGES * self.layout.page_bytes * self.shards


class KvUse(NamedTuple):
    """What the host knows of a step's attention.

    Attributes:
        rounds: of SCRATCH_PAGES streamed pages; 0 when none is missing.
        streamed_pages: pages in them, each once however many sequences read it.
        near_queries: [D], queries that are attended near the data, by pool device that holds pages of theirs.
    """

    rounds: int = 0
    streamed_pages: int = 0
    near_queries: Sequence[int] = ()

    @property
    def any(self) -> bool:
        """Whether pages are streamed or attended near the data."""
        return bool(self.rounds) or any(self.near_queries)


def local(bucket: KvBucket, use: KvUse) -> list[Bytes]:
    """Rounds of pages to the device."""
    if not use.rounds:
        return []
    useful = use.streamed_pages * bucket.layout.page_bytes * bucket.shards
    calls = use.rounds * bucket.layout.num_layers
    return [
        crossed("kv", "local", "to_device", bucket.phase, use.rounds * bucket.round_bytes, useful),
        control("local", bucket.phase, 2 * WORD * calls * bucket.shards),
    ]


def distributed(bucket: KvBucket, use: KvUse) -> list[Bytes]:
    """Queries to the pool, partial results back."""
    if not any(use.near_queries):
        return []
    rows = bucket.pool_devices * bucket.groups * bucket.queries * bucket.head_layers
    useful_rows = sum(use.near_queries) * bucket.head_layers
    q_bytes = bucket.layout.head_dim * bucket.item
    back_bytes = q_bytes + 2 * WORD * bucket.shards
    phase = bucket.phase
    return [
        crossed("activation", "distributed", "to_pool", phase, rows * q_bytes, useful_rows * q_bytes),
        crossed("activation", "distributed", "to_device", phase, rows * back_bytes, useful_rows * back_bytes),
        control("distributed", phase, 2 * WORD * bucket.layout.num_layers * bucket.shards),
    ]


def kv_tables(bucket: KvBucket, *, streamed_pages: int, near_pages: int) -> list[Bytes]:
    """Page tables and positions to the pool; they go there in each step.

    Args:
        bucket: sizes.
        streamed_pages: entries of the stream in use.
        near_pages: entries in use of the tables of pages that are attended near the data.
    """
    word = WORD * bucket.shards
    positions = bucket.groups * bucket.queries + 2
    tables = bucket.pool_devices * bucket.groups * bucket.table_pages
    used = near_pages + positions if near_pages else 0
    phase = bucket.phase
    return [
        crossed("control", "local", "to_pool", phase, word * bucket.stream_pages, word * streamed_pages),
        crossed("control", "distributed", "to_pool", phase, word * (tables + positions), word * used),
    ]


def kv_loop_counts(bucket: KvBucket, use: KvUse) -> dict[str, int]:
    """How often what is data in a program runs, for `audit`."""
    return {f"{bucket.phase}.local": use.rounds, f"{bucket.phase}.distributed": int(any(use.near_queries))}
