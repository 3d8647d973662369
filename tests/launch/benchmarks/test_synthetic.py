"""Synthetic adapters: how they are drawn, and what memory they need."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from launch.benchmarks.case import ThroughputCase
from launch.benchmarks.synthetic import needed_adapter_mb, rank_slot_bytes, synthetic_adapter
from memory_pool import AdapterStore, Ledger, one_device_mesh
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


def test_peers_case_needs_587_mb_for_its_adapters_on_the_default_model():
    # SmolLM2-135M: 30 layers, D 576, F 1536, 9 query heads and 3 KV heads of 64.
    shapes = {"q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576)}
    shapes |= {"gate": (1536, 576), "up": (1536, 576), "down": (576, 1536)}
    slot_bytes = rank_slot_bytes(shapes, 30, itemsize=2)
    ranks = ThroughputCase(adapters=32).ranks
    assert (len(ranks), sum(ranks), ranks[:5]) == (32, 960, [8, 16, 32, 64, 8])
    assert slot_bytes == pytest.approx(610e3, rel=0.01)
    megabytes = needed_adapter_mb(ranks, slot_bytes)
    assert megabytes * 2**20 >= 961 * slot_bytes > (megabytes - 1) * 2**20
    assert megabytes * 2**20 == pytest.approx(587e6, rel=0.005)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rank_slot_bytes_are_those_of_the_store(dtype):
    config, kind = load_config(LLAMA), np.dtype(dtype)
    options = {"dtype": kind, "mesh": one_device_mesh(), "device_bytes": 2**20, "ledger": Ledger()}
    store = AdapterStore(config.projections, config.num_layers, **options)
    assert store.slot_bytes == rank_slot_bytes(config.projections, config.num_layers, itemsize=kind.itemsize)
