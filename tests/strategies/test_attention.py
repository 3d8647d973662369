"""Attention kernels against plain numpy, and the exact merge of partial results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool import to_raw
from strategies import CHUNK_TOKENS, NO_WINDOW, AttentionLane, HeadMaths, KvPages, KvWrite, write_kv
from strategies.attention import Partial, attend, finish, merge, paged_attention
from strategies.kernels import DECODE_ATTENTION

KERNELS = [k for k in DECODE_ATTENTION["cpu"] if k.unsupported() is None]
LAYERS, PAGE, KV_HEADS, DIM = 2, 16, 2, 24


def make_pages(rng, num_pages, dtype):
    shape = (LAYERS, num_pages, KV_HEADS, PAGE, DIM)
    k, v = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    return KvPages(to_raw(jnp.asarray(k)), to_raw(jnp.asarray(v))), k.astype(np.float64), v.astype(np.float64)


def reference(q, k, v, table, positions, maths, layer):
    """[Q, heads, H] for one group."""
    context = len(table) * PAGE
    keys, values = (np.moveaxis(p[layer][table], 1, 0).reshape(KV_HEADS, context, DIM) for p in (k, v))
    out = np.zeros(q.shape)
    repeats = q.shape[1] // KV_HEADS
    for i, position in enumerate(positions):
        for head in range(q.shape[1]):
            scores = keys[head // repeats] @ q[i, head].astype(np.float64) * maths.scale
            if maths.soft_cap:
                scores = maths.soft_cap * np.tanh(scores / maths.soft_cap)
            behind = position - np.arange(context)
            seen = (behind >= 0) & (behind < maths.window)
            if seen.any():
                p = np.exp(scores[seen] - scores[seen].max())
                out[i, head] = p @ values[head // repeats][seen] / p.sum()
    return out


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 8, 200]),
    cap=st.sampled_from([None, 5.0]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_decode_attention_any_lengths_equals_numpy(kernel, seed, lengths, window, cap, dtype):
    rng = np.random.default_rng(seed)
    groups, table_pages = len(lengths) + 1, -(-max(lengths) // CHUNK_TOKENS) * CHUNK_TOKENS // PAGE
    pages, k, v = make_pages(rng, 1 + groups * table_pages, np.dtype(dtype))
    tables = (1 + rng.permutation(groups * table_pages)).reshape(groups, table_pages).astype(np.int32)
    positions = np.array([[n - 1] for n in lengths] + [[-1]], np.int32)
    lane = AttentionLane(tables, positions, jnp.int32(min(lengths) - 1), jnp.int32(max(lengths)))
    maths = HeadMaths(0.3, cap, jnp.int32(NO_WINDOW if window is None else window))
    q = rng.normal(size=(groups, 1, 6, DIM)).astype(dtype)
    got = attend(jnp.asarray(q), pages, jnp.int32(1), lane, maths, kernel=kernel.call)
    for g, (table, position) in enumerate(zip(tables, positions, strict=True)):
        want = reference(q[g], k, v, table, position, maths, 1)
        np.testing.assert_allclose(got[g].astype(np.float32), want, atol=3e-6 if dtype == "float32" else 3e-2)


@pytest.mark.parametrize("window", [None, 20])
def test_prefill_attention_block_across_chunks_equals_numpy(window):
    rng = np.random.default_rng(0)
    pages, k, v = make_pages(rng, 18, np.float32)
    tables = (1 + rng.permutation(16)).reshape(1, 16).astype(np.int32)
    positions = np.arange(121, 137, dtype=np.int32)[None]
    lane = AttentionLane(tables, positions, jnp.int32(121), jnp.int32(137))
    maths = HeadMaths(0.2, None, jnp.int32(window or NO_WINDOW))
    q = rng.normal(size=(1, 16, 4, DIM)).astype(np.float32)
    got = attend(jnp.asarray(q), pages, jnp.int32(0), lane, maths, kernel=paged_attention)
    np.testing.assert_allclose(got[0], reference(q[0], k, v, tables[0], positions[0], maths, 0), atol=2e-6)


def test_merge_of_parts_equals_the_whole():
    rng = np.random.default_rng(5)
    scores, values = rng.normal(size=(4, 40)) * 9, rng.normal(size=(40, 8))

    def part(begin, end):
        top = scores[:, begin:end].max(axis=1)
        p = np.exp(scores[:, begin:end] - top[:, None])
        return Partial(*(jnp.asarray(x, jnp.float32) for x in (p @ values[begin:end], top, p.sum(axis=1))))

    whole = np.exp(scores - scores.max(axis=1, keepdims=True))
    want = whole @ values / whole.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(finish(merge(part(0, 13), part(13, 40))), want, rtol=1e-5)


def test_write_kv_touches_only_the_rows_named():
    rng = np.random.default_rng(2)
    pages, k, _ = make_pages(rng, 5, np.float32)
    new = rng.normal(size=(3, KV_HEADS, DIM)).astype(np.float32)
    where = KvWrite(np.array([2, 4, 0], np.int32), np.array([15, 0, 3], np.int32))
    out = jax.jit(write_kv)(pages, jnp.int32(1), new, new, where)
    want = k.astype(np.float32)
    for token, (page, offset) in enumerate(zip(*where, strict=True)):
        want[1, page, :, offset] = new[token]
    np.testing.assert_array_equal(np.asarray(out.k).view(np.float32), want)
