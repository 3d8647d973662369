"""The lanes of a step: which tokens a strategy serves, and the pages it needs for them. Arrays only.

Strategy is data: every program holds all lanes, an empty one is skipped by its count. Pages are numbers of a page space
(`memory_pool.layout`): the pool's or the device's, whichever the strategy reads.

Letters: T tokens of a phase, E adapters that a lane has room for, J projections, S stripes (pool devices that share
one adapter; 1 where each adapter lies on one), L layers, M pages of a table, N query groups, Q queries of a group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

BASE = -1
"""Owner of a token that no adapter of the lane changes."""

ABSENT = -1
"""In a page table: this page is not in the memory that the table is for."""


class LoraLane(NamedTuple):
    """Tokens that one LoRA strategy serves, and where their adapters are.

    Attributes:
        owner: [T] int32, which adapter of the lane a token belongs to, or BASE.
        count: [] int32, adapters of the lane; 0 skips it.
        ranks: [S, E, J] int32, rank components by projection; 0 beyond `count`.
        scale: [E, L, J] float32, factor on the product.
        a_pages: [S, E, MA] int32, pages of the A stream; 0 beyond its end.
        b_pages: [S, E, MB] int32, pages of the B stream; 0 beyond its end.
    """

    owner: Any
    count: Any
    ranks: Any
    scale: Any
    a_pages: Any
    b_pages: Any


class Stripe(NamedTuple):
    """A lane as one pool device sees it: the same fields without the axis S. What kernels take."""

    owner: Any
    count: Any
    ranks: Any
    scale: Any
    a_pages: Any
    b_pages: Any


class AttentionLane(NamedTuple):
    """Queries in N groups of Q; the queries of a group belong to one sequence.

    Attributes:
        tables: [N, M] int32, the sequence's pages in order of position, ABSENT where a page is not in this memory;
            M * G is a multiple of CHUNK_TOKENS.
        positions: [N, Q] int32, -1 for padding.
        first: [] int32, smallest position of any query.
        end: [] int32, largest position of any query plus one; 0 when the lane is empty.
    """

    tables: Any
    positions: Any
    first: Any
    end: Any


class KvLanes(NamedTuple):
    """One phase's attention, device side: pages on the device, and how the others are reached.

    A group's pages that are not on the device are either streamed (`local`) or attended near the data (`distributed`).

    Attributes:
        device: tables of the KV pages on the device, and the queries.
        slots: [N, M] int32, place of a page in `KvControl.stream`, ABSENT for pages that are not streamed.
        rounds: [] int32, rounds of SCRATCH_PAGES that the stream takes; 0 skips it.
        near_groups: [] int32, groups with pages that are attended near the data; 0 skips it.
    """

    device: Any
    slots: Any
    rounds: Any
    near_groups: Any


class KvControl(NamedTuple):
    """The same phase's attention, pool side.

    Attributes:
        stream: [M_all] int32, pool pages to stream, each once however many groups read it; 0 beyond the end; a
            multiple of SCRATCH_PAGES.
        tables: [D, N, M] int32, pool pages that are attended near the data, by pool device, ABSENT for others.
        positions: [N, Q] int32, as on the device side.
        first: [] int32.
        end: [] int32.
    """

    stream: Any
    tables: Any
    positions: Any
    first: Any
    end: Any


SCRATCH_PAGES = 64
"""KV pages of one layer that `local` holds at once beside those in device pages."""


class Memory(NamedTuple):
    """The three page arrays of a shard, raw bits [L, P, W] (`memory_pool.page_memory`).

    Attributes:
        pool: in the pool; read-only in a step.
        adapters: adapter pages on the device; read-only in a step.
        kv: KV pages on the device.
    """

    pool: Any
    adapters: Any
    kv: Any


def rows_of(lane: LoraLane | Stripe, x_NI: Any, first: int) -> Any:
    """[T, I], the rows of a lane's tokens, the first of which is row `first`. A copy, but where these are all rows."""
    return x_NI[first : first + lane.owner.shape[0]]


def stripe_of(lane: LoraLane, index: int) -> Stripe:
    """The lane as pool device `index` sees it. Works near the data as well."""
    return Stripe(lane.owner, lane.count, lane.ranks[index], lane.scale, lane.a_pages[index], lane.b_pages[index])
