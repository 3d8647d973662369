"""Attention over pages of keys and values, computed in chunks of the context so that partial results merge exactly.

A partial result is the unnormalised output with the running maximum and sum of each head (log-sum-exp merge). One
compiled program serves every context length: the number of chunks is data. Pages that are not in the memory at hand are
skipped, so the pages of one sequence can be attended in several places. All functions run on the device as well as near
the data, where constants are refused: they are made from operands.

Letters: L layers, P pages, W numbers of a page in one layer, [2, K, G, H] or as int8 (`strategies.int8_kv`), G tokens
of a page, K KV heads, H head dim, N query groups of a lane, Q queries of a group, R query heads of a KV head, M pages
of a table, S queries of a group times heads of a KV head, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memory_pool.layout import PageLayout
from memory_pool.raw import from_raw
from strategies.int8_kv import Int8Rows, open_pages
from strategies.lanes import ABSENT, AttentionLane
from strategies.low_rank import count_up, fill

CHUNK_TOKENS = 128
NO_WINDOW = 1 << 30
MASKED = -1e30


class Partial(NamedTuple):
    """Attention over a part of the context.

    Attributes:
        out: [..., H] float32, sum of exp(score - max) * v.
        max: [...] float32.
        sum: [...] float32, sum of exp(score - max).
    """

    out: jax.Array
    max: jax.Array
    sum: jax.Array


class HeadMaths(NamedTuple):
    """How scores are made.

    Attributes:
        scale: factor on q . k.
        soft_cap: cap * tanh(score / cap), or None.
        window: [] int32, tokens a query sees, itself included; NO_WINDOW for all.
    """

    scale: float
    soft_cap: float | None
    window: Any


def merge(a: Partial, b: Partial) -> Partial:
    """The partial result over both parts of the context, exactly."""
    top = jnp.maximum(a.max, b.max)
    scale_a, scale_b = jnp.exp(a.max - top), jnp.exp(b.max - top)
    out = a.out * scale_a[..., None] + b.out * scale_b[..., None]
    return Partial(out, top, a.sum * scale_a + b.sum * scale_b)


def finish(partial: Partial) -> jax.Array:
    """Normalises; 0 where nothing was seen."""
    seen = partial.sum > 0
    return jnp.where(seen[..., None], partial.out / jnp.where(seen, partial.sum, 1.0)[..., None], 0.0)


def partial_attention(
    q_NKSH: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: AttentionLane,
    maths: HeadMaths,
    *,
    layout: PageLayout,
) -> Partial:
    """Causal attention of a lane over those of its pages that its tables name.

    Args:
        q_NKSH: [N, K, Q * R, H], query heads grouped by their KV head, the R heads of one query together.
        pages_LPW: [L, P, W] raw numbers.
        layer: [] int32.
        lane: tables and positions.
        maths: how scores are made.
        layout: of pages.

    Returns:
        Partial of [N, K, Q * R]; maximum -1e30 and sum 0 where nothing was seen.

    Cost:
        Reads each page of a table once a group; chunks outside every query's window are skipped.
    """
    heads, page_tokens, dim = layout.kv_heads, layout.page_tokens, layout.head_dim
    groups, _, queries, _ = q_NKSH.shape
    chunk_pages = CHUNK_TOKENS // page_tokens
    positions_NS = jnp.repeat(lane.positions, queries // lane.positions.shape[1], axis=1)
    offset_C = count_up(lane.tables, CHUNK_TOKENS)
    # Pages of one head are contiguous, so the gather gives [N, K, tokens, H] without a transpose.
    rows = pages_LPW.reshape(-1, *((layout.head_width,) if layout.int8_kv else (page_tokens, dim)))
    head_K = count_up(lane.tables, heads)[None, :, None]

    def take(pages_NM: jax.Array, part: int) -> Int8Rows:
        first_NM = (layer * pages_LPW.shape[1] + pages_NM) * 2 + part
        chunk = rows.at[first_NM[:, None, :] * heads + head_K].get(mode="promise_in_bounds")
        shape = (groups, heads, CHUNK_TOKENS)
        if not layout.int8_kv:
            return Int8Rows(from_raw(chunk, layout.dtype).reshape(*shape, dim), None)
        found = open_pages(chunk, layout=layout)
        return Int8Rows(found.ints.astype(layout.dtype).reshape(*shape, dim), found.scales.reshape(shape))

    def step(i: jax.Array, seen: Partial) -> Partial:
        table_NM = lax.dynamic_slice_in_dim(lane.tables, i * chunk_pages, chunk_pages, axis=1)
        here_NM = table_NM != ABSENT
        pages_NM = jnp.maximum(table_NM, 0)
        (k, k_scales), (v, v_scales) = take(pages_NM, 0), take(pages_NM, 1)
        scores = jnp.einsum("NKSH,NKCH->NKSC", q_NKSH, k, preferred_element_type=jnp.float32) * maths.scale
        if k_scales is not None:
            scores = scores * k_scales[:, :, None, :]
        if maths.soft_cap is not None:
            scores = maths.soft_cap * jnp.tanh(scores / maths.soft_cap)
        behind_NSC = positions_NS[:, :, None] - (offset_C + i * CHUNK_TOKENS)
        visible_NSC = (behind_NSC >= 0) & (behind_NSC < maths.window)
        visible_NSC &= jnp.repeat(here_NM, page_tokens, axis=1)[:, None, :]
        # What no query sees (absent pages, tokens to come, what was there before) may be NaN, and 0 * NaN is not 0.
        v = _zero_unseen(v, jnp.any(visible_NSC, axis=1), lane)
        visible = jnp.broadcast_to(visible_NSC[:, None], scores.shape)
        masked, nothing = (fill(lane.tables, scores.shape, jnp.float32, value) for value in (MASKED, 0.0))
        top = jnp.maximum(seen.max, jnp.max(lax.select(visible, scores, masked), axis=-1))
        p = lax.select(visible, jnp.exp(scores - top[..., None]), nothing)
        weights = p if v_scales is None else lax.select(visible, p * v_scales[:, :, None, :], nothing)
        out = jnp.einsum("NKSC,NKCH->NKSH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        decay = jnp.exp(seen.max - top)
        return Partial(seen.out * decay[..., None] + out, top, seen.sum * decay + p.sum(axis=-1))

    shape = (groups, heads, queries)
    nothing = Partial(
        fill(lane.tables, (*shape, dim), jnp.float32),
        fill(lane.tables, shape, jnp.float32, MASKED),
        fill(lane.tables, shape, jnp.float32),
    )
    first_chunk = jnp.maximum(lane.first - maths.window + 1, 0) // CHUNK_TOKENS
    last_chunk = (lane.end + CHUNK_TOKENS - 1) // CHUNK_TOKENS
    return lax.fori_loop(first_chunk, last_chunk, step, nothing)


def _zero_unseen(v_NKCH: jax.Array, seen_NC: jax.Array, lane: AttentionLane) -> jax.Array:
    seen = jnp.broadcast_to(seen_NC[:, None, :, None], v_NKCH.shape)
    return lax.select(seen, v_NKCH, fill(lane.tables, v_NKCH.shape, v_NKCH.dtype))
