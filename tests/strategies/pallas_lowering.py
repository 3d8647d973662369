"""Programs of two models, lowered for machines that are not there; for the tests of the Pallas kernels.

text = lowered("tpu", kernel, *shapes)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh

from memory_pool.layout import PageLayout
from memory_pool.raw import raw_dtype
from strategies.lanes import AttentionLane, Stripe
from tests.strategies.pages_for_tests import make_layout


class Sizes(NamedTuple):
    """A model's sizes: D, F, N, K, H and L."""

    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


MODELS: Mapping[str, Sizes] = {
    "smollm2-135m": Sizes(576, 1536, 9, 3, 64, 30),
    "llama-8b": Sizes(4096, 14336, 32, 8, 128, 32),
}
DEVICES = {"cuda": ("NVIDIA H100 80GB HBM3", "gpu"), "tpu": ("TPU v5 lite", "tpu")}
KERNEL_CALL = {"cuda": "@__gpu$xla.gpu.triton", "tpu": "@tpu_custom_call"}
"""How a kernel appears in a lowered program."""
PAGES, ADAPTERS, RANK, TABLE = 64, 8, 64, 64


def layout_of(model: str, dtype: str) -> PageLayout:
    size = MODELS[model]
    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    widths = {
        "q": (q, size.width),
        "k": (kv, size.width),
        "v": (kv, size.width),
        "o": (size.width, q),
        "gate": (size.ffn, size.width),
        "up": (size.ffn, size.width),
        "down": (size.width, size.ffn),
    }
    return make_layout(
        widths=widths,
        num_layers=size.layers,
        page_tokens=16,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        dtype=dtype,
    )


def shape(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def pages_of(layout: PageLayout) -> jax.ShapeDtypeStruct:
    return shape(raw_dtype(layout.dtype), layout.num_layers, PAGES, layout.page_width)


def stripe_of(layout: PageLayout, tokens: int) -> Stripe:
    projections = len(layout.names)
    ranks = [RANK] * projections
    return Stripe(
        shape(np.int32, tokens),
        shape(np.int32),
        shape(np.int32, ADAPTERS, projections),
        shape(np.float32, ADAPTERS, layout.num_layers, projections),
        shape(np.int32, ADAPTERS, layout.a_pages(ranks)),
        shape(np.int32, ADAPTERS, layout.b_pages(ranks)),
    )


def attention_of(model: str, dtype: str, queries: int) -> tuple[Any, ...]:
    """q, pages, layer, lane and window."""
    size, layout, groups = MODELS[model], layout_of(model, dtype), 8
    q = shape(layout.dtype, groups, size.kv_heads, queries * size.heads // size.kv_heads, size.head_dim)
    lane = AttentionLane(
        shape(np.int32, groups, TABLE), shape(np.int32, groups, queries), shape(np.int32), shape(np.int32)
    )
    return q, pages_of(layout), shape(np.int32), lane, shape(np.int32)


def lowered(platform: str, function: Callable[..., Any], *shapes: Any) -> str:
    """The program's text; a later JAX asks which device it is for."""
    kind, of_device = DEVICES[platform]
    mesh: Any = contextlib.nullcontext()
    if jax.__version_info__ >= (0, 11):
        device = AbstractDevice(device_kind=kind, num_cores=1, platform=of_device)
        mesh = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with mesh:
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
