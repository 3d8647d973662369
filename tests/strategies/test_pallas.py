"""When the kernels in Pallas are chosen, and why not; and that a start without them does not import Pallas."""

import dataclasses
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

from memory_pool.layout import PageLayout
from strategies import pallas
from strategies.kernel_tables import DECODE, XLA, choose_kernels, describe_kernels
from tests.strategies.pages_for_tests import make_layout
from tests.strategies.pallas_lowering import layout_of


class Gpu(NamedTuple):
    """What is asked of a GPU."""

    compute_capability: str = "9.0"


class Tpu(NamedTuple):
    """What is asked of a TPU."""

    device_kind: str = "TPU v5 lite"


LLAMA, SMALL = layout_of("llama-8b", "bfloat16"), layout_of("smollm2-135m", "bfloat16")
HALF = make_layout(widths={"q": (256, 256)}, page_tokens=16, head_dim=128, dtype="float16")
ODD = make_layout(widths={"q": (24, 24)}, page_tokens=16, head_dim=96)


@pytest.mark.parametrize(
    ("layout", "device", "low_rank", "attention"),
    [
        (LLAMA, Gpu(), None, None),
        (SMALL, Gpu(), None, None),
        (ODD, Gpu(), "a unit of 24 numbers is no multiple of 16", "head_dim 96 is no power of two from 16 to 256"),
        (HALF, Gpu(), "pages of float16", "pages of float16"),
        (dataclasses.replace(LLAMA, int8_kv=True), Gpu(), None, "keys and values are int8"),
        (None, Gpu(), "the page layout is not known", "the page layout is not known"),
        *(
            (LLAMA, Gpu(capability), *[f"capability 8.0 or more, Gpu.* has {capability}"] * 2)
            for capability in ("7.5", "gfx942")
        ),
    ],
)
def test_pallas_on_a_gpu_says_why_not(
    layout: PageLayout | None, device: Gpu, low_rank: str | None, attention: str | None
) -> None:
    _says(pallas.low_rank_unsupported_on_gpu(layout, device), low_rank)
    _says(pallas.attention_unsupported_on_gpu(layout, device), attention)


@pytest.mark.parametrize(
    ("layout", "device", "low_rank", "attention"),
    [
        *((LLAMA, Tpu(kind), None, None) for kind in ("TPU v4", "TPU v5 lite", "TPU v6e", "TPU7x")),
        (
            SMALL,
            Tpu(),
            "a unit of 192 numbers is no multiple of 128 lanes",
            "head_dim 64 is no multiple of 128 lanes",
        ),
        (
            make_layout(widths={"q": (128, 128)}, page_tokens=8, head_dim=128, dtype="bfloat16"),
            Tpu(),
            None,
            "8 tokens of a page are no multiple of 16 rows",
        ),
        (HALF, Tpu(), "pages of float16", "pages of float16"),
        (dataclasses.replace(LLAMA, int8_kv=True), Tpu(), None, "keys and values are int8"),
        (None, Tpu(), "the page layout is not known", "the page layout is not known"),
        *((LLAMA, Tpu(kind), *[f"v4 or later.*not '{kind}'"] * 2) for kind in ("TPU v2", "TPU v3", "cpu")),
    ],
)
def test_pallas_on_a_tpu_says_why_not(
    layout: PageLayout | None, device: Tpu, low_rank: str | None, attention: str | None
) -> None:
    _says(pallas.low_rank_unsupported_on_tpu(layout, device), low_rank)
    _says(pallas.attention_unsupported_on_tpu(layout, device), attention)


@pytest.mark.parametrize(("device", "backend"), [(Gpu(), "triton"), (Tpu(), "tpu")])
def test_pallas_that_jax_does_not_have_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, device: Gpu | Tpu, backend: str
) -> None:
    monkeypatch.setattr(pallas, "_has_pallas", lambda _: False)
    asked = pallas.low_rank_unsupported_on_gpu if backend == "triton" else pallas.low_rank_unsupported_on_tpu
    assert asked(LLAMA, device) == f"this JAX has no jax.experimental.pallas.{backend}"


@pytest.mark.parametrize(("platform", "device"), [("gpu", Gpu()), ("cuda", Gpu()), ("tpu", Tpu())])
def test_choose_kernels_on_a_device_takes_pallas_and_leaves_the_pool_to_xla(
    monkeypatch: pytest.MonkeyPatch, platform: str, device: Gpu | Tpu
) -> None:
    monkeypatch.setattr(pallas.jax, "local_devices", lambda: [device])
    chosen = choose_kernels(platform, layout=LLAMA)
    assert [kernel.name for kernel in chosen.decode] == ["pallas"] * 4 + ["xla", "pallas"]
    assert chosen.decode.near_the_data() == chosen.prefill == XLA
    assert choose_kernels(platform).decode == choose_kernels(platform).prefill == XLA
    assert "no pallas: the page layout is not known" in describe_kernels(chosen, platform)
    assert "no pallas" not in describe_kernels(chosen, platform, layout=LLAMA)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("field", ["shrink", "expand", "delta", "attention"])
def test_tables_name_functions_that_are_there(platform: str, field: str) -> None:
    (kernel,) = DECODE[platform][field]
    with pytest.raises(TypeError, match=r"missing \d required positional arguments"):
        kernel.call()


def test_choosing_kernels_on_the_cpu_does_not_import_pallas() -> None:
    code = (
        "import sys, strategies; strategies.choose_kernels('cpu'); "
        "sys.exit(any('experimental.pallas' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _says(reason: str | None, want: str | None) -> None:
    assert (reason is None) == (want is None), reason
    assert want is None or re.search(want, reason or ""), reason
