"""Partial attention on TPUs: a grid step attends one group of queries to a few of its pages.

The pages of a group that are here and in sight are listed, so that those which are not cost no step; the pipeline
brings them by their numbers. What a step finds is merged with what the group has seen, which stays on the chip.

Letters: N query groups, K KV heads, S query heads of a KV head and group, H head dim, G tokens of a page, B pages of a
step, C tokens of a step, P pages, W numbers of a page in one layer.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memory_pool.layout import PageLayout
from memory_pool.raw import from_raw
from strategies import paged_attention
from strategies.lanes import AttentionLane
from strategies.paged_attention import CHUNK_TOKENS, MASKED, HeadMaths, Partial
from strategies.pallas.used_pages import LARGEST_LIST, seen_list_bytes, seen_pages


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
    """As strategies.paged_attention.partial_attention, and by that where a list of all pages is too long.

    Cost:
        Reads each page that is here and in the window of a query, whole and once a group; the reserved page in the
        places of the last step that are left over.
    """
    groups, heads, rows, dim = q_NKSH.shape
    together = max(1, CHUNK_TOKENS // layout.page_tokens)
    if seen_list_bytes(lane.tables, together) > LARGEST_LIST:
        return paged_attention.partial_attention(q_NKSH, pages_LPW, layer, lane, maths, layout=layout)
    window = jnp.asarray(maths.window, jnp.int32)
    seen = seen_pages(lane, window, layer * pages_LPW.shape[1], page_tokens=layout.page_tokens, together=together)
    positions_NS = jnp.repeat(lane.positions, rows // lane.positions.shape[1], axis=1)

    def of_group(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda i, group, *_: (group[i], *(0 for _ in shape)))

    def page(b: int) -> pl.BlockSpec:
        shape = (1, 2, heads, layout.page_tokens, dim)
        return pl.BlockSpec(shape, lambda i, group, page, *_: (page[b, i], 0, 0, 0, 0))

    shapes = (heads, rows, dim), (heads, rows, 1), (heads, rows, 1)
    out, top, total = pl.pallas_call(
        functools.partial(_attend, maths.scale, maths.soft_cap, layout.dtype),
        out_shape=[jax.ShapeDtypeStruct((groups, *shape), jnp.float32) for shape in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(seen.entries,),
            in_specs=[of_group(rows, 1), of_group(1, rows), of_group(heads, rows, dim), *map(page, range(together))],
            out_specs=[of_group(*shape) for shape in shapes],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
    )(
        seen.group,
        seen.page,
        seen.position,
        window.reshape(1),
        positions_NS[:, :, None],
        positions_NS[:, None, :],
        q_NKSH,
        *[pages_LPW.reshape(-1, 2, heads, layout.page_tokens, dim)] * together,
    )
    return Partial(out, top[..., 0], total[..., 0])


def _attend(scale: float, soft_cap: float | None, dtype: Any, group_I: Any, _: Any, position_BI: Any, *refs: Any):
    """Merges attention over a few pages into that of their group."""
    window_1, at_1S1, at_11S, q_1KSH, *pages, out_1KSH, top_1KS1, total_1KS1 = refs
    i = pl.program_id(0)

    @pl.when((i == 0) | (group_I[i] != group_I[jnp.maximum(i - 1, 0)]))
    def _() -> None:
        out_1KSH[...] = jnp.zeros_like(out_1KSH)
        top_1KS1[...] = jnp.full_like(top_1KS1, MASKED)
        total_1KS1[...] = jnp.zeros_like(total_1KS1)

    page_tokens, rows = pages[0].shape[3], q_1KSH.shape[2]
    tokens = len(pages) * page_tokens

    def in_sight(queries: jax.Array, axis: int) -> jax.Array:
        """Which tokens of the pages queries see; tokens along an axis."""
        shape = (rows, tokens) if axis else (tokens, rows)
        of_step = lax.broadcasted_iota(jnp.int32, shape, axis)
        at = position_BI[0, i] + of_step
        for b in range(1, len(pages)):
            first = b * page_tokens
            at = jnp.where(of_step >= first, position_BI[b, i] + (of_step - first), at)
        behind = queries - at
        return (behind >= 0) & (behind < window_1[0])

    visible_SC = in_sight(at_1S1[0], 1)
    # What no query sees may be NaN, and 0 * NaN is not 0.
    seen_C1 = jnp.max(in_sight(at_11S[0], 0).astype(jnp.int32), axis=1, keepdims=True) > 0
    for head in range(q_1KSH.shape[1]):
        k_CH, v_CH = (from_raw(jnp.concatenate([page[0, part, head] for page in pages]), dtype) for part in (0, 1))
        v_CH = jnp.where(seen_C1, v_CH, jnp.zeros_like(v_CH))
        scores = _dot(q_1KSH[0, head], k_CH, 1) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        before = top_1KS1[0, head]
        top = jnp.maximum(before, jnp.max(jnp.where(visible_SC, scores, MASKED), axis=1, keepdims=True))
        p_SC = jnp.where(visible_SC, jnp.exp(scores - top), 0.0)
        decay = jnp.exp(before - top)
        out_1KSH[0, head] = out_1KSH[0, head] * decay + _dot(p_SC.astype(v_CH.dtype), v_CH, 0)
        total_1KS1[0, head] = total_1KS1[0, head] * decay + jnp.sum(p_SC, axis=1, keepdims=True)
        top_1KS1[0, head] = top


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a times b over the axis of b, not rounded to less than their dtype."""
    exact = jnp.float32 in (a.dtype, b.dtype)
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
