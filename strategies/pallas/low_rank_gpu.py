"""Shrink and expand on GPUs: a program multiplies the tokens of one adapter with some of its numbers.

Tokens are put in the order of their adapters beforehand, those of the base model last, as the tokens of an adapter
without components. A program gathers rows of pages by their addresses, 16 components and a power of two of numbers at
once. Only the tokens of the adapter take part, and nothing beyond its rank is read.

Letters: T tokens, I in, O out, E adapters of a lane, F projections of a group, R the most components of an adapter, M
pages of a table, L layers, P pages, W numbers of a page in one layer; of a program: B tokens, C components, N numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from memory_pool.layout import PageLayout
from memory_pool.raw import from_raw
from strategies.lanes import Stripe

_COMPONENTS, _FEW_TOKENS, _MANY_TOKENS, _NUMBERS = 16, 16, 64, 128


class _Rows(NamedTuple):
    """How rows of a projection lie in pages, in numbers.

    Attributes:
        units: of a row.
        unit: numbers of a unit.
        per_page: units of a page.
        block: numbers that are taken at once; divides a unit.
    """

    units: int
    unit: int
    per_page: int
    block: int


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
        functools.partial(_shrink, rows, layout.dtype, _block_tokens(x_TI)),
        jax.ShapeDtypeStruct((len(group), len(x_TI), max_rank), out_dtype or x_TI.dtype),
        (len(group), pl.cdiv(max_rank, _COMPONENTS)),
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
            functools.partial(_expand, rows, layout.dtype, _block_tokens(m_TR)),
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
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """As strategies.low_rank.delta; costs what `shrink` and `expand` do."""
    where: dict[str, Any] = {"layout": layout, "group": group, "interpret": interpret}
    m_FTR = shrink(x_TI, pages_LPW, layer, lane, max_rank=max_rank, **where)
    return expand(m_FTR, pages_LPW, layer, lane, **where)


def _block_tokens(rows: jax.Array) -> int:
    return _FEW_TOKENS if len(rows) <= 128 else _MANY_TOKENS


def _rows(layout: PageLayout, units: int) -> _Rows:
    power_of_two = layout.unit & -layout.unit
    return _Rows(units, layout.unit, layout.units_per_page, min(power_of_two, _NUMBERS))


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


class _Segment(NamedTuple):
    """What one program has to do.

    Attributes:
        order_T: tokens in the order of their adapters.
        begin: [] int32, first one of the adapter.
        end: [] int32.
        rank: [] int32.
    """

    order_T: Any
    begin: jax.Array
    end: jax.Array
    rank: jax.Array

    def for_tokens(self, block: int, work: Callable[[jax.Array, jax.Array], None]) -> None:
        """Calls `work` with [B] tokens and which of them are real, for all tokens of the adapter.

        Those that are not real are T, beyond all tokens, since interpretation writes what masks leave out as it was.
        """

        def step(i: jax.Array, _: None) -> None:
            at_B = self.begin + i * block + jnp.arange(block)
            real_B = at_B < self.end
            work(plgpu.load(self.order_T.at[at_B], mask=real_B, other=self.order_T.shape[0]), real_B)

        lax.fori_loop(0, lax.div(self.end - self.begin + block - 1, block), step, None)


def _segment(order_T: Any, first_E: Any, rank_EF: Any, adapter: Any, projection: Any) -> _Segment:
    return _Segment(order_T, first_E[adapter], first_E[adapter + 1], rank_EF[adapter, projection])


def _shrink(
    rows: _Rows,
    dtype: Any,
    block: int,
    order_T: Any,
    first_E: Any,
    start_EF: Any,
    rank_EF: Any,
    scale_EF: Any,
    rows_EM: Any,
    x_TI: Any,
    pages: Any,
    m_FTR: Any,
) -> None:
    """16 components of a projection of one adapter, for all of its tokens."""
    adapter, projection = pl.program_id(0), pl.program_id(1)
    segment = _segment(order_T, first_E, rank_EF, adapter, projection)
    component_C = pl.program_id(2) * _COMPONENTS + jnp.arange(_COMPONENTS)
    unit_C = start_EF[adapter, projection] + component_C * rows.units
    steps = (pl.program_id(2) * _COMPONENTS < segment.rank).astype(jnp.int32) * (x_TI.shape[1] // rows.block)
    here_C = component_C < segment.rank

    def work(token_B: jax.Array, real_B: jax.Array) -> None:
        def step(i: jax.Array, m_BC: jax.Array) -> jax.Array:
            at_N = i * rows.block + jnp.arange(rows.block)
            x_BN = plgpu.load(x_TI.at[token_B[:, None], at_N[None, :]], mask=real_B[:, None], other=0)
            a_CN = _numbers(pages, rows_EM, adapter, unit_C, here_C, i, rows, dtype)
            return m_BC + _dot(x_BN, a_CN.astype(x_BN.dtype), 1)

        m_BC = lax.fori_loop(0, steps, step, jnp.zeros((block, _COMPONENTS), jnp.float32))
        m_BC = (m_BC * scale_EF[adapter, projection]).astype(m_FTR.dtype)
        there_BC = real_B[:, None] & (component_C < m_FTR.shape[2])[None, :]
        plgpu.store(m_FTR.at[projection, token_B[:, None], component_C[None, :]], m_BC, mask=there_BC)

    segment.for_tokens(block, work)


def _expand(
    rows: _Rows,
    dtype: Any,
    block: int,
    order_T: Any,
    first_E: Any,
    start_E1: Any,
    rank_E1: Any,
    _: Any,
    rows_EM: Any,
    m_TR: Any,
    pages: Any,
    y_TO: Any,
) -> None:
    """Some numbers of the columns of one adapter, for all of its tokens."""
    adapter, place = pl.program_id(0), pl.program_id(2)
    segment = _segment(order_T, first_E, rank_E1, adapter, 0)

    def work(token_B: jax.Array, real_B: jax.Array) -> None:
        def step(i: jax.Array, y_BN: jax.Array) -> jax.Array:
            component_C = i * _COMPONENTS + jnp.arange(_COMPONENTS)
            here_C = component_C < segment.rank
            there_BC = real_B[:, None] & here_C[None, :]
            m_BC = plgpu.load(m_TR.at[token_B[:, None], component_C[None, :]], mask=there_BC, other=0)
            unit_C = start_E1[adapter, 0] + component_C * rows.units
            b_CN = _numbers(pages, rows_EM, adapter, unit_C, here_C, place, rows, dtype)
            return y_BN + _dot(m_BC, b_CN.astype(m_BC.dtype), 0)

        steps = lax.div(segment.rank + _COMPONENTS - 1, _COMPONENTS)
        y_BN = lax.fori_loop(0, steps, step, jnp.zeros((block, rows.block), jnp.float32))
        at_N = place * rows.block + jnp.arange(rows.block)
        plgpu.store(y_TO.at[token_B[:, None], at_N[None, :]], y_BN, mask=real_B[:, None])

    segment.for_tokens(block, work)


def _numbers(
    pages: Any, rows_EM: Any, adapter: jax.Array, unit_C: jax.Array, here_C: jax.Array, i: Any, rows: _Rows, dtype: Any
) -> jax.Array:
    """[C, N] block i of the rows that begin at units of an adapter's stream; 0 where there are none."""
    first = i * rows.block
    at_C = unit_C + lax.div(first, rows.unit)
    page_C = plgpu.load(rows_EM.at[adapter, lax.div(at_C, rows.per_page)], mask=here_C, other=0)
    in_page_C = lax.rem(at_C, rows.per_page) * rows.unit + lax.rem(first, rows.unit)
    at_CN = in_page_C[:, None] + jnp.arange(rows.block)[None, :]
    return from_raw(plgpu.load(pages.at[page_C[:, None], at_CN], mask=here_C[:, None], other=0), dtype)


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a times b over the axis of b, not rounded to less than the dtype."""
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
