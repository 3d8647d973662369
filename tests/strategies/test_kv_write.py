"""Keys and values into their pages: the native kernel and XLA against numpy, and what the compiled program copies."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memory_pool.raw import raw_dtype
from strategies import native
from strategies.kv_write import KvWrite, write_kv, xla_write_kv
from tests.strategies.pages_for_tests import make_layout

PAGES, PAGE = 7, 16
needs_native = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def case(dtype, tokens, *, kv_heads=3, head_dim=20, seed=0):
    """A layout, numbers [L, P, 2, K, G, H], and k, v [T, K, H]."""
    rng = np.random.default_rng(seed)
    layout = make_layout(
        widths={"q": (8, 8)}, page_tokens=PAGE, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, num_layers=3
    )
    shape = (layout.num_layers, PAGES, 2, kv_heads, PAGE, head_dim)
    numbers = rng.normal(size=shape).astype(layout.dtype)
    k, v = (rng.normal(size=(tokens, kv_heads, head_dim)).astype(layout.dtype) for _ in range(2))
    return layout, numbers, k, v


def raw(numbers):
    return numbers.reshape(*numbers.shape[:2], -1).view(raw_dtype(numbers.dtype))


def places(tokens, seed=0):
    slots = np.random.default_rng(seed).choice(PAGES * PAGE, tokens, replace=False)
    return KvWrite((slots // PAGE).astype(np.int32), (slots % PAGE).astype(np.int32))


@pytest.mark.parametrize("write", [write_kv, xla_write_kv])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 100])
def test_write_kv_touches_only_the_rows_named(write, dtype, tokens):
    layout, numbers, k, v = case(dtype, tokens)
    where = places(tokens)
    got = jax.jit(functools.partial(write, layout=layout))(raw(numbers), np.int32(1), k, v, where)
    for token, (page, offset) in enumerate(zip(*where, strict=True)):
        numbers[1, page, 0, :, offset], numbers[1, page, 1, :, offset] = k[token], v[token]
    np.testing.assert_array_equal(got, raw(numbers))


@needs_native
def test_write_kv_of_wide_heads_on_two_threads_equals_xla():
    layout, numbers, k, v = case("bfloat16", PAGES * PAGE, kv_heads=4, head_dim=256)
    args = (raw(numbers), np.int32(2), k, v, places(PAGES * PAGE))
    got, want = (jax.jit(functools.partial(f, layout=layout))(*args) for f in (write_kv, xla_write_kv))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("write", [write_kv, xla_write_kv])
@pytest.mark.parametrize("head_dim", [20, 64])
def test_write_kv_rounds_float32_values_for_bfloat16_pages(write, head_dim):
    layout, numbers, k, _ = case("bfloat16", 50, head_dim=head_dim)
    v = np.random.default_rng(1).normal(size=k.shape).astype(np.float32)
    v[0, 0, :4] = np.inf, -np.inf, np.nan, 3.4e38
    run = jax.jit(functools.partial(write, layout=layout))
    got, want = (run(raw(numbers), np.int32(1), k, values, places(50)) for values in (v, v.astype(layout.dtype)))
    np.testing.assert_array_equal(*(np.asarray(pages).view(layout.dtype).astype(np.float32) for pages in (got, want)))


@needs_native
@pytest.mark.parametrize("used", [0, 7, 20, 99])
def test_write_kv_of_the_tokens_that_are_used_writes_no_others(used):
    layout, numbers, k, v = case("bfloat16", 20)
    where = places(20)
    write = jax.jit(functools.partial(write_kv, layout=layout))
    got = write(raw(numbers), np.int32(1), k, v, where, used=np.int32(used))
    first = KvWrite(where.pages[:used], where.offsets[:used])
    np.testing.assert_array_equal(got, write(raw(numbers), np.int32(1), k[:used], v[:used], first))


@needs_native
def test_write_kv_of_tokens_to_one_place_leaves_the_last():
    layout, numbers, k, v = case("bfloat16", 60)
    where = KvWrite(np.zeros(60, np.int32), np.zeros(60, np.int32))
    write_kv_here = jax.jit(functools.partial(write_kv, layout=layout))
    got = np.asarray(write_kv_here(raw(numbers), np.int32(0), k, v, where))
    numbers[0, 0, 0, :, 0], numbers[0, 0, 1, :, 0] = k[-1], v[-1]
    np.testing.assert_array_equal(got, raw(numbers))


@needs_native
def test_write_kv_of_donated_pages_in_a_scan_copies_no_pages():
    layout, numbers, k, v = case("bfloat16", 5)
    pages = jnp.asarray(raw(numbers))

    def step(pages, k, v, where):
        def body(pages, layer):
            pages = write_kv(pages, layer, k, v, where, layout=layout)
            return pages, pages[layer, 0, 0]

        return lax.scan(body, pages, jnp.arange(layout.num_layers))

    compiled = jax.jit(step, donate_argnums=0).lower(pages, k, v, places(5)).compile()
    shape = ",".join(map(str, pages.shape))
    assert "plora_write_kv" in compiled.as_text()
    assert not re.findall(rf"= u16\[{shape}\]\S* copy\(.*", compiled.as_text())
    place = pages.unsafe_buffer_pointer()
    got, _ = compiled(pages, k, v, places(5))
    assert got.unsafe_buffer_pointer() == place


@needs_native
def test_write_kv_of_pages_that_are_kept_leaves_them_as_they_were():
    layout, numbers, k, v = case("bfloat16", 5)
    pages = jnp.asarray(raw(numbers))
    got = jax.jit(functools.partial(write_kv, layout=layout))(pages, np.int32(1), k, v, places(5))
    np.testing.assert_array_equal(pages, raw(numbers))
    assert (np.asarray(got) != raw(numbers)).any()


@needs_native
@pytest.mark.parametrize(("page", "offset"), [(PAGES, 0), (-1, 3), (2, PAGE)])
def test_write_kv_to_no_page_says_which_token(page, offset):
    layout, numbers, k, v = case("bfloat16", 2)
    where = KvWrite(np.array([1, page], np.int32), np.array([0, offset], np.int32))
    said = f"token 1 goes to page {page}, offset {offset}, of {PAGES} pages of {PAGE}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        jax.block_until_ready(
            jax.jit(functools.partial(write_kv, layout=layout))(raw(numbers), np.int32(0), k, v, where)
        )
