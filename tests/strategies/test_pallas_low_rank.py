"""Shrink, expand and delta in Pallas, interpreted on the CPU, against the XLA version; and lowered."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from strategies.kernel_tables import XLA
from strategies.lanes import BASE
from strategies.pallas import low_rank_gpu, low_rank_tpu, used_pages
from tests.strategies import pallas_lowering as models
from tests.strategies.pages_for_tests import make_layout, pack_adapters
from tests.strategies.test_kernel_tables import TOLERANCE, LoraCase, close, run

KERNELS: dict[str, Any] = {"cuda": low_rank_gpu, "tpu": low_rank_tpu}
PLATFORMS = pytest.mark.parametrize("platform", KERNELS)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])

# Units of 48 numbers, 16 a page: rows of two, three and five units lie in one page or in two. Adapter 1 has no
# components, 2 no tokens, 4 only some projections.
WIDTHS = {"q": (144, 96), "k": (48, 96), "down": (96, 240)}
RANKS = [[4, 0, 3], [0, 0, 0], [9, 3, 8], [21, 9, 5], [0, 2, 0], [1, 1, 17]]
OWNER = np.array([0, BASE, 3, 1, 3, 5, 3, 4, 0, BASE, 5, *[3] * 17], np.int32)
MAX_RANK = 21


@functools.cache
def case_of(dtype: str) -> LoraCase:
    rng = np.random.default_rng(0)
    layout = make_layout(widths=WIDTHS, page_tokens=8, head_dim=24, dtype=dtype)
    assert (layout.unit, layout.units_per_page) == (48, 16)
    packed = pack_adapters(rng, layout, ranks=RANKS, room=len(RANKS) + 2)
    groups = (("q", "k"), ("down",))
    x = {g: rng.normal(size=(len(OWNER), layout.in_width(g[0]))).astype(layout.dtype) for g in groups}
    m = {g: rng.normal(size=(len(g), len(OWNER), MAX_RANK)).astype(layout.dtype) for g in groups}
    return LoraCase(layout, packed, OWNER, x, m)


def interpreted(platform: str, field: str) -> Any:
    return functools.partial(getattr(KERNELS[platform], field), interpret=True)


@PLATFORMS
@DTYPES
@pytest.mark.parametrize(
    ("field", "group"), [("delta", ("q", "k")), ("delta", ("down",)), ("shrink", ("q", "k")), ("expand", ("down",))]
)
def test_pallas_lora_kernel_equals_xla(platform: str, field: str, group: tuple[str, ...], dtype: str) -> None:
    case = case_of(dtype)
    operands, static = case.operands(field, group), case.static(field, group)
    if field != "expand":
        static |= {"max_rank": MAX_RANK}
    got = run(interpreted(platform, field), operands, **static)
    close(got, run(getattr(XLA, field).call, operands, **static), dtype)
    if field == "shrink":
        for of_projection, name in zip(np.asarray(got), group, strict=True):
            rank_T = np.where(OWNER == BASE, 0, case.packed.ranks[OWNER, case.layout.index(name)])
            assert not of_projection[np.arange(MAX_RANK) >= rank_T[:, None]].any(), "exact zeros beyond the rank"
    else:
        for y in got:
            assert not np.asarray(y)[(OWNER == BASE) | (OWNER == 1)].any(), "no adapter, no rank: exact zeros"


@PLATFORMS
def test_pallas_shrink_for_float32_results_does_not_round(platform: str) -> None:
    case, group = case_of("bfloat16"), ("q", "k")
    static: dict[str, Any] = case.static("shrink", group) | {"max_rank": MAX_RANK, "out_dtype": jnp.float32}
    m = run(interpreted(platform, "shrink"), case.operands("shrink", group), **static)
    want = [case.packed.shrink(case.x[group], 1, case.owner, name, max_rank=MAX_RANK) for name in group]
    np.testing.assert_allclose(m, want, atol=2e-4)


@PLATFORMS
def test_pallas_expand_takes_float32_beside_bfloat16_pages(platform: str) -> None:
    case, group = case_of("bfloat16"), ("q",)
    m = np.random.default_rng(1).normal(size=(1, len(OWNER), MAX_RANK)).astype(np.float32)
    operands = (m, case.packed.pages, np.int32(1), case.packed.lane(OWNER))
    static: dict[str, Any] = {"layout": case.layout, "group": group}
    got = run(interpreted(platform, "expand"), operands, **static)
    close(got, (case.packed.expand(m[0], 1, OWNER, "q").astype(np.float32),), "float32")


@PLATFORMS
def test_pallas_lora_kernel_without_tokens_of_adapters_gives_zeros(platform: str) -> None:
    case, group = case_of("float32"), ("down",)
    operands = case.operands("delta", group)
    lane = operands[-1]._replace(owner=np.full_like(OWNER, BASE))
    static: dict[str, Any] = case.static("delta", group) | {"max_rank": MAX_RANK}
    (y,) = run(interpreted(platform, "delta"), (*operands[:-1], lane), **static)
    assert not np.asarray(y).any()


@PLATFORMS
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_pallas_lora_kernel_adapter_that_is_not_finite_reaches_only_its_own_tokens(platform: str, bad: float) -> None:
    rng = np.random.default_rng(4)
    layout = make_layout(widths=WIDTHS, page_tokens=8, head_dim=24)
    packed = pack_adapters(rng, layout, ranks=RANKS[:3])
    numbers = packed.pages.view(np.float32)
    numbers[:, packed.a_pages[0, 0], 0] = bad
    numbers[:, packed.b_pages[0, 0], 0] = bad
    x = rng.normal(size=(3, layout.in_width("q"))).astype(np.float32)
    lane = packed.lane([0, 2, BASE])
    where: dict[str, Any] = {"layout": layout, "group": ("q",), "max_rank": 9}
    (y,) = run(interpreted(platform, "delta"), (x, packed.pages, np.int32(1), lane), **where)
    assert not np.isfinite(y[0]).all(), "an adapter that is not finite must not look as if it were"
    want = packed.delta(x, 1, lane.owner, "q")[1:]
    np.testing.assert_allclose(np.asarray(y)[1:], want, atol=TOLERANCE["float32"] * np.abs(want).max())


@PLATFORMS
@DTYPES
@pytest.mark.parametrize("model", models.MODELS)
@pytest.mark.parametrize("tokens", [3, 512])
def test_pallas_delta_lowers_for_the_shapes_of_models(platform: str, model: str, tokens: int, dtype: str) -> None:
    layout = models.layout_of(model, dtype)
    for group in (("q", "k", "v"), ("down",)):
        call = functools.partial(KERNELS[platform].delta, layout=layout, group=group, max_rank=models.RANK)
        x = models.shape(layout.dtype, tokens, layout.in_width(group[0]))
        operands = x, models.pages_of(layout), models.shape(np.int32), models.stripe_of(layout, tokens)
        text = models.lowered(platform, call, *operands)
        assert text.count(models.KERNEL_CALL[platform]) == 1 + len(group), "one to shrink, one a projection to expand"


def test_pallas_lora_kernel_with_a_list_too_long_for_scalar_memory_is_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    case, group = case_of("float32"), ("down",)
    monkeypatch.setattr(low_rank_tpu, "LARGEST_LIST", used_pages.adapter_list_bytes(case.packed.a_pages) - 1)
    operands, static = case.operands("delta", group), case.static("delta", group) | {"max_rank": MAX_RANK}
    shrink = {**static, "out_dtype": None}
    assert models.lowered("tpu", functools.partial(low_rank_tpu.shrink, **shrink), *operands).count("tpu_custom") == 0
