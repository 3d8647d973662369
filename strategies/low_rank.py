"""Shrink and expand over adapters in pages: y += scale * (x A) B for tokens of many adapters of different ranks.

The rank components of all adapters of a lane are laid end to end and taken in chunks. A token multiplies with every
component of a chunk, and what is not its own adapter's is set to zero between shrink and expand. So each component is
read once a step however many tokens use it, ranks mix freely, and the amount of work is data, not program.

All functions run on the device as well as near the data, where constants are refused: zeros and indices are made from
operands. How a chunk's rows are gathered is a parameter, so that the same loop serves pages behind the link and faster
gathers. They are the reference for the native kernels.

Letters: T tokens, I in, O out, E adapters of a lane, J projections, C rank components of a chunk, R the most components
of an adapter, L layers, P pages, W numbers of a page in one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memory_pool.layout import PageLayout
from memory_pool.raw import from_raw, recast
from strategies.lanes import Stripe, rows_of

CHUNK_ROWS = 64
RowsKernel = Callable[..., jax.Array]
"""The contract of `rows`."""


def fill(like: jax.Array, shape: tuple[int, ...], dtype: Any, value: float = 0) -> jax.Array:
    """A constant array in the memory space of an array of integers that is not a scalar.

    Arithmetic on scalars gives scalars on the device, wherever the first is; so nothing is made from those.
    """
    one = lax.slice_in_dim(like.reshape(-1), 0, 1)
    return jnp.broadcast_to((one - one).astype(dtype), shape) + value


def count_up(like: jax.Array, size: int) -> jax.Array:
    """[size] int32, 0 to size - 1, in the memory space of an array of integers that is not a scalar."""
    return jnp.cumsum(fill(like, (size,), jnp.int32, 1), dtype=jnp.int32) - 1


def num_chunks(lane: Stripe, index: int) -> jax.Array:
    """Chunks of a lane's components of one projection, [] int32.

    Args:
        lane: adapters.
        index: J of the projection.
    """
    return (jnp.sum(_of_projection(lane.ranks, index), dtype=jnp.int32) + (CHUNK_ROWS - 1)) // CHUNK_ROWS


class Components(NamedTuple):
    """The rank components of a chunk, [C] int32 each.

    Attributes:
        owner: adapter of the lane; E beyond the last component.
        adapter: the same, but a valid index beyond the last component too.
        rank: which component of its adapter.
    """

    owner: jax.Array
    adapter: jax.Array
    rank: jax.Array


def components(lane: Stripe, chunk: jax.Array, index: int) -> Components:
    """Which components a chunk holds.

    Args:
        lane: adapters.
        chunk: [] int32.
        index: J of the projection.
    """
    ranks_E = _of_projection(lane.ranks, index)
    ends_E = jnp.cumsum(ranks_E, dtype=jnp.int32)
    at_C = chunk * CHUNK_ROWS + count_up(lane.ranks, CHUNK_ROWS)
    owner_C = jnp.sum((at_C[:, None] >= ends_E[None, :]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    adapter_C = jnp.minimum(owner_C, ranks_E.shape[0] - 1)
    return Components(owner_C, adapter_C, at_C - _take(ends_E - ranks_E, adapter_C))


class Places(NamedTuple):
    """Where the units of a chunk's rows are in one layer, [C, N] int32 each, N units a row.

    Attributes:
        page: of the page table's memory.
        unit: in the page.
    """

    page: jax.Array
    unit: jax.Array


def places(lane: Stripe, chunk: jax.Array, *, layout: PageLayout, name: str, side: str) -> Places:
    """Where `rows` finds a chunk of rank components of one projection; arguments as there."""
    index = layout.index(name)
    units, tables_EM = (layout.a_units, lane.a_pages) if side == "a" else (layout.b_units, lane.b_pages)
    found = components(lane, chunk, index)
    start_E = fill(lane.ranks, lane.ranks.shape[:1], jnp.int32)
    for before in range(index):
        start_E = start_E + _of_projection(lane.ranks, before) * units[before]
    unit_C = _take(start_E, found.adapter) + found.rank * units[index]
    unit_CN = unit_C[:, None] + count_up(lane.ranks, units[index])[None, :]
    per_page = layout.units_per_page
    entry_CN = jnp.minimum(unit_CN // per_page, tables_EM.shape[1] - 1)
    page_CN = tables_EM.at[found.adapter[:, None], entry_CN].get(mode="promise_in_bounds")
    return Places(page_CN, unit_CN % per_page)


def rows(
    pages_LPW: jax.Array, layer: jax.Array, lane: Stripe, chunk: jax.Array, *, layout: PageLayout, name: str, side: str
) -> jax.Array:
    """Gathers a chunk of rank components of one projection.

    Args:
        pages_LPW: [L, P, W] raw numbers.
        layer: [] int32.
        lane: adapters; its page table of the side in question names pages of `pages_LPW`.
        chunk: [] int32.
        layout: where rows lie in an adapter's pages.
        name: of the projection.
        side: "a" for rows of A, "b" for columns of B.

    Returns:
        [C, width] raw numbers; some rows of the pages beyond the last component.
    """
    page_CN, unit_CN = places(lane, chunk, layout=layout, name=name, side=side)
    flat_CN = (layer * pages_LPW.shape[1] + page_CN) * layout.units_per_page + unit_CN
    taken = pages_LPW.reshape(-1, layout.unit).at[flat_CN].get(mode="promise_in_bounds")
    return taken.reshape(CHUNK_ROWS, -1)


def shrink(
    x_TI: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: Stripe,
    *,
    layout: PageLayout,
    group: tuple[str, ...],
    max_rank: int,
    out_dtype: Any = None,
    gather: RowsKernel = rows,
) -> jax.Array:
    """scale * (x A) of each token's own adapter.

    Args:
        x_TI: [T, I] input that the projections of `group` share.
        pages_LPW: [L, P, W] raw numbers.
        layer: [] int32.
        lane: tokens and adapters; only its `a_pages` are read.
        layout: where rows lie in an adapter's pages.
        group: names of projections.
        max_rank: R; no adapter has more components.
        out_dtype: of the result; by default that of x.
        gather: gives the rows of a chunk.

    Returns:
        [len(group), T, R], 0 beyond the rank of a token's adapter and for tokens of the base model.

    Cost:
        2 * T * I FLOPs and I numbers read for each component.
    """
    token_T = count_up(lane.ranks, x_TI.shape[0])
    rank_R = count_up(lane.ranks, max_rank)
    owner_T = jnp.maximum(lane.owner, 0)

    def one(name: str) -> jax.Array:
        index = layout.index(name)
        ranks_E = _of_projection(lane.ranks, index)
        ends_E = jnp.cumsum(ranks_E, dtype=jnp.int32)
        at_TR = _take(ends_E - ranks_E, owner_T)[:, None] + rank_R[None, :]
        own_TR = (lane.owner[:, None] >= 0) & (rank_R[None, :] < _take(ranks_E, owner_T)[:, None])

        def step(i: jax.Array, m_TR: jax.Array) -> jax.Array:
            a_CI = _opened(gather(pages_LPW, layer, lane, i, layout=layout, name=name, side="a"), layout)
            m_TC = _scaled_products(x_TI, a_CI, _scale(lane, components(lane, i, index), layer, index))
            in_chunk = at_TR - i * CHUNK_ROWS
            here = own_TR & (in_chunk >= 0) & (in_chunk < CHUNK_ROWS)
            in_chunk = jnp.minimum(jnp.maximum(in_chunk, 0), CHUNK_ROWS - 1)
            return lax.select(here, _take(m_TC.reshape(-1), token_T[:, None] * CHUNK_ROWS + in_chunk), m_TR)

        chunks = num_chunks(lane, index)
        nothing = fill(lane.ranks, (x_TI.shape[0], max_rank), jnp.float32)
        return lax.fori_loop(chunks * 0, chunks, step, nothing).astype(out_dtype or x_TI.dtype)

    return jnp.stack([one(name) for name in group])


def expand(
    m_GTR: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: Stripe,
    *,
    layout: PageLayout,
    group: tuple[str, ...],
    gather: RowsKernel = rows,
) -> tuple[jax.Array, ...]:
    """m B of each token's own adapter.

    Args:
        m_GTR: [len(group), T, R] from `shrink`, in its dtype or float32.
        pages_LPW: [L, P, W] raw numbers.
        layer: [] int32.
        lane: tokens and adapters; only its `b_pages` are read.
        layout: where rows lie in an adapter's pages.
        group: names of projections.
        gather: gives the rows of a chunk.

    Returns:
        [T, O] float32 for each of `group`; 0 for tokens of the base model.

    Cost:
        2 * T * O FLOPs and O numbers read for each component.
    """
    max_rank = m_GTR.shape[2]

    def one(m_TR: jax.Array, name: str) -> jax.Array:
        index = layout.index(name)

        def step(i: jax.Array, y_TO: jax.Array) -> jax.Array:
            found = components(lane, i, index)
            b_CO = _opened(gather(pages_LPW, layer, lane, i, layout=layout, name=name, side="b"), layout)
            m_TC = m_TR.at[:, jnp.minimum(found.rank, max_rank - 1)].get(mode="promise_in_bounds")
            return y_TO + _expand_chunk(m_TC, b_CO.astype(m_TR.dtype), lane.owner, found.owner)

        chunks = num_chunks(lane, index)
        nothing = fill(lane.ranks, (m_TR.shape[0], layout.out_width(name)), jnp.float32)
        return lax.fori_loop(chunks * 0, chunks, step, nothing)

    return tuple(one(lax.index_in_dim(m_GTR, at, axis=0, keepdims=False), name) for at, name in enumerate(group))


def delta(
    x_TI: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: Stripe,
    *,
    layout: PageLayout,
    group: tuple[str, ...],
    max_rank: int,
    out_dtype: Any = None,
    gather: RowsKernel = rows,
) -> tuple[jax.Array, ...]:
    """scale * (x A) B of each token's own adapter: `shrink`, then `expand`, chunk by chunk.

    Args:
        x_TI: [T, I] input that the projections of `group` share.
        pages_LPW: [L, P, W] raw numbers.
        layer: [] int32.
        lane: tokens and adapters, both page tables of the same memory.
        layout: where rows lie in an adapter's pages.
        group: names of projections.
        max_rank: R; no adapter has more components. Not needed here, but by kernels with the same contract.
        out_dtype: what results are rounded to; None for float32.
        gather: gives the rows of a chunk.

    Returns:
        [T, O] for each of `group`; 0 for tokens of the base model. Between shrink and expand numbers are
        rounded to the dtype of x.

    Cost:
        2 * T * (I + O) FLOPs and (I + O) numbers read for each component.
    """
    del max_rank

    def one(name: str) -> jax.Array:
        index = layout.index(name)

        def step(i: jax.Array, y_TO: jax.Array) -> jax.Array:
            found = components(lane, i, index)
            a_CI, b_CO = (
                _opened(gather(pages_LPW, layer, lane, i, layout=layout, name=name, side=side), layout)
                for side in ("a", "b")
            )
            m_TC = _scaled_products(x_TI, a_CI, _scale(lane, found, layer, index)).astype(x_TI.dtype)
            return y_TO + _expand_chunk(m_TC, b_CO.astype(x_TI.dtype), lane.owner, found.owner)

        chunks = num_chunks(lane, index)
        nothing = fill(lane.ranks, (x_TI.shape[0], layout.out_width(name)), jnp.float32)
        return lax.fori_loop(chunks * 0, chunks, step, nothing).astype(out_dtype or jnp.float32)

    return tuple(one(name) for name in group)


def add(
    sums: Sequence[jax.Array],
    x_NI: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: Stripe,
    *,
    layout: PageLayout,
    group: tuple[str, ...],
    max_rank: int,
    first: int = 0,
    delta: Callable[..., tuple[jax.Array, ...]] = delta,
) -> tuple[jax.Array, ...]:
    """`delta` of some rows' tokens, added to those rows.

    Args:
        sums: [N, O] float32 for each of `group`; N is at least `first` + T.
        x_NI: [N, I] input that the projections of `group` share.
        pages_LPW: as `delta`; so are those that follow.
        layer: [] int32.
        lane: tokens and adapters; the rows are those of its tokens.
        layout: of pages.
        group: names of projections.
        max_rank: R.
        first: row of the first token.
        delta: what is added.

    Returns:
        [N, O] float32 for each of `group`.
    """
    x_TI = rows_of(lane, x_NI, first)
    parts = delta(x_TI, pages_LPW, layer, lane, layout=layout, group=group, max_rank=max_rank)
    return add_rows(sums, parts, first=first)


def add_rows(sums: Sequence[jax.Array], parts: Sequence[jax.Array], *, first: int) -> tuple[jax.Array, ...]:
    """Sums [N, O] float32 with parts [T, O], one of each, added to their rows from `first` on."""

    def one(sum_NO: jax.Array, part_TO: jax.Array) -> jax.Array:
        rows_TO = lax.slice_in_dim(sum_NO, first, first + len(part_TO)) + part_TO.astype(jnp.float32)
        return lax.dynamic_update_slice_in_dim(sum_NO, rows_TO, first, 0)

    return tuple(map(one, sums, parts))


def _opened(rows_CW: jax.Array, layout: PageLayout) -> jax.Array:
    """Raw rows as numbers of A or B."""
    return (recast if layout.int8_adapters else from_raw)(rows_CW, layout.adapter_dtype)


def _scaled_products(x_TI: jax.Array, a_CI: jax.Array, scale_C: jax.Array) -> jax.Array:
    products = jnp.einsum("TI,CI->TC", x_TI, a_CI.astype(x_TI.dtype), preferred_element_type=jnp.float32)
    return products * scale_C[None, :]


def _expand_chunk(m_TC: jax.Array, b_CO: jax.Array, owner_T: jax.Array, owner_C: jax.Array) -> jax.Array:
    """m B of own components, float32. 0 * inf is NaN, so a B that is not finite gives NaN to its own tokens alone."""
    own_TC = owner_T[:, None] == owner_C[None, :]
    finite_CO = lax.is_finite(b_CO)
    broken_C = ~jnp.all(finite_CO, axis=1)
    m_TC = lax.select(own_TC, m_TC, fill(owner_C, m_TC.shape, m_TC.dtype))
    b_CO = lax.select(finite_CO, b_CO, fill(owner_C, b_CO.shape, b_CO.dtype))
    y_TO = jnp.einsum("TC,CO->TO", m_TC, b_CO, preferred_element_type=jnp.float32)
    broken_T = jnp.any(own_TC & broken_C[None, :], axis=1)
    broken_TO = jnp.broadcast_to(broken_T[:, None], y_TO.shape)
    return lax.select(broken_TO, fill(owner_C, y_TO.shape, jnp.float32, np.nan), y_TO)


def _scale(lane: Stripe, found: Components, layer: jax.Array, index: int) -> jax.Array:
    scale_EL = lax.index_in_dim(lane.scale, index, axis=2, keepdims=False)
    return _take(lax.dynamic_index_in_dim(scale_EL, layer, axis=1, keepdims=False), found.adapter)


def _of_projection(table_EJ: jax.Array, index: int) -> jax.Array:
    return lax.index_in_dim(table_EJ, index, axis=1, keepdims=False)


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    return array.at[index].get(mode="promise_in_bounds")
