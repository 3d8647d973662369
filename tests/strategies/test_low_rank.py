"""Shrink, expand, delta and rows in XLA against plain numpy, over random ranks, dtypes, owners and page sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool import link
from memory_pool.near import near_data
from strategies import low_rank
from strategies.lanes import BASE
from tests.strategies.pages_for_tests import make_layout, pack_adapters

WIDTHS = {"q": (24, 16), "k": (8, 16), "down": (16, 136)}
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def close(got, want, dtype):
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, want, atol=TOLERANCE[dtype] * max(1.0, np.abs(want).max(initial=0)))


@functools.partial(jax.jit, static_argnames=("layout", "group", "max_rank"))
def shrink_expand_delta(x, pages, layer, lane, *, layout, group, max_rank):
    m = low_rank.shrink(x, pages, layer, lane, layout=layout, group=group, max_rank=max_rank)
    expanded = low_rank.expand(m, pages, layer, lane, layout=layout, group=group)
    return m, expanded, low_rank.delta(x, pages, layer, lane, layout=layout, group=group, max_rank=max_rank)


shrink = jax.jit(low_rank.shrink, static_argnames=("layout", "group", "max_rank", "out_dtype"))
expand = jax.jit(low_rank.expand, static_argnames=("layout", "group"))
delta = jax.jit(low_rank.delta, static_argnames=("layout", "group", "max_rank"))
rows = jax.jit(low_rank.rows, static_argnames=("layout", "name", "side"))
LAYOUTS = {
    (dtype, page_tokens, int8): make_layout(
        widths=WIDTHS, page_tokens=page_tokens, dtype=dtype, int8_adapters=int8 == "int8"
    )
    for int8 in ("", "int8")
    for dtype, page_tokens in (("float32", 2), ("bfloat16", 16))
}


@pytest.mark.parametrize("key", LAYOUTS, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.lists(st.lists(st.sampled_from([0, 1, 5, 64, 128]), min_size=3, max_size=3), max_size=4),
)
def test_low_rank_any_mix_equals_numpy(key, seed, ranks):
    rng, layout, dtype = np.random.default_rng(seed), LAYOUTS[key], key[0]
    packed = pack_adapters(rng, layout, ranks=ranks, room=5, max_rank=128)
    owner = rng.integers(BASE, len(ranks), size=9).astype(np.int32)
    for group in (("q", "k"), ("down",)):
        x = rng.normal(size=(9, layout.in_width(group[0]))).astype(layout.dtype)
        m, expanded, fused = shrink_expand_delta(
            x, packed.pages, np.int32(1), packed.lane(owner), layout=layout, group=group, max_rank=128
        )
        assert m.dtype == layout.dtype
        for at, name in enumerate(group):
            close(m[at], packed.shrink(x, 1, owner, name, max_rank=128), dtype)
            close(expanded[at], packed.delta(x, 1, owner, name), dtype)
            close(fused[at], packed.delta(x, 1, owner, name), dtype)
            assert not np.asarray(fused[at])[owner == BASE].any(), "the base model's tokens must get exact zeros"
            assert not np.asarray(expanded[at])[owner == BASE].any()


def test_shrink_for_float32_results_is_not_rounded():
    rng = np.random.default_rng(1)
    layout = make_layout(widths=WIDTHS, dtype="bfloat16")
    packed = pack_adapters(rng, layout, ranks=[[7, 3, 0]])
    x = rng.normal(size=(3, 16)).astype(layout.dtype)
    lane = packed.lane([0, BASE, 0])
    m = shrink(x, packed.pages, jnp.int32(0), lane, layout=layout, group=("q",), max_rank=8, out_dtype=jnp.float32)
    np.testing.assert_allclose(m[0], packed.shrink(x, 0, lane.owner, "q", max_rank=8), atol=1e-5)


def test_rows_lays_components_of_all_adapters_end_to_end():
    rng = np.random.default_rng(2)
    layout = make_layout(widths=WIDTHS, page_tokens=2)
    packed = pack_adapters(rng, layout, ranks=[[50, 4, 3], [0, 0, 70], [40, 1, 2]])
    for side, matrices in (("a", packed.a), ("b", packed.b)):
        for name in layout.names:
            want = np.concatenate([one[name][1] for one in matrices])
            lane = packed.lane([0])
            assert low_rank.num_chunks(lane, layout.index(name)) == -(-len(want) // low_rank.CHUNK_ROWS)
            got = np.concatenate(
                [
                    rows(packed.pages, 1, lane, jnp.int32(i), layout=layout, name=name, side=side)
                    for i in range(-(-len(want) // low_rank.CHUNK_ROWS))
                ]
            )
            np.testing.assert_array_equal(got.view(np.float32)[: len(want)], want, err_msg=f"{side} {name}")


def test_low_rank_of_rows_spread_over_layers_takes_each_layers_part():
    rng = np.random.default_rng(3)
    layout = make_layout(widths=WIDTHS | {"head": (100, 16)}, spread=["head"])
    packed = pack_adapters(rng, layout, ranks=[[1, 1, 1, 5], [2, 2, 0, 66]])
    assert layout.out_width("head") == 56, "ceil(100 / (2 layers * 8)) units of 8"
    m = rng.normal(size=(1, 3, 70)).astype(np.float32)
    lane = packed.lane([1, BASE, 0])
    for layer in (0, 1):
        (y,) = expand(m, packed.pages, jnp.int32(layer), lane, layout=layout, group=("head",))
        close(y, packed.expand(m[0], layer, lane.owner, "head"), "float32")


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_low_rank_adapter_that_is_not_finite_reaches_only_its_own_tokens(bad):
    rng = np.random.default_rng(4)
    layout = make_layout(widths=WIDTHS)
    packed = pack_adapters(rng, layout, ranks=[[3, 0, 0], [5, 0, 0]])
    numbers = packed.pages.view(np.float32)
    numbers[:, packed.a_pages[0, 0], 0] = bad
    numbers[:, packed.b_pages[0, 0], 0] = bad
    x = rng.normal(size=(3, 16)).astype(np.float32)
    lane = packed.lane([0, 1, BASE])
    keys = {"layout": layout, "group": ("q",)}
    m = shrink(x, packed.pages, jnp.int32(0), lane, max_rank=8, **keys)
    for (y,) in (
        delta(x, packed.pages, jnp.int32(0), lane, max_rank=8, **keys),
        expand(m, packed.pages, jnp.int32(0), lane, **keys),
    ):
        assert not np.isfinite(y[0]).all(), "an adapter that is not finite must not look as if it were"
        close(y[1:], packed.delta(x, 0, lane.owner, "q")[1:], "float32")


@pytest.mark.parametrize("int8", [False, True])
def test_low_rank_near_the_data_equals_the_device(int8):
    rng = np.random.default_rng(5)
    layout = make_layout(widths=WIDTHS, dtype="bfloat16", int8_adapters=int8)
    packed = pack_adapters(rng, layout, ranks=[[3, 70, 0], [5, 1, 2]], room=4)
    lane = packed.lane([0, 1, BASE, 1])
    x = rng.normal(size=(4, 16)).astype(layout.dtype)
    keys = {"layout": layout, "group": ("q", "k"), "max_rank": 128}

    both = functools.partial(shrink_expand_delta, **keys)

    def near(x, pages, layer, lane):
        sent = jax.tree.map(link.to_pool, (x, pages, layer, lane))
        return jax.tree.map(link.to_device, near_data(both)(*sent))

    args = (x, packed.pages, np.int32(1), lane)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(near)(*args), jax.jit(both)(*args))
