"""Synthetic adapters: how they are drawn, and what memory they need."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from launch.benchmarks.case import ThroughputCase
from launch.benchmarks.synthetic import needed_adapter_mb, synthetic_adapter
from memory_pool.layout import PageLayout, whole
from plora_jax.adapters.adapter import ModuleId
from plora_jax.checkpoints import load_config

LLAMA = pathlib.Path(__file__).parents[2] / "data" / "conformance" / "models" / "llama"


def test_synthetic_adapter_is_as_peft_starts_one_but_with_a_normal_b():
    config = load_config(LLAMA)
    adapter = synthetic_adapter(3, rank=64, targets=["q_proj", "down_proj"], config=config)
    assert adapter.name == "a0003"
    assert set(adapter.modules) == {
        ModuleId(layer, name) for layer in range(config.num_layers) for name in ("q_proj", "down_proj")
    }
    for (_, name), matrices in adapter.modules.items():
        width_out, width_in = config.projections[name]
        assert (matrices.a.shape, matrices.b.shape, matrices.scale) == ((64, width_in), (width_out, 64), 2.0)
        bound = width_in**-0.5
        # Uniform: within the bound, reaching near it, with a variance of a third of its square.
        assert 0.95 * bound < np.abs(matrices.a).max() <= bound
        assert matrices.a.std() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert matrices.b.std() == pytest.approx(0.02, rel=0.05)
        assert abs(matrices.b.mean()) < 0.002
    assert (adapter.config["r"], adapter.config["lora_alpha"]) == (64, 128)


def test_synthetic_adapter_is_a_function_of_its_index():
    config = load_config(LLAMA)
    one, same, other = (synthetic_adapter(i, rank=8, targets=["v_proj"], config=config) for i in (1, 1, 2))
    key = ModuleId(0, "v_proj")
    np.testing.assert_array_equal(one.modules[key].a, same.modules[key].a)
    np.testing.assert_array_equal(one.modules[key].b, same.modules[key].b)
    assert not np.array_equal(one.modules[key].b, other.modules[key].b)
    assert not np.array_equal(one.modules[key].b, one.modules[ModuleId(1, "v_proj")].b)


# SmolLM2-135M: 30 layers, D 576, F 1536, 9 query heads and 3 KV heads of 64.
SMOLLM2 = {"q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576)}
SMOLLM2 |= {"gate": (1536, 576), "up": (1536, 576), "down": (576, 1536)}


def layout(dtype: str) -> PageLayout:
    cuts = {name: whole(size) for name, size in SMOLLM2.items()}
    return PageLayout(num_layers=30, page_tokens=16, kv_heads=3, head_dim=64, projections=cuts, dtype=np.dtype(dtype))


def test_peers_case_needs_586_mb_and_the_ends_of_pages_on_the_default_model():
    ranks = ThroughputCase(adapters=32).ranks
    assert (len(ranks), sum(ranks), ranks[:5]) == (32, 960, [8, 16, 32, 64, 8])
    matrices = sum(ranks) * 30 * sum(map(sum, SMOLLM2.values())) * 2
    assert matrices == pytest.approx(585e6, rel=0.005)
    needed = needed_adapter_mb([dict.fromkeys(SMOLLM2, rank) for rank in ranks], layout("float16")) * 2**20
    # A page is 369 kB; an adapter's A and B each end within one.
    page = 30 * 2 * 3 * 16 * 64 * 2
    assert matrices < needed < matrices + (2 * 32 + 1) * page + 2**20


def test_memory_of_adapters_is_that_of_their_pages():
    shape = layout("float32")
    one = {"q": 64, "down": 1}
    pages = -(-(64 * 576 + 1536) // shape.page_width) - (-(64 * 576 + 576) // shape.page_width) + 1
    assert needed_adapter_mb([one], shape) == -(-pages * shape.page_bytes // 2**20)
    assert needed_adapter_mb([], shape) == 1
