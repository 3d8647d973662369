"""Partial attention on GPUs: a program attends the queries of one group and KV head to all of their pages.

Keys and values are gathered by the addresses of their pages, a block of tokens at once; where no query sees a token,
its page is not here, or the table ends, nothing is read.

Letters: N query groups, K KV heads, S query heads of a KV head and group, a power of two of them in a program, H head
dim, M pages of a table, G tokens of a page, C tokens of a block, P pages, W numbers of a page in one layer.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from memory_pool.layout import PageLayout
from memory_pool.raw import from_raw
from strategies import paged_attention
from strategies.lanes import ABSENT, AttentionLane
from strategies.paged_attention import MASKED, HeadMaths, Partial

_LEAST_SIDE, _MOST_TOKENS, _BEYOND = 16, 64, 1 << 30
# Two blocks of keys and of values and one of queries are in shared memory, of which the smallest GPUs have 100 KB.
_BLOCK_BYTES, _QUERY_BYTES = 16 << 10, 32 << 10


def partial_attention(
    q_NKSH: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: AttentionLane,
    maths: HeadMaths,
    *,
    layout: PageLayout,
    interpret: bool = False,
) -> Partial:
    """As strategies.paged_attention.partial_attention, and by that where queries of a group are too many for a program.

    Cost:
        Reads keys and values that any query of a group sees once a group.
    """
    groups, heads, rows, dim = q_NKSH.shape
    block_rows, number = max(_LEAST_SIDE, pl.next_power_of_2(rows)), layout.dtype.itemsize
    if block_rows * dim * number > _QUERY_BYTES:
        return paged_attention.partial_attention(q_NKSH, pages_LPW, layer, lane, maths, layout=layout)
    block_tokens = max(_LEAST_SIDE, min(_MOST_TOKENS, _BLOCK_BYTES // (dim * number)))
    shapes = (groups, heads, rows, dim), (groups, heads, rows), (groups, heads, rows)
    kernel = functools.partial(_attend, maths.scale, maths.soft_cap, layout.dtype, block_rows, block_tokens)
    return Partial(
        *pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
            grid=(groups, heads),
            compiler_params=plgpu.CompilerParams(num_stages=2),
            interpret=interpret,
        )(
            jnp.reshape(layer * pages_LPW.shape[1], 1),
            jnp.asarray(maths.window, jnp.int32).reshape(1),
            lane.tables,
            jnp.repeat(lane.positions, rows // lane.positions.shape[1], axis=1),
            q_NKSH,
            pages_LPW.reshape(-1, 2, heads, layout.page_tokens, dim),
        )
    )


def _attend(
    scale: float,
    soft_cap: float | None,
    dtype: Any,
    block_rows: int,
    block_tokens: int,
    first_page_1: Any,
    window_1: Any,
    tables_NM: Any,
    positions_NS: Any,
    q_NKSH: Any,
    pages: Any,
    out_NKSH: Any,
    top_NKS: Any,
    total_NKS: Any,
) -> None:
    """All of one group and KV head; `pages` are [L * P, 2, K, G, H]."""
    group, head = pl.program_id(0), pl.program_id(1)
    (_, _, rows, dim), page_tokens = q_NKSH.shape, pages.shape[3]
    row_S, dim_H = jnp.arange(block_rows), jnp.arange(dim)
    real_S, window = row_S < rows, window_1[0]
    position_S = plgpu.load(positions_NS.at[group, row_S], mask=real_S, other=-1)
    q_SH = plgpu.load(q_NKSH.at[group, head, row_S[:, None], dim_H[None, :]], mask=real_S[:, None], other=0)

    def step(i: jax.Array, seen: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        out_SH, before_S, total_S = seen
        token_C = i * block_tokens + jnp.arange(block_tokens)
        entry_C = lax.div(token_C, page_tokens)
        table_C = plgpu.load(tables_NM.at[group, entry_C], mask=entry_C < tables_NM.shape[1], other=ABSENT)
        behind_SC = position_S[:, None] - token_C[None, :]
        visible_SC = (behind_SC >= 0) & (behind_SC < window) & (table_C != ABSENT)[None, :]
        seen_C = jnp.max(visible_SC.astype(jnp.int32), axis=0) > 0

        def take(part: int) -> jax.Array:
            """[C, H] keys or values; 0 for what no query sees, which may be NaN."""
            page_C = first_page_1[0] + jnp.where(seen_C, table_C, 0)
            at = (page_C[:, None], part, head, lax.rem(token_C, page_tokens)[:, None], dim_H[None, :])
            return from_raw(plgpu.load(pages.at[at], mask=seen_C[:, None], other=0), dtype)

        scores = _dot(q_SH, take(0).astype(q_SH.dtype), 1) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        top_S = jnp.maximum(before_S, jnp.max(jnp.where(visible_SC, scores, MASKED), axis=1))
        p_SC = jnp.where(visible_SC, jnp.exp(scores - top_S[:, None]), 0.0)
        decay_S, v_CH = jnp.exp(before_S - top_S), take(1)
        out_SH = out_SH * decay_S[:, None] + _dot(p_SC.astype(v_CH.dtype), v_CH, 0)
        return out_SH, top_S, total_S * decay_S + jnp.sum(p_SC, axis=1)

    first = jnp.min(jnp.where(position_S >= 0, position_S, _BEYOND))
    first_block = lax.div(jnp.maximum(first - window + 1, 0), block_tokens)
    end_block = lax.div(jnp.max(position_S) + block_tokens, block_tokens)
    nothing = (
        jnp.zeros((len(row_S), dim), jnp.float32),
        jnp.full((len(row_S),), MASKED, jnp.float32),
        jnp.zeros((len(row_S),), jnp.float32),
    )
    out_SH, top_S, total_S = lax.fori_loop(first_block, end_block, step, nothing)
    plgpu.store(out_NKSH.at[group, head, row_S[:, None], dim_H[None, :]], out_SH, mask=real_S[:, None])
    plgpu.store(top_NKS.at[group, head, row_S], top_S, mask=real_S)
    plgpu.store(total_NKS.at[group, head, row_S], total_S, mask=real_S)


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a times b over the axis of b, not rounded to less than the dtype."""
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
