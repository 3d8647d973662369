"""Engines whose memories are counted in pages, and adapters made in memory to fill them."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np

from memory_pool.layout import PageLayout
from plora_jax.adapters import Adapter
from plora_jax.adapters.adapter import LoraMatrices, ModuleId
from plora_jax.config import ModelConfig
from plora_jax.engine import build
from plora_jax.engine.build import Deployment
from tests.plora_jax.conformance import deploy


def deploy_pages(model: str, *, pool: int, adapters: int, kv: int, **options) -> Deployment:
    """A deployment of a pack model whose memories hold exactly so many pages that can be given out.

    Args:
        model: of the conformance pack.
        pool: pages of each pool device.
        adapters: pages of the device budget for adapters.
        kv: KV pages of the device.
        options: of the engine.
    """
    sizes = build._Sizes(pool_pages=pool + 1, adapter_pages=adapters + 1, kv_pages=kv + 1)
    with mock.patch.object(build, "_sizes", return_value=sizes):
        return deploy(model, **options)


def make_adapter(
    name: str, *, seed: int, rank: int, config: ModelConfig, targets: Sequence[str] = ("q_proj", "v_proj"), std=0.05
) -> Adapter:
    """An adapter in every layer: A uniform within 1 / sqrt(I), B normal with deviation `std`, scale 2; float32."""
    rng = np.random.default_rng(seed)
    modules = {}
    for layer in range(config.num_layers):
        for target in targets:
            width_out, width_in = config.projections[target]
            a = (2 * rng.random((rank, width_in), np.float32) - 1) / np.float32(width_in**0.5)
            b = rng.standard_normal((width_out, rank), np.float32) * np.float32(std)
            modules[ModuleId(layer, target)] = LoraMatrices(a, b, scale=2.0)
    return Adapter(name, modules, {"r": rank, "target_modules": list(targets)})


def true_pages(rank: int, targets: Sequence[str], layout: PageLayout, config: ModelConfig) -> tuple[int, int]:
    """Pages of A and of B of an adapter: its numbers in one layer over those of a page, rounded up."""
    widths = [config.projections[target] for target in targets]
    a, b = (rank * sum(width[side] for width in widths) for side in (1, 0))
    return -(-a // layout.page_width), -(-b // layout.page_width)
