"""Shrink and expand on TPUs: a grid step multiplies all tokens with one page of one adapter.

A page is a matrix of units [N, U]. Which component a unit belongs to, and which part of its row it is, follows from its
place in the adapter's stream; so x is cut into parts of U numbers, every part is multiplied with the page, and of the
products each unit keeps those of its own part. Components come to their places by a product with ones and zeros, which
is exact. Numbers of other projections and of nobody are dropped before a sum, those of other adapters' tokens after it;
so what is not finite reaches the tokens of its own adapter alone, as NaN.

Letters: T tokens, I in, O out, E adapters of a lane, F projections of a group, R the most components of an adapter, U
numbers of a unit, N units of a page, S parts of a row, W numbers of a page in one layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memory_pool.layout import PageLayout
from memory_pool.raw import from_raw
from strategies import low_rank
from strategies.lanes import Stripe
from strategies.pallas.used_pages import LARGEST_LIST, Streams, adapter_list_bytes, adapter_pages, streams

_TILE_BYTES, _TILE_TOKENS, _ROWS = 4 << 20, 128, 16


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
    interpret: bool = False,
) -> jax.Array:
    """As strategies.low_rank.shrink, and by that where a list of all pages is too long.

    Cost:
        2 * S * T * I FLOPs a component. Reads the pages of adapters with tokens that hold components of the group,
        whole, and once for each tile of 128 tokens; tiles are smaller where rows are wide.
    """
    if adapter_list_bytes(lane.a_pages) > LARGEST_LIST:
        where: dict[str, Any] = {"layout": layout, "group": group, "max_rank": max_rank, "out_dtype": out_dtype}
        return low_rank.shrink(x_TI, pages_LPW, layer, lane, **where)
    found = streams(lane, layout=layout, group=group, side="a")
    tokens, tile = len(x_TI), _tile(x_TI.shape)
    x_STU = _pad(x_TI, tile).reshape(-1, found.units, layout.unit).transpose(1, 0, 2)
    m_TC = _over_pages(
        functools.partial(_shrink, found.units, max_rank, layout.dtype),
        x_STU,
        (x_STU.shape[1], len(group) * max_rank),
        pages_LPW,
        layer,
        _pad(lane.owner[:, None], tile, -1),
        lane.a_pages,
        found=found,
        tile=tile,
        layout=layout,
        interpret=interpret,
    )
    m_FTR = m_TC[:tokens].reshape(tokens, len(group), max_rank).transpose(1, 0, 2)
    scale_EF = lane.scale[:, layer][:, jnp.array([layout.index(name) for name in group])]
    scale_FT = scale_EF[jnp.maximum(lane.owner, 0)].T
    return (m_FTR * scale_FT[:, :, None]).astype(out_dtype or x_TI.dtype)


def expand(
    m_FTR: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: Stripe,
    *,
    layout: PageLayout,
    group: tuple[str, ...],
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """As strategies.low_rank.expand, and by that where a list of all pages is too long.

    Cost:
        2 * S * T * O FLOPs a component. Reads pages as `shrink` does, for each projection of the group.
    """
    if adapter_list_bytes(lane.b_pages) > LARGEST_LIST:
        return low_rank.expand(m_FTR, pages_LPW, layer, lane, layout=layout, group=group)

    def one(m_TR: jax.Array, name: str) -> jax.Array:
        found = streams(lane, layout=layout, group=(name,), side="b")
        width, tokens = layout.out_width(name), len(m_TR)
        tile = _tile((tokens, width))
        m_TR = _pad(m_TR, tile)
        y_STU = _over_pages(
            functools.partial(_expand, found.units, layout.dtype),
            m_TR,
            (found.units, len(m_TR), layout.unit),
            pages_LPW,
            layer,
            _pad(lane.owner[:, None], tile, -1),
            lane.b_pages,
            found=found,
            tile=tile,
            layout=layout,
            interpret=interpret,
        )
        return y_STU.transpose(1, 0, 2).reshape(-1, width)[:tokens]

    return tuple(one(m_FTR[at], name) for at, name in enumerate(group))


def delta(
    x_TI: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: Stripe,
    *,
    layout: PageLayout,
    group: tuple[str, ...],
    max_rank: int,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """As strategies.low_rank.delta; costs what `shrink` and `expand` do."""
    where: dict[str, Any] = {"layout": layout, "group": group, "interpret": interpret}
    m_FTR = shrink(x_TI, pages_LPW, layer, lane, max_rank=max_rank, **where)
    return expand(m_FTR, pages_LPW, layer, lane, **where)


def _tile(shape: tuple[int, ...]) -> int:
    """Tokens that are multiplied at once, of float32 rows of a width."""
    most = min(_TILE_TOKENS, _TILE_BYTES // (4 * shape[1]))
    return max(_ROWS, min(most, shape[0] + _ROWS - 1) // _ROWS * _ROWS)


def _pad(rows: jax.Array, tile: int, value: int = 0) -> jax.Array:
    """Whole tiles of rows."""
    return jnp.pad(rows, ((0, -len(rows) % tile), (0, 0)), constant_values=value)


def _over_pages(
    kernel: Callable[..., None],
    operand: jax.Array,
    result: tuple[int, ...],
    pages_LPW: jax.Array,
    layer: jax.Array,
    owner_T1: jax.Array,
    tables_EM: jax.Array,
    *,
    found: Streams,
    tile: int,
    layout: PageLayout,
    interpret: bool,
) -> jax.Array:
    """Runs a kernel over tiles of tokens and, for each, over the pages of adapters; its float32 result adds up."""
    per_page, layer_pages = layout.units_per_page, pages_LPW.shape[1]
    listed = adapter_pages(owner_T1[:, 0], found, tables_EM, layer * layer_pages, per_page=per_page)

    def of_tile(shape: tuple[int, ...]) -> pl.BlockSpec:
        *parts, _, width = shape
        return pl.BlockSpec((*parts, tile, width), lambda t, i, *_: (*(0 for _ in parts), t, 0))

    page = pl.BlockSpec((1, per_page, layout.unit), lambda t, i, page, *_: (page[i], 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(result, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(len(owner_T1) // tile, listed.entries),
            in_specs=[of_tile(owner_T1.shape), of_tile(operand.shape), page],
            out_specs=of_tile(result),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(
        listed.page,
        listed.adapter,
        listed.unit,
        found.start,
        found.rank,
        owner_T1,
        operand,
        pages_LPW.reshape(-1, per_page, layout.unit),
    )


def _shrink(
    parts: int,
    max_rank: int,
    dtype: Any,
    _: Any,
    adapter_I: Any,
    unit_I: Any,
    start_FE: Any,
    rank_FE: Any,
    owner_T1: Any,
    x_STU: Any,
    page_1NU: Any,
    m_TC: Any,
) -> None:
    """m += the products with one page; column f * R + r of [T, C] is component r of projection f."""
    i = pl.program_id(1)
    adapter, unit = adapter_I[i], unit_I[i]
    page_NU = from_raw(page_1NU[0], dtype).astype(x_STU.dtype)

    def places(shape: tuple[int, int], axis: int) -> tuple[jax.Array, jax.Array]:
        """Column and part of each unit; column -1 for those of other projections and of nobody."""
        at = unit + lax.broadcasted_iota(jnp.int32, shape, axis)
        column, part = jnp.full(shape, -1), jnp.zeros(shape, jnp.int32)
        for f in range(start_FE.shape[0]):
            here, rank, of_rank = _component(at, start_FE[f, adapter], rank_FE[f, adapter], parts)
            column, part = jnp.where(here, f * max_rank + rank, column), jnp.where(here, of_rank, part)
        return column, part

    units = page_NU.shape[0]
    column_1N, part_1N = places((1, units), 1)
    column_N1, _ = places((units, 1), 0)
    sums_TN = jnp.zeros((x_STU.shape[1], units), jnp.float32)
    for part in range(parts):
        sums_TN = jnp.where((part_1N == part) & (column_1N >= 0), _dot(x_STU[part], page_NU, 1), sums_TN)
    to_place_NC = (column_N1 == lax.broadcasted_iota(jnp.int32, (units, m_TC.shape[1]), 1)).astype(jnp.float32)
    _add_own(m_TC, ..., _dot(sums_TN, to_place_NC, 0), owner_T1, adapter, i)


def _expand(
    parts: int,
    dtype: Any,
    _: Any,
    adapter_I: Any,
    unit_I: Any,
    start_1E: Any,
    rank_1E: Any,
    owner_T1: Any,
    m_TR: Any,
    page_1NU: Any,
    y_STU: Any,
) -> None:
    """y += the products with one page."""
    i = pl.program_id(1)
    adapter, unit = adapter_I[i], unit_I[i]
    units, max_rank = page_1NU.shape[1], m_TR.shape[1]

    def places(shape: tuple[int, int], axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        at = unit + lax.broadcasted_iota(jnp.int32, shape, axis)
        return _component(at, start_1E[0, adapter], rank_1E[0, adapter], parts)

    here_1N, rank_1N, part_1N = places((1, units), 1)
    here_N1, _, _ = places((units, 1), 0)
    to_unit_RN = (rank_1N == lax.broadcasted_iota(jnp.int32, (max_rank, units), 0)) & here_1N
    m_TN = _dot(m_TR[...], to_unit_RN.astype(m_TR.dtype), 0).astype(m_TR.dtype)
    page_NU = from_raw(page_1NU[0], dtype).astype(m_TR.dtype)
    page_NU = jnp.where(here_N1, page_NU, jnp.zeros_like(page_NU))
    for part in range(parts):
        m_of_part_TN = jnp.where(part_1N == part, m_TN, jnp.zeros_like(m_TN))
        _add_own(y_STU, part, _dot(m_of_part_TN, page_NU, 0), owner_T1, adapter, i)


def _component(at: jax.Array, start: jax.Array, rank: jax.Array, parts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether units at places in a stream belong to a projection, to which of its components, and as which part."""
    at = at - start
    return (at >= 0) & (at < rank * parts), lax.div(at, parts), lax.rem(at, parts)


def _add_own(sums: Any, at: Any, products: jax.Array, owner_T1: Any, adapter: jax.Array, step: jax.Array) -> None:
    """Adds products for the adapter's own tokens; those of others stay, from 0 at the first step on."""
    own = jnp.where(owner_T1[...] == adapter, products, 0.0)

    @pl.when(step == 0)
    def _() -> None:
        sums[at] = own

    @pl.when(step > 0)
    def _() -> None:
        sums[at] += own


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a times b over the axis of b, not rounded to less than the dtype."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
