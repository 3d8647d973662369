"""Adapters made in memory for measurements: as PEFT starts them, but with a B that changes what the model says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from memory_pool.layout import PageLayout
from plora_jax.adapters import Adapter
from plora_jax.adapters.adapter import LoraMatrices, ModuleId
from plora_jax.config import ModelConfig

B_STD = 0.02
ALL_LINEAR = "all-linear"


def synthetic_adapter(index: int, *, rank: int, targets: Sequence[str], config: ModelConfig) -> Adapter:
    """One adapter; the same arguments give the same matrices.

    A is uniform within 1/sqrt(I), which is PEFT's kaiming_uniform with a = sqrt(5); B is normal with standard deviation
    0.02; alpha is twice the rank. numpy draws the numbers, so they are not those that torch would draw from the seed.

    Args:
        index: seed, and part of the name: "a0007".
        rank: R.
        targets: projections, in every layer.
        config: of the base model.

    Returns:
        The adapter, matrices in float32.
    """
    rng = np.random.default_rng(index)
    modules: dict[ModuleId, LoraMatrices] = {}
    for layer in range(config.num_layers):
        for name in targets:
            width_out, width_in = config.projections[name]
            a = (2 * rng.random((rank, width_in), np.float32) - 1) / np.float32(width_in**0.5)
            b = rng.standard_normal((width_out, rank), np.float32) * np.float32(B_STD)
            modules[ModuleId(layer, name)] = LoraMatrices(a, b, scale=2.0)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    return Adapter(adapter_name(index), modules, fields)


def adapter_name(index: int) -> str:
    """Name of a synthetic adapter: "a0007"."""
    return f"a{index:04d}"


def needed_adapter_mb(ranks: Sequence[Mapping[str, int]], layout: PageLayout) -> int:
    """Device memory that holds A and B of all adapters at once, in MB of 2^20 bytes of each device, rounded up.

    Args:
        ranks: of each adapter, by projection.
        layout: of pages; one more of them stays empty.
    """
    pages = 1
    for by_name in ranks:
        of_stream = [by_name.get(name, 0) for name in layout.names]
        pages += layout.a_pages(of_stream) + layout.b_pages(of_stream)
    return -(-pages * layout.page_bytes // 2**20)
