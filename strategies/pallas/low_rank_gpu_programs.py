"""What a program of `low_rank_gpu` does: 16 components, or some numbers of all components, for an adapter's tokens.

Loop bounds and addresses are made with `lax.div` and `lax.rem`, whose operands are not negative here.

Letters: T tokens, I in, O out, E adapters of a lane, F projections of a group, R the most components of an adapter, M
pages of a table, L layers, P pages; of a program: B tokens, C components, N numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from memory_pool.raw import from_raw

COMPONENTS = 16
"""That a program multiplies at once."""


class Rows(NamedTuple):
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


def shrink(
    rows: Rows,
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
    component_C = pl.program_id(2) * COMPONENTS + jnp.arange(COMPONENTS)
    unit_C = start_EF[adapter, projection] + component_C * rows.units
    steps = (pl.program_id(2) * COMPONENTS < segment.rank).astype(jnp.int32) * (x_TI.shape[1] // rows.block)
    here_C = component_C < segment.rank

    def work(token_B: jax.Array, real_B: jax.Array) -> None:
        def step(i: jax.Array, m_BC: jax.Array) -> jax.Array:
            at_N = i * rows.block + jnp.arange(rows.block)
            x_BN = plgpu.load(x_TI.at[token_B[:, None], at_N[None, :]], mask=real_B[:, None], other=0)
            a_CN = _numbers(pages, rows_EM, adapter, unit_C, here_C, i, rows, dtype)
            return m_BC + _dot(x_BN, a_CN.astype(x_BN.dtype), 1)

        m_BC = lax.fori_loop(0, steps, step, jnp.zeros((block, COMPONENTS), jnp.float32))
        m_BC = (m_BC * scale_EF[adapter, projection]).astype(m_FTR.dtype)
        there_BC = real_B[:, None] & (component_C < m_FTR.shape[2])[None, :]
        plgpu.store(m_FTR.at[projection, token_B[:, None], component_C[None, :]], m_BC, mask=there_BC)

    segment.for_tokens(block, work)


def expand(
    rows: Rows,
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
            component_C = i * COMPONENTS + jnp.arange(COMPONENTS)
            here_C = component_C < segment.rank
            there_BC = real_B[:, None] & here_C[None, :]
            m_BC = plgpu.load(m_TR.at[token_B[:, None], component_C[None, :]], mask=there_BC, other=0)
            unit_C = start_E1[adapter, 0] + component_C * rows.units
            b_CN = _numbers(pages, rows_EM, adapter, unit_C, here_C, place, rows, dtype)
            return y_BN + _dot(m_BC, b_CN.astype(m_BC.dtype), 0)

        steps = lax.div(segment.rank + COMPONENTS - 1, COMPONENTS)
        y_BN = lax.fori_loop(0, steps, step, jnp.zeros((block, rows.block), jnp.float32))
        at_N = place * rows.block + jnp.arange(rows.block)
        plgpu.store(y_TO.at[token_B[:, None], at_N[None, :]], y_BN, mask=real_B[:, None])

    segment.for_tokens(block, work)


def _numbers(
    pages: Any, rows_EM: Any, adapter: jax.Array, unit_C: jax.Array, here_C: jax.Array, i: Any, rows: Rows, dtype: Any
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
