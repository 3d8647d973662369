"""What a grid step of `low_rank_tpu` does with one page of one adapter.

Components come to their places by a product with ones and zeros, which is exact. Numbers of other projections and of
nobody are dropped before a sum, those of other adapters' tokens after it; so what is not finite reaches the tokens of
its own adapter alone, as NaN.

Letters: T tokens of a tile, E adapters of a lane, F projections of a group, R the most components of an adapter, I
entries of the list of pages, U numbers of a unit, N units of a page, S parts of a row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from memory_pool.raw import from_raw


def shrink(
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


def expand(
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
