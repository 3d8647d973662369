"""Adapters on the processor's matrix unit: against the XLA version, alone and in company, and where it cannot serve."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memory_pool import link
from memory_pool.layout import PageLayout
from memory_pool.near import near_data
from strategies import native
from strategies.kernel_tables import DECODE, PREFILL, XLA, choose_kernels
from strategies.lanes import BASE
from tests.strategies.pages_for_tests import PackedAdapters, make_layout, pack_adapters

# Pages of 512 numbers: rows of 96 and 208 lie in one page or in two, rows of 544 in two or three.
WIDTHS = {"q": (208, 96), "k": (16, 96), "down": (96, 544)}
GROUPS = (("q", "k"), ("down",))
RANKS = [[1, 8, 13], [64, 0, 100], [13, 64, 8], [100, 13, 1], [8, 100, 33], [0, 0, 0]]
COUNTS = [1, 5, 16, 37, 128, 3]
MAX_RANK = 100
LAYOUT, INT8_LAYOUT = (
    make_layout(widths=WIDTHS, page_tokens=16, dtype="bfloat16", int8_adapters=int8) for int8 in (False, True)
)
TOLERANCE = 2e-2

needs_unit = pytest.mark.skipif(native.matrix_unit_unavailable() is not None, reason="no matrix unit for bfloat16")
by_group = pytest.mark.parametrize("group", GROUPS, ids="+".join)
by_order = pytest.mark.parametrize("order", ["runs", "scattered"])
by_layout = pytest.mark.parametrize("layout", [LAYOUT, INT8_LAYOUT], ids=["bfloat16", "int8"])
by_field = pytest.mark.parametrize("field", ["shrink", "expand", "delta"])


@functools.cache
def packed(layout: PageLayout = LAYOUT) -> PackedAdapters:
    return pack_adapters(np.random.default_rng(0), layout, ranks=RANKS, room=len(RANKS) + 2)


def owners(order: str) -> np.ndarray:
    """Tokens of an adapter one after another with some of the base model between, or all in no order."""
    runs = np.concatenate([np.repeat([e, BASE], [count, 2]) for e, count in enumerate(COUNTS)]).astype(np.int32)
    return runs if order == "runs" else np.random.default_rng(1).permutation(runs)


def rows_of(field: str, group: tuple[str, ...], tokens: int) -> np.ndarray:
    rng = np.random.default_rng(2)
    if field == "expand":
        return rng.normal(size=(len(group), tokens, MAX_RANK)).astype(LAYOUT.dtype)
    return rng.normal(size=(tokens, LAYOUT.in_width(group[0]))).astype(LAYOUT.dtype)


def static(field: str, group: tuple[str, ...], layout: PageLayout = LAYOUT) -> dict[str, Any]:
    return {"layout": layout, "group": group} | ({} if field == "expand" else {"max_rank": MAX_RANK})


def tiles(field: str) -> Any:
    return next(kernel for kernel in PREFILL["cpu"][field] if kernel.name == "native-tiles").call


def run(call: Any, first: np.ndarray, owner: np.ndarray, place: str = "device", **fixed: Any) -> Any:
    def near(*operands: Any) -> Any:
        results = near_data(functools.partial(call, **fixed))(*jax.tree.map(link.to_pool, operands))
        return jax.tree.map(link.to_device, results)

    adapters = packed(fixed["layout"])
    operands = first, adapters.pages, np.int32(1), adapters.lane(owner)
    return jax.jit(near if place == "near" else functools.partial(call, **fixed))(*operands)


def lowered(call: Any, first: Any, pages: Any, **fixed: Any) -> str:
    operands = first, pages, np.int32(1), packed().lane(np.zeros(first.shape[-2], np.int32))
    return jax.jit(functools.partial(call, **fixed)).lower(*operands).as_text()


@needs_unit
@pytest.mark.parametrize("place", ["device", "near"])
@by_layout
@by_field
@by_group
@by_order
def test_tiles_equal_xla_for_mixed_ranks_and_counts(
    order: str, group: tuple[str, ...], field: str, layout: PageLayout, place: str
) -> None:
    owner = owners(order)
    first, fixed = rows_of(field, group, len(owner)), static(field, group, layout)
    got = run(tiles(field), first, owner, place, **fixed)
    want = run(getattr(XLA, field).call, first, owner, **fixed)
    for name, one, other in zip(group, got, want, strict=True):
        assert one.dtype == other.dtype
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, atol=TOLERANCE * np.abs(other).max())
        ranks = packed().ranks[:, LAYOUT.index(name)]
        nothing = (owner == BASE) | (ranks[owner] == 0)
        assert not one[nothing].any(), "no adapter, no rank: exact zeros"
        if field == "shrink":
            beyond = np.arange(MAX_RANK) >= np.where(nothing, 0, ranks[owner])[:, None]
            assert not one[beyond].any()


@needs_unit
def test_shrink_on_tiles_for_float32_results_does_not_round() -> None:
    owner, group = owners("runs"), ("q", "k")
    x = rows_of("shrink", group, len(owner))
    m = run(tiles("shrink"), x, owner, out_dtype=jnp.float32, **static("shrink", group))
    want = [packed().shrink(x, 1, owner, name, max_rank=MAX_RANK) for name in group]
    np.testing.assert_allclose(m, want, atol=5e-4)


@needs_unit
@by_layout
@by_field
@by_group
def test_token_on_tiles_is_bit_equal_in_any_company(group: tuple[str, ...], field: str, layout: PageLayout) -> None:
    together = owners("scattered")
    first, fixed = rows_of(field, group, len(together)), static(field, group, layout)
    everybody = run(tiles(field), first, together, **fixed)
    for chosen in ([int(np.flatnonzero(together == 4)[77])], np.flatnonzero(together >= 0)[3:150:7]):
        own = first[:, chosen] if field == "expand" else first[chosen]
        for one, of_all in zip(run(tiles(field), own, together[chosen], **fixed), everybody, strict=True):
            np.testing.assert_array_equal(one, np.asarray(of_all)[chosen])


@needs_unit
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_delta_on_tiles_adapter_that_is_not_finite_reaches_only_its_own_tokens(bad: float) -> None:
    broken = packed()
    pages = broken.pages.copy()
    numbers = pages.view(LAYOUT.dtype)
    numbers[:, broken.a_pages[0, 0], 0] = bad
    numbers[:, broken.b_pages[0, 0], 0] = bad
    owner = np.array([0, 2, BASE, 4, 0], np.int32)
    x = rows_of("delta", ("q",), 5)
    (y,) = tiles("delta")(
        jnp.asarray(x), jnp.asarray(pages), jnp.int32(1), broken.lane(owner), **static("delta", ("q",))
    )
    finite = np.isfinite(y).all(axis=1)
    np.testing.assert_array_equal(finite, owner != 0)


@by_field
def test_tiles_serve_whole_tiles_of_bfloat16_and_vectors_all_else(field: str) -> None:
    group, pages = ("q", "k"), packed().pages
    call, fixed = functools.partial(getattr(native, field), on_tiles=True), static(field, group)
    first = jnp.asarray(rows_of(field, group, 5))
    on_tiles, in_vectors = f"plora_tile_{field}", f"@plora_{field}("
    assert on_tiles in lowered(call, first, pages, **fixed)
    assert in_vectors in lowered(getattr(native, field), first, pages, **fixed)
    assert in_vectors in lowered(call, first.astype(jnp.float32), pages, **fixed)
    assert in_vectors in lowered(call, first, pages.astype(np.uint32), **fixed)
    assert on_tiles in lowered(call, first, pages, **fixed | {"layout": INT8_LAYOUT})
    odd = make_layout(widths={"q": (24, 24), "k": (8, 24)}, page_tokens=16, dtype="bfloat16")
    assert in_vectors in lowered(call, first, pages, **fixed | {"layout": odd})


@needs_unit
@by_layout
@by_group
@by_order
def test_add_on_tiles_is_bit_equal_in_any_company_and_leaves_other_rows(
    order: str, group: tuple[str, ...], layout: PageLayout
) -> None:
    owner, rng, lead = owners(order), np.random.default_rng(5), 7
    x, fixed = rows_of("delta", group, len(owner)), static("delta", group, layout)
    before = tuple(
        rng.normal(size=(lead + len(owner) + 2, LAYOUT.out_width(name))).astype(np.float32) for name in group
    )

    def add(chosen: np.ndarray, sums: tuple[np.ndarray, ...], first: int) -> Any:
        def call(sums: Any, x: Any, pages: Any, lane: Any) -> Any:
            return tiles("add")(sums, x, pages, jnp.int32(1), lane, first=first, **fixed)

        around = ((first, len(sums[0]) - first - len(chosen)), (0, 0))
        rows = jnp.pad(jnp.asarray(x)[chosen], around, constant_values=jnp.nan)
        return jax.jit(call)(sums, rows, packed(layout).pages, packed(layout).lane(owner[chosen]))

    got = add(np.arange(len(owner)), before, lead)
    some = np.flatnonzero(owner >= 0)[3:150:7]
    apart = add(some, tuple(y[lead + some] for y in before), 0)
    deltas = run(XLA.delta.call, x, owner, **fixed)
    for name, one, was, alone, delta in zip(group, got, before, apart, deltas, strict=True):
        one = np.asarray(one)
        np.testing.assert_array_equal(one[lead + some], alone)
        want = was.astype(np.float64)
        want[lead : lead + len(owner)] += np.asarray(delta)
        np.testing.assert_allclose(one, want, atol=TOLERANCE * np.abs(want).max())
        nothing = (owner == BASE) | (packed().ranks[owner, LAYOUT.index(name)] == 0)
        same = np.concatenate([np.ones(lead, bool), nothing, np.ones(2, bool)])
        np.testing.assert_array_equal(one[same], was[same])


def test_choose_kernels_gives_prefill_the_matrix_unit_and_decode_the_vectors() -> None:
    chosen = choose_kernels("cpu")
    vectors = "xla" if native.unavailable() else "native"
    unit = vectors if native.matrix_unit_unavailable() else "native-tiles"
    for field in ("shrink", "expand", "delta", "add"):
        assert [kernel.name for kernel in PREFILL["cpu"][field]] == ["native-tiles", "native"]
        assert [kernel.name for kernel in DECODE["cpu"][field]] == ["native"]
        assert getattr(chosen.prefill, field).name == unit
        assert getattr(chosen.decode, field).name == vectors
    assert [kernel.name for kernel in PREFILL["cpu"]["rows"]] == ["native"]
