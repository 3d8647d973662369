"""Keys and values as int8: how they are rounded, where they are written, and attention over them in plain numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memory_pool.raw import raw_dtype
from strategies import native
from strategies.int8_kv import open_pages, quantize_rows
from strategies.kv_write import KvWrite, write_kv, xla_write_kv
from strategies.lanes import ABSENT, AttentionLane
from strategies.paged_attention import HeadMaths, finish, partial_attention
from tests.strategies.pages_for_tests import int8_pages, int8_parts, make_layout

PAGES, PAGE, LAYERS, HEADS = 7, 16, 2, 3
needs_native = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
WRITES = pytest.mark.parametrize(
    "write", [pytest.param(write_kv, marks=needs_native, id="native"), pytest.param(xla_write_kv, id="xla")]
)


def layout_of(dtype, *, head_dim=20, page_tokens=PAGE):
    sizes = {"num_layers": LAYERS, "page_tokens": page_tokens, "kv_heads": HEADS, "head_dim": head_dim}
    return make_layout(widths={"q": (8, 8)}, dtype=dtype, int8_kv=True, **sizes)


def written(write, layout, pages, k, v, where):
    run = jax.jit(functools.partial(write, layout=layout))
    return np.asarray(run(pages, np.int32(1), k, v, where))


def noise(layout, seed=1):
    raw = raw_dtype(layout.dtype)
    shape = (LAYERS, PAGES, layout.page_width)
    return np.random.default_rng(seed).integers(0, np.iinfo(raw).max, shape, raw, endpoint=True)


def test_quantize_rows_is_within_half_a_step_and_keeps_the_largest():
    x = np.random.default_rng(0).normal(size=(50, 4, 64)).astype(np.float32) * np.logspace(-6, 6, 50)[:, None, None]
    x = x.astype(np.float32)
    ints, scales = (np.asarray(part) for part in quantize_rows(jnp.asarray(x)))
    assert np.abs(ints).max(axis=-1).min() == np.abs(ints).max() == 127
    assert (np.abs(ints * scales[..., None] - x) <= 0.5001 * scales[..., None]).all()


def test_quantize_rows_of_zeros_and_of_what_is_not_finite():
    x = np.zeros((4, 8), np.float32)
    x[1, 3], x[2, 5], x[3] = np.nan, -np.inf, 1e-38
    ints, scales = (np.asarray(part) for part in quantize_rows(jnp.asarray(x)))
    assert not ints[[0, 3]].any()
    np.testing.assert_array_equal(np.isfinite(scales), [True, False, False, True])


@WRITES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "head_dim"), [(0, 20), (3, 20), (100, 64)])
def test_write_kv_puts_integers_and_scales_in_their_places_and_touches_nothing_else(write, dtype, tokens, head_dim):
    layout, rng = layout_of(dtype, head_dim=head_dim), np.random.default_rng(2)
    k, v = (rng.normal(size=(tokens, HEADS, head_dim)).astype(layout.dtype) for _ in range(2))
    slots = rng.choice(PAGES * PAGE, tokens, replace=False)
    where = KvWrite((slots // PAGE).astype(np.int32), (slots % PAGE).astype(np.int32))
    want = noise(layout).copy().view(np.uint8).reshape(LAYERS, PAGES, 2, HEADS, -1)
    for part, rows in enumerate((k, v)):
        ints, scales = int8_parts(rows)
        for token, (page, offset) in enumerate(zip(*where, strict=True)):
            place = want[1, page, part]
            place[:, offset * head_dim : (offset + 1) * head_dim] = ints[token].view(np.uint8)
            scale = PAGE * head_dim + 4 * offset
            place[:, scale : scale + 4] = scales[token][:, None].view(np.uint8)
    got = written(write, layout, noise(layout), k, v, where)
    np.testing.assert_array_equal(got.view(np.uint8).reshape(want.shape), want)


@WRITES
def test_write_kv_rounds_float32_once_also_beside_bfloat16(write):
    layout = layout_of("bfloat16")
    k, v = np.random.default_rng(3).normal(size=(2, 5, HEADS, 20)).astype(np.float32)
    where = KvWrite(np.full(5, 4, np.int32), np.arange(5, dtype=np.int32))
    parts = written(write, layout, noise(layout), k, v, where)[1, 4].reshape(2, HEADS, -1)
    found = open_pages(jnp.asarray(parts), layout=layout)
    for part, rows in enumerate((k, v)):
        ints, scales = int8_parts(rows)
        np.testing.assert_array_equal(found.ints[part, :, :5].swapaxes(0, 1), ints)
        np.testing.assert_array_equal(found.scales[part, :, :5].T, scales)


@WRITES
def test_write_kv_of_what_is_not_finite_keeps_it_apparent(write):
    layout = layout_of("float32")
    k = np.ones((1, HEADS, 20), np.float32)
    k[0, 1, 17], k[0, 2, 0] = np.nan, np.inf
    where = KvWrite(np.array([2], np.int32), np.array([9], np.int32))
    parts = written(write, layout, noise(layout), k, k, where)[1, 2].reshape(2, HEADS, -1)
    scales = np.asarray(open_pages(jnp.asarray(parts), layout=layout).scales)[:, :, 9]
    np.testing.assert_array_equal(np.isfinite(scales), [[True, False, False]] * 2)


@WRITES
def test_write_kv_of_donated_pages_in_a_scan_copies_no_pages(write):
    layout = layout_of("bfloat16")
    pages, k = jnp.asarray(noise(layout)), jnp.ones((5, HEADS, 20), jnp.bfloat16)
    where = KvWrite(np.full(5, 3, np.int32), np.arange(5, dtype=np.int32))

    def step(pages, k):
        def body(pages, layer):
            return write(pages, layer, k, k, where, layout=layout), ()

        return lax.scan(body, pages, jnp.arange(LAYERS))[0]

    place = pages.unsafe_buffer_pointer()
    assert jax.jit(step, donate_argnums=0)(pages, k).unsafe_buffer_pointer() == place


@pytest.mark.parametrize(("dtype", "page_tokens"), [("float32", 16), ("bfloat16", 2)])
def test_partial_attention_over_int8_equals_numpy_and_sees_only_what_is_visible(dtype, page_tokens):
    layout, rng = layout_of(dtype, head_dim=24, page_tokens=page_tokens), np.random.default_rng(4)
    table_pages, last, window = 256 // page_tokens, 200, 150
    numbers = rng.normal(size=(LAYERS, 1 + table_pages, 2, HEADS, page_tokens, 24)) * rng.lognormal(
        size=(LAYERS, 1 + table_pages, 2, HEADS, page_tokens, 1)
    )
    table = 1 + rng.permutation(table_pages).astype(np.int32)
    place = [(table[token // page_tokens], token % page_tokens) for token in range(256)]
    seen = np.zeros((1 + table_pages, page_tokens), bool)
    seen[tuple(np.array(place[last + 1 - window : last + 1]).T)] = True
    numbers.swapaxes(2, 4)[:, ~seen] = np.nan if page_tokens == 16 else 1e5
    table[3] = ABSENT
    pages, stand_for = int8_pages(numbers.astype(layout.dtype), layout)
    q = rng.normal(size=(1, HEADS, 4, 24)).astype(layout.dtype)
    lane = AttentionLane(table[None], np.array([[last]], np.int32), np.int32(last), np.int32(last + 1))

    def attend(q, pages, lane, window):
        maths = HeadMaths(0.3, None, window)
        return finish(partial_attention(q, pages, jnp.int32(1), lane, maths, layout=layout))

    got = np.asarray(jax.jit(attend)(q, pages, lane, np.int32(window)))
    tokens = [place[t] for t in range(last + 1 - window, last + 1) if t // page_tokens != 3]
    keys, values = (np.stack([stand_for[1, page, part, :, g] for page, g in tokens], 1) for part in (0, 1))
    scores = np.einsum("KRH,KSH->KRS", q[0].astype(np.float64), keys) * 0.3
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("KRS,KSH->KRH", p, values) / p.sum(-1, keepdims=True)
    np.testing.assert_allclose(
        got[0], want, atol=3e-6 if dtype == "float32" else 4e-2, rtol=0 if dtype == "float32" else 2e-2
    )
