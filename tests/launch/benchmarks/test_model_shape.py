"""Shapes of base models for the cost model, from their configurations."""

from __future__ import annotations

import pathlib

import pytest

from launch.benchmarks.model_shape import shape_of_config
from plora_jax.checkpoints import load_config

MODELS = pathlib.Path(__file__).parents[2] / "data" / "conformance" / "models"


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_shape_has_the_matrices_of_the_model(name):
    config = load_config(MODELS / name)
    shape = shape_of_config(config, name=name, item_bytes=4)
    assert {m.name: (m.outputs, m.inputs) for m in shape.matrices} == dict(config.projections)
    assert shape.attention.layers == config.num_layers
    assert shape.item_bytes == 4
    expected = config.num_layers * sum(o * i for o, i in config.projections.values())
    assert shape.base_numbers == expected + config.vocab_size * config.hidden_size


def test_shape_of_experts_has_adapters_on_attention_only():
    config = load_config(MODELS / "mixtral")
    shape = shape_of_config(config, name="mixtral", item_bytes=4)
    assert set(shape.names) == set(config.projections)
    assert max(phase.experts for phase in shape.phases) == config.num_experts
