"""Attention over paged KV, computed in chunks of the context so that partial results can be merged exactly.

A partial result is the unnormalised output with the running maximum and sum of each head (log-sum-exp merge). One
compiled program serves every context length: the number of chunks is data.

Letters: L layers, P pages, G tokens per page, K KV heads, H head dim, T packed tokens, N query groups of a lane, Q
queries per group, R query heads per KV head, M pages per table, S tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memory_pool import from_raw, to_raw

CHUNK_TOKENS = 128
NO_WINDOW = 1 << 30
_MASKED = -1e30


class KvPages(NamedTuple):
    """Keys and values of all layers, as raw bits; page 0 takes the writes of padding.

    Attributes:
        k: [L, P, K, G, H].
        v: [L, P, K, G, H].
    """

    k: Any
    v: Any


class AttentionLane(NamedTuple):
    """Queries that are treated alike, in N groups of Q; the queries of a group belong to one sequence.

    Attributes:
        tables: [N, M] int32, the sequence's pages in order of position; M * G is a multiple of CHUNK_TOKENS.
        positions: [N, Q] int32, -1 for padding.
        first: [] int32, smallest position of any query.
        end: [] int32, largest position of any query plus one; 0 when the lane is empty.
    """

    tables: Any
    positions: Any
    first: Any
    end: Any


class KvWrite(NamedTuple):
    """Where the step's keys and values go: page and offset of each token, [T] int32; page 0 for padding."""

    pages: Any
    offsets: Any


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


PartialKernel = Callable[[jax.Array, KvPages, jax.Array, AttentionLane, HeadMaths], Partial]


def write_kv(pages: KvPages, layer: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, where: KvWrite) -> KvPages:
    """Writes the step's keys and values of one layer into their pages, in place when the pages are donated."""

    def write(pages_LPKGH: jax.Array, new_TKH: jax.Array) -> jax.Array:
        # The index is made flat so that one token of one head is one contiguous row.
        num_layers, num_pages, heads, tokens, dim = pages_LPKGH.shape
        rows = pages_LPKGH.reshape(num_layers * num_pages * heads * tokens, dim)
        head = jnp.arange(heads, dtype=jnp.int32)
        index_TK = ((layer * num_pages + where.pages)[:, None] * heads + head) * tokens + where.offsets[:, None]
        rows = rows.at[index_TK].set(to_raw(new_TKH), mode="promise_in_bounds")
        return rows.reshape(pages_LPKGH.shape)

    return KvPages(write(pages.k, k_TKH), write(pages.v, v_TKH))


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


def paged_attention(
    q_NKSH: jax.Array, pages: KvPages, layer: jax.Array, lane: AttentionLane, maths: HeadMaths
) -> Partial:
    """Causal attention of a lane over its pages.

    Args:
        q_NKSH: [N, K, Q * R, H], query heads grouped by their KV head, the R heads of one query together.
        pages: KV pages; the tokens of this step are already written.
        layer: [] int32.
        lane: tables and positions.
        maths: how scores are made.

    Returns:
        Partial of [N, K, Q * R].

    Cost:
        Reads each page of a table once a group; chunks outside every query's window are skipped.
    """
    num_pages, heads, page_tokens = pages.k.shape[1:4]
    groups, _, queries, dim = q_NKSH.shape
    chunk_pages = CHUNK_TOKENS // page_tokens
    repeats = queries // lane.positions.shape[1]
    positions_NS = jnp.repeat(lane.positions, repeats, axis=1)
    head_K = jnp.arange(heads, dtype=jnp.int32)[None, :, None]

    def rows(pages_LPKGH: jax.Array, index_NKM: jax.Array) -> jax.Array:
        # Pages of one head are contiguous, so the gather gives [N, K, S, H] without a transpose.
        flat = pages_LPKGH.reshape(-1, page_tokens, dim)
        chunk = flat.at[(layer * num_pages + index_NKM // heads) * heads + index_NKM % heads].get(
            mode="promise_in_bounds"
        )
        return from_raw(chunk, q_NKSH.dtype).reshape(groups, heads, CHUNK_TOKENS, dim)

    def step(i: jax.Array, seen: Partial) -> Partial:
        table_NM = lax.dynamic_slice_in_dim(lane.tables, i * chunk_pages, chunk_pages, axis=1)
        index_NKM = table_NM[:, None, :] * heads + head_K
        k, v = rows(pages.k, index_NKM), rows(pages.v, index_NKM)
        scores = jnp.einsum("NKSH,NKCH->NKSC", q_NKSH, k, preferred_element_type=jnp.float32) * maths.scale
        if maths.soft_cap is not None:
            scores = maths.soft_cap * jnp.tanh(scores / maths.soft_cap)
        key_positions = i * CHUNK_TOKENS + jnp.arange(CHUNK_TOKENS, dtype=jnp.int32)
        behind = positions_NS[:, :, None] - key_positions
        visible = ((behind >= 0) & (behind < maths.window))[:, None]
        top = jnp.maximum(seen.max, jnp.max(jnp.where(visible, scores, _MASKED), axis=-1))
        p = jnp.where(visible, jnp.exp(scores - top[..., None]), 0.0)
        out = jnp.einsum("NKSC,NKCH->NKSH", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        decay = jnp.exp(seen.max - top)
        return Partial(seen.out * decay[..., None] + out, top, seen.sum * decay + p.sum(axis=-1))

    shape = (groups, heads, queries)
    nothing = Partial(jnp.zeros((*shape, dim)), jnp.full(shape, _MASKED), jnp.zeros(shape))
    first_chunk = jnp.maximum(lane.first - maths.window + 1, 0) // CHUNK_TOKENS
    last_chunk = (lane.end + CHUNK_TOKENS - 1) // CHUNK_TOKENS
    return lax.fori_loop(first_chunk, last_chunk, step, nothing)


def attend(
    q_NQHD: jax.Array, pages: KvPages, layer: jax.Array, lane: AttentionLane, maths: HeadMaths, *, kernel: PartialKernel
) -> jax.Array:
    """The strategy `local`: the device computes over pages in its own memory.

    Args:
        q_NQHD: [N, Q, heads, H].
        pages: KV pages; the tokens of this step are already written.
        layer: [] int32.
        lane: tables and positions.
        maths: how scores are made.
        kernel: gives the partial result over the pages.

    Returns:
        [N, Q, heads, H] in the dtype of q.
    """
    groups, queries, num_heads, dim = q_NQHD.shape
    kv_heads = pages.k.shape[2]
    repeats = num_heads // kv_heads
    q = q_NQHD.reshape(groups, queries, kv_heads, repeats, dim).transpose(0, 2, 1, 3, 4)
    partial = kernel(q.reshape(groups, kv_heads, queries * repeats, dim), pages, layer, lane, maths)
    out = finish(partial).reshape(groups, kv_heads, queries, repeats, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(q_NQHD.shape).astype(q_NQHD.dtype)
