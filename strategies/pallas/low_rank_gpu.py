"""Shrink and expand on GPUs: a program multiplies the tokens of one adapter with some of its numbers.

Tokens are put in the order of their adapters beforehand, those of the base model last, as the tokens of an adapter
without components. A program gathers rows of pages by their addresses, 16 components and a power of two of numbers at
once. Only the tokens of the adapter take part, and nothing beyond its rank is read.

Letters: T tokens, I in, O out, E adapters of a lane, F projections of a group, R the most components of an adapter, M
pages of a table, L layers, P pages, W numbers of a page in one layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from memory_pool.layout import PageLayout
from strategies.lanes import Stripe
from strategies.pallas import low_rank_gpu_programs as programs

_FEW_TOKENS, _MANY_TOKENS, _NUMBERS = 16, 64, 128


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
    """As strategies.low_rank.shrink.

    Cost:
        Reads the components of each adapter with tokens once for each block of its tokens: 16, or 64 in batches of more
        than 128.
    """
    rows = _rows(layout, layout.a_units[layout.index(group[0])])
    return _per_adapter(
        functools.partial(programs.shrink, rows, layout.dtype, _block_tokens(x_TI)),
        jax.ShapeDtypeStruct((len(group), len(x_TI), max_rank), out_dtype or x_TI.dtype),
        (len(group), pl.cdiv(max_rank, programs.COMPONENTS)),
        x_TI,
        pages_LPW,
        layer,
        lane,
        lane.a_pages,
        layout.a_units,
        layout=layout,
        group=group,
        interpret=interpret,
    )


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
    """As strategies.low_rank.expand.

    Cost:
        Reads components as `shrink` does.
    """

    def one(m_TR: jax.Array, name: str) -> jax.Array:
        rows, width = _rows(layout, layout.b_units[layout.index(name)]), layout.out_width(name)
        return _per_adapter(
            functools.partial(programs.expand, rows, layout.dtype, _block_tokens(m_TR)),
            jax.ShapeDtypeStruct((len(m_TR), width), jnp.float32),
            (1, width // rows.block),
            m_TR,
            pages_LPW,
            layer,
            lane,
            lane.b_pages,
            layout.b_units,
            layout=layout,
            group=(name,),
            interpret=interpret,
        )

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


def _block_tokens(rows: jax.Array) -> int:
    return _FEW_TOKENS if len(rows) <= 128 else _MANY_TOKENS


def _rows(layout: PageLayout, units: int) -> programs.Rows:
    power_of_two = layout.unit & -layout.unit
    return programs.Rows(units, layout.unit, layout.units_per_page, min(power_of_two, _NUMBERS))


def _per_adapter(
    kernel: Callable[..., None],
    result: jax.ShapeDtypeStruct,
    grid: tuple[int, int],
    operand: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: Stripe,
    tables_EM: jax.Array,
    units: tuple[int, ...],
    *,
    layout: PageLayout,
    group: tuple[str, ...],
    interpret: bool,
) -> jax.Array:
    """Runs a kernel for every adapter and for the base model, which has no components: adapter E."""
    num_adapters, layer_pages = len(tables_EM), pages_LPW.shape[1]
    owner_T = jnp.where(lane.owner < 0, num_adapters, lane.owner)
    first_E = jnp.sum((owner_T[None, :] < jnp.arange(num_adapters + 2)[:, None]).astype(jnp.int32), axis=1)
    units_EJ = lane.ranks * jnp.array(units, jnp.int32)
    start_EJ = jnp.cumsum(units_EJ, axis=1, dtype=jnp.int32) - units_EJ
    at = jnp.array([layout.index(name) for name in group])
    base_too = ((0, 1), (0, 0))
    start_EF, rank_EF, scale_EF = (
        jnp.pad(table[:, at], base_too) for table in (start_EJ, lane.ranks, lane.scale[:, layer])
    )
    rows_EM = jnp.pad(layer * layer_pages + tables_EM, base_too)
    return pl.pallas_call(
        kernel,
        out_shape=result,
        grid=(num_adapters + 1, *grid),
        compiler_params=plgpu.CompilerParams(num_stages=2),
        interpret=interpret,
    )(
        jnp.argsort(owner_T).astype(jnp.int32),
        first_E.astype(jnp.int32),
        start_EF,
        rank_EF,
        scale_EF,
        rows_EM,
        operand,
        pages_LPW.reshape(-1, pages_LPW.shape[2]),
    )
