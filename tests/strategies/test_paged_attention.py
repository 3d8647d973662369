"""Partial attention over pages against plain numpy, the exact merge of parts, and where keys and values are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool.raw import raw_dtype
from strategies.lanes import ABSENT, AttentionLane
from strategies.paged_attention import (
    CHUNK_TOKENS,
    NO_WINDOW,
    HeadMaths,
    Partial,
    finish,
    merge,
    partial_attention,
)
from tests.strategies.pages_for_tests import make_layout

PAGE, TABLE_PAGES, REPEATS = 16, 2 * CHUNK_TOKENS // 16, 3
LAYOUT = {
    dtype: make_layout(widths={"q": (8, 8)}, page_tokens=PAGE, head_dim=24, dtype=dtype)
    for dtype in ("float32", "bfloat16")
}
GROUPS = 3


@pytest.fixture(scope="module", params=LAYOUT)
def dtype(request):
    return request.param


def make_pages(rng, dtype):
    """[L, P, 2, K, G, H] numbers and scattered tables."""
    layout = LAYOUT[dtype]
    shape = (layout.num_layers, 1 + GROUPS * TABLE_PAGES, 2, layout.kv_heads, PAGE, layout.head_dim)
    numbers = rng.normal(size=shape).astype(layout.dtype)
    tables = 1 + rng.permutation(GROUPS * TABLE_PAGES).reshape(GROUPS, TABLE_PAGES).astype(np.int32)
    return numbers, tables


def raw(numbers):
    return numbers.reshape(*numbers.shape[:2], -1).view(raw_dtype(numbers.dtype))


def attend(dtype, q, numbers, layer, lane, maths):
    def run(q, pages, layer, lane, window):
        return partial_attention(q, pages, layer, lane, maths._replace(window=window), layout=LAYOUT[dtype])

    return jax.jit(run)(q, raw(numbers), np.int32(layer), lane, np.int32(maths.window))


def numpy_attention(q, numbers, table, position, maths):
    """[H] float64 of one query head; numbers [P, 2, G, H] of one KV head; NaN where nothing is seen."""
    keys, values = (
        np.concatenate([numbers[page, part] if page != ABSENT else np.zeros_like(numbers[0, 0]) for page in table])
        for part in (0, 1)
    )
    scores = keys.astype(np.float64) @ q.astype(np.float64) * maths.scale
    if maths.soft_cap:
        scores = maths.soft_cap * np.tanh(scores / maths.soft_cap)
    behind = position - np.arange(len(keys))
    seen = (behind >= 0) & (behind < maths.window) & np.repeat(table != ABSENT, PAGE)
    p = np.exp(scores[seen] - scores[seen].max(initial=-np.inf))
    return p @ values[seen].astype(np.float64) / p.sum() if seen.any() else np.zeros(len(q))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 2 * CHUNK_TOKENS), min_size=GROUPS, max_size=GROUPS),
    queries=st.sampled_from([1, 5]),
    window=st.sampled_from([NO_WINDOW, 1, 8, 200]),
    cap=st.sampled_from([None, 5.0]),
    absent=st.sampled_from([0.0, 0.4]),
)
def test_partial_attention_any_lengths_equals_numpy(dtype, seed, lengths, queries, window, cap, absent):
    rng = np.random.default_rng(seed)
    layout = LAYOUT[dtype]
    numbers, tables = make_pages(rng, dtype)
    tables[rng.uniform(size=tables.shape) < absent] = ABSENT
    positions = np.array([np.arange(queries) + length - queries for length in lengths], np.int32)
    positions[positions < 0] = -1
    lane = AttentionLane(tables, positions, np.int32(max(0, positions.min())), np.int32(positions.max() + 1))
    maths = HeadMaths(0.3, cap, window)
    q = rng.normal(size=(GROUPS, layout.kv_heads, queries * REPEATS, layout.head_dim)).astype(layout.dtype)
    got = np.asarray(finish(attend(dtype, q, numbers, 1, lane, maths)))
    for n, head, row in np.ndindex(q.shape[:3]):
        want = numpy_attention(q[n, head, row], numbers[1, :, :, head], tables[n], positions[n, row // REPEATS], maths)
        np.testing.assert_allclose(got[n, head, row], want, atol=3e-6 if dtype == "float32" else 3e-2)


def test_partial_attention_what_no_query_sees_does_not_reach_the_sum(dtype):
    rng = np.random.default_rng(1)
    layout = LAYOUT[dtype]
    numbers, tables = make_pages(rng, dtype)
    lane = AttentionLane(tables, np.full((GROUPS, 1), 100, np.int32), np.int32(100), np.int32(101))
    q = rng.normal(size=(GROUPS, layout.kv_heads, REPEATS, layout.head_dim)).astype(layout.dtype)
    maths = HeadMaths(0.3, None, 30)
    clean = finish(attend(dtype, q, numbers, 0, lane, maths))
    seen = np.zeros((numbers.shape[1], PAGE), bool)
    for token in range(71, 101):
        seen[tables[:, token // PAGE], token % PAGE] = True
    for page, token in zip(*np.nonzero(~seen), strict=True):
        numbers[:, page, :, :, token] = np.nan
    np.testing.assert_array_equal(finish(attend(dtype, q, numbers, 0, lane, maths)), clean)


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


def test_merge_of_complementary_tables_equals_one_table():
    rng = np.random.default_rng(6)
    layout = LAYOUT["float32"]
    numbers, tables = make_pages(rng, "float32")
    positions = np.array([[200], [7], [-1]], np.int32)
    lane = AttentionLane(tables, positions, np.int32(0), np.int32(201))
    q = rng.normal(size=(GROUPS, layout.kv_heads, REPEATS, layout.head_dim)).astype(np.float32)
    maths = HeadMaths(0.3, None, NO_WINDOW)
    here = rng.uniform(size=tables.shape) < 0.5
    parts = [
        attend("float32", q, numbers, 0, lane._replace(tables=np.where(mask, tables, ABSENT)), maths)
        for mask in (here, ~here)
    ]
    whole = finish(attend("float32", q, numbers, 0, lane, maths))
    np.testing.assert_allclose(finish(merge(*parts)), whole, atol=2e-6)
    assert not np.asarray(whole)[2].any(), "padding sees nothing"
