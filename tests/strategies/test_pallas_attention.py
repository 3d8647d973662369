"""Partial attention in Pallas, interpreted on the CPU, against the XLA version; and lowered for what it runs on."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from strategies.kernel_tables import XLA
from strategies.lanes import AttentionLane
from strategies.paged_attention import NO_WINDOW, HeadMaths
from strategies.pallas import attention_gpu, attention_tpu, used_pages
from tests.strategies import pallas_lowering as models
from tests.strategies.test_kernel_tables import AttentionCase, attention_case, equal_partials

KERNELS: dict[str, Any] = {"cuda": attention_gpu, "tpu": attention_tpu}
PLATFORMS = pytest.mark.parametrize("platform", KERNELS)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def interpreted(platform: str) -> Any:
    return functools.partial(KERNELS[platform].partial_attention, interpret=True)


@PLATFORMS
@pytest.mark.parametrize(
    ("dtype", "page_tokens", "queries", "window", "cap"),
    [
        ("float32", 32, 1, NO_WINDOW, None),
        ("float32", 32, 5, 37, 5.0),
        ("bfloat16", 32, 1, 37, 5.0),
        ("bfloat16", 32, 16, NO_WINDOW, None),
        ("float32", 16, 2, NO_WINDOW, 5.0),
    ],
)
def test_pallas_attention_equals_xla(
    platform: str, dtype: str, page_tokens: int, queries: int, window: int, cap: float | None
) -> None:
    case = attention_case(dtype, page_tokens, 32, queries)
    got = case.attend(interpreted(platform), window=window, cap=cap)
    equal_partials(got, case.attend(XLA.attention.call, window=window, cap=cap), dtype)


@PLATFORMS
def test_pallas_attention_takes_a_window_that_is_a_number(platform: str) -> None:
    case = attention_case("float32", 32, 32, 1)
    q, pages, lane = case.operands

    def attend(q: jax.Array, pages: jax.Array, lane: AttentionLane) -> Any:
        return interpreted(platform)(q, pages, np.int32(1), lane, HeadMaths(0.3, None, 50), layout=case.layout)

    equal_partials(jax.jit(attend)(q, pages, lane), case.attend(XLA.attention.call, window=50), "float32")


@PLATFORMS
def test_pallas_attention_without_pages_sees_nothing(platform: str) -> None:
    case = attention_case("float32", 32, 32, 1)
    q, pages, lane = case.operands
    empty = AttentionCase(case.layout, (q, pages, lane._replace(tables=np.full_like(lane.tables, -1))))
    out, top, total = empty.attend(interpreted(platform))
    assert (np.asarray(top) == np.float32(-1e30)).all()
    assert not np.asarray(total).any()
    assert not np.asarray(out).any()


@PLATFORMS
@DTYPES
@pytest.mark.parametrize("model", models.MODELS)
@pytest.mark.parametrize("queries", [1, 16])
def test_pallas_attention_lowers_for_the_shapes_of_models(platform: str, model: str, queries: int, dtype: str) -> None:
    assert models.KERNEL_CALL[platform] in _lowered(platform, model, dtype, queries)


def test_pallas_attention_with_a_list_too_long_for_scalar_memory_is_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = models.attention_of("llama-8b", "bfloat16", 1)[3].tables
    monkeypatch.setattr(attention_tpu, "LARGEST_LIST", used_pages.seen_list_bytes(tables, 8) - 1)
    assert models.KERNEL_CALL["tpu"] not in _lowered("tpu", "llama-8b", "bfloat16", 1)


def test_pallas_attention_with_too_many_queries_for_shared_memory_is_xla() -> None:
    assert models.KERNEL_CALL["cuda"] not in _lowered("cuda", "llama-8b", "bfloat16", 64)


def _lowered(platform: str, model: str, dtype: str, queries: int) -> str:
    layout = models.layout_of(model, dtype)

    def attend(q: Any, pages: Any, layer: Any, lane: Any, window: Any) -> Any:
        maths = HeadMaths(0.3, 30.0, window)
        return KERNELS[platform].partial_attention(q, pages, layer, lane, maths, layout=layout)

    return models.lowered(platform, attend, *models.attention_of(model, dtype, queries))
