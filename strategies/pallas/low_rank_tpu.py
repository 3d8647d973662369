"""Shrink and expand on TPUs: a grid step multiplies all tokens with one page of one adapter.

A page is a matrix of units [N, U]. Which component a unit belongs to, and which part of its row it is, follows from its
place in the adapter's stream; so x is cut into parts of U numbers, every part is multiplied with the page, and of the
products each unit keeps those of its own part.

Letters: T tokens, I in, O out, E adapters of a lane, F projections of a group, R the most components of an adapter, U
numbers of a unit, N units of a page, S parts of a row, W numbers of a page in one layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memory_pool.layout import PageLayout
from strategies import low_rank
from strategies.lanes import Stripe
from strategies.pallas import low_rank_tpu_steps as steps
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
        functools.partial(steps.shrink, found.units, max_rank, layout.dtype),
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
            functools.partial(steps.expand, found.units, layout.dtype),
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
    out_dtype: Any = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """As strategies.low_rank.delta; costs what `shrink` and `expand` do."""
    where: dict[str, Any] = {"layout": layout, "group": group, "interpret": interpret}
    m_FTR = shrink(x_TI, pages_LPW, layer, lane, max_rank=max_rank, **where)
    return tuple(y.astype(out_dtype or jnp.float32) for y in expand(m_FTR, pages_LPW, layer, lane, **where))


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
