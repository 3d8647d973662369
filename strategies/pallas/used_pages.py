"""Which pages a kernel for TPUs takes, in order: the list that steers its pipeline.

A grid step takes an entry of a list. Lists have room for all pages of a lane's tables; how many entries they have is
data, and so is the size of the grid. Nobody's pages are not in them.

The lists are in scalar memory, of which a TensorCore has 1 MB from TPU v4 on (`pltpu.get_tpu_info`): LARGEST_LIST is
what one may take of it. Lanes with longer ones are left to XLA.

Letters: E adapters of a lane, T tokens, J projections, F projections of a group, M pages of a table, I entries of a
list, N query groups, B pages of an entry.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memory_pool.layout import PageLayout
from strategies.lanes import ABSENT, AttentionLane, Stripe

LARGEST_LIST = 512 << 10
"""Bytes."""
FAR = 1 << 30
"""First position of a page that is nobody's: no query sees it."""


class Streams(NamedTuple):
    """Where the components of a group of projections lie in the streams of adapters.

    Attributes:
        start: [F, E + 1] int32, unit of the first one; adapter E has none.
        rank: [F, E + 1] int32.
        units: of one component.
    """

    start: jax.Array
    rank: jax.Array
    units: int


def streams(lane: Stripe, *, layout: PageLayout, group: tuple[str, ...], side: str) -> Streams:
    """Args as of `strategies.low_rank.rows`; the projections of `group` are equally wide."""
    units = layout.a_units if side == "a" else layout.b_units
    at = jnp.array([layout.index(name) for name in group])
    units_EJ = lane.ranks * jnp.array(units, jnp.int32)
    start_EJ = jnp.cumsum(units_EJ, axis=1, dtype=jnp.int32) - units_EJ
    start_FE, rank_FE = (jnp.pad(table[:, at].T, ((0, 0), (0, 1))) for table in (start_EJ, lane.ranks))
    return Streams(start_FE, rank_FE, units[layout.index(group[0])])


def adapter_list_bytes(tables_EM: jax.Array) -> int:
    """Bytes of `adapter_pages`."""
    return 3 * 4 * (tables_EM.size + 1)


def seen_list_bytes(tables_NM: jax.Array, together: int) -> int:
    """Bytes of `seen_pages`."""
    groups, table_pages = tables_NM.shape
    return (1 + 2 * together) * 4 * groups * -(-table_pages // together)


class AdapterPages(NamedTuple):
    """Pages of rank components, adapter by adapter.

    Attributes:
        page: [I] int32, row of the pages [L * P, W].
        adapter: [I] int32, E for a page that is nobody's.
        unit: [I] int32, place of the page's first unit in the adapter's stream.
        entries: [] int32, how many; at least one.
    """

    page: jax.Array
    adapter: jax.Array
    unit: jax.Array
    entries: jax.Array


def adapter_pages(
    owner_T: jax.Array, found: Streams, tables_EM: jax.Array, first_page: jax.Array, *, per_page: int
) -> AdapterPages:
    """The pages of those adapters of a lane that have tokens, each once.

    Args:
        owner_T: [T] int32.
        found: components of a group of projections; pages that hold any are listed.
        tables_EM: [E, M] int32.
        first_page: [] int32, row of the layer's first page.
        per_page: units of a page.
    """
    num_adapters, table_pages = tables_EM.shape
    used_E = jnp.any(owner_T[:, None] == jnp.arange(num_adapters), axis=0)
    start_FE, rank_FE = found.start[:, :-1], found.rank[:, :-1]
    end_FE = start_FE + rank_FE * found.units
    some_FE = rank_FE > 0
    first_E = jnp.min(jnp.where(some_FE, start_FE, FAR), axis=0) // per_page
    last_E = (jnp.max(jnp.where(some_FE, end_FE, 0), axis=0) + per_page - 1) // per_page
    pages_E = jnp.where(used_E, jnp.maximum(last_E - first_E, 0), 0)
    ends_E = jnp.cumsum(pages_E, dtype=jnp.int32)
    entry_I = jnp.arange(num_adapters * table_pages + 1, dtype=jnp.int32)
    adapter_I = jnp.sum((entry_I[:, None] >= ends_E[None, :]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    own_I = jnp.minimum(adapter_I, num_adapters - 1)
    at_I = first_E[own_I] + entry_I - (ends_E - pages_E)[own_I]
    page_I = jnp.where(adapter_I < num_adapters, tables_EM[own_I, jnp.clip(at_I, 0, table_pages - 1)], 0)
    return AdapterPages(first_page + page_I, adapter_I, at_I * per_page, jnp.maximum(ends_E[-1], 1))


class SeenPages(NamedTuple):
    """KV pages that queries see, B at a time, group by group; each group has an entry.

    Attributes:
        group: [I] int32.
        page: [B, I] int32, rows of the pages [L * P, W].
        position: [B, I] int32, position of the page's first token, FAR for a page that is nobody's.
        entries: [] int32, how many.
    """

    group: jax.Array
    page: jax.Array
    position: jax.Array
    entries: jax.Array


def seen_pages(
    lane: AttentionLane, window: jax.Array, first_page: jax.Array, *, page_tokens: int, together: int
) -> SeenPages:
    """The pages of a lane that are in this memory and in the window of a query, each once a group.

    Args:
        lane: tables and positions.
        window: [] int32.
        first_page: [] int32, row of the layer's first page.
        page_tokens: G.
        together: B.
    """
    num_groups, table_pages = lane.tables.shape
    real_NQ = lane.positions >= 0
    begin_N = jnp.min(jnp.where(real_NQ, lane.positions, FAR), axis=1) - window + 1
    end_N = jnp.max(lane.positions, axis=1) + 1
    at_M = jnp.arange(table_pages, dtype=jnp.int32) * page_tokens
    seen_NM = (at_M < end_N[:, None]) & (at_M + page_tokens > begin_N[:, None]) & (lane.tables != ABSENT)
    order_NM = jnp.argsort(~seen_NM, axis=1, stable=True).astype(jnp.int32)
    pages_N = jnp.sum(seen_NM.astype(jnp.int32), axis=1, dtype=jnp.int32)
    entries_N = jnp.maximum((pages_N + together - 1) // together, 1)
    ends_N = jnp.cumsum(entries_N, dtype=jnp.int32)
    entry_I = jnp.arange(num_groups * -(-table_pages // together), dtype=jnp.int32)
    group_I = jnp.minimum(
        jnp.sum((entry_I[:, None] >= ends_N[None, :]).astype(jnp.int32), axis=1, dtype=jnp.int32), num_groups - 1
    )
    first_I = (entry_I - (ends_N - entries_N)[group_I]) * together
    place_BI = first_I[None, :] + jnp.arange(together, dtype=jnp.int32)[:, None]
    at_BI = order_NM[group_I[None, :], jnp.minimum(place_BI, table_pages - 1)]
    real_BI = place_BI < pages_N[group_I][None, :]
    page_BI = first_page + jnp.where(real_BI, lane.tables[group_I[None, :], at_BI], 0)
    return SeenPages(group_I, page_BI, jnp.where(real_BI, at_BI * page_tokens, FAR), ends_N[-1])
