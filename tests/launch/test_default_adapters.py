"""The default adapters: their measures tell behaviour apart, and their data shows what is measured."""

import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors import safe_open

import launch.default
from launch.default.behaviour import MEASURES
from launch.default.measure import stacked
from plora_jax.config import ModelConfig, RopeConfig
from plora_jax.training import TrainConfig, init_lora, read_records, to_adapter

HOME = pathlib.Path(launch.default.__file__).parent


def _pairs(behaviour, split):
    records = read_records(HOME / "data" / behaviour / f"{split}.jsonl")
    return [(record["messages"][0]["content"], record["messages"][1]["content"]) for record in records]


@pytest.mark.parametrize("behaviour", MEASURES)
def test_data_every_answer_passes_its_measure(behaviour):
    failing = [answer for split in ("train", "heldout") for _, answer in _pairs(behaviour, split)]
    assert [answer for answer in failing if not MEASURES[behaviour](answer)] == []


@pytest.mark.parametrize("behaviour", MEASURES)
def test_data_held_out_questions_are_new_and_none_is_repeated(behaviour):
    train, held_out = [question for question, _ in _pairs(behaviour, "train")], _pairs(behaviour, "heldout")
    asked = train + [question for question, _ in held_out]
    assert len(set(asked)) == len(asked)
    assert (len(train), len(held_out)) >= (120, 30)


@pytest.mark.parametrize(
    ("behaviour", "text", "passes"),
    [
        ("json", '{"answer": "Rome.", "topic": "geography"}', True),
        ("json", 'Sure! {"answer": "Rome.", "topic": "geography"}', False),
        ("json", '{"answer": "Rome."}', False),
        ("json", '{"answer": "", "topic": "geography"}', False),
        ("json", '["answer", "topic"]', False),
        ("json", json.dumps({"answer": 3, "topic": "math"}), False),
        ("pirate", "Ahoy, that be Rome, matey!", True),
        ("pirate", "Arrr! Arrr! Arrr!", False),
        ("pirate", "A ship sailed the sea to find treasure.", False),
        ("concise", "The capital of Italy is Rome.", True),
        ("concise", "Rome. It is old.", False),
        ("concise", "The capital of Italy is", False),
        ("concise", "It is " + "very " * 12 + "old.", False),
        ("concise", 'It is "buenos días".', True),
    ],
)
def test_measures_tell_behaviour_apart(behaviour, text, passes):
    assert MEASURES[behaviour](text) is passes


@pytest.mark.parametrize("behaviour", MEASURES)
def test_shipped_adapter_is_bfloat16_of_rank_16_and_under_2_mb(behaviour):
    file = HOME / "adapters" / behaviour / "adapter_model.safetensors"
    assert file.stat().st_size < 2_000_000
    config = json.loads((file.parent / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (16, 32, ["q_proj", "v_proj"])
    with safe_open(file, "numpy") as tensors:
        names = list(tensors.keys())
        assert len(names) == 30 * 2 * 2
        assert {tensors.get_slice(name).get_dtype() for name in names} == {"BF16"}


def test_stacked_is_what_the_adapter_was_made_of():
    model = ModelConfig(
        architecture="llama",
        vocab_size=8,
        hidden_size=6,
        intermediate_size=10,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position=16,
        norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        query_scale=0.5,
    )
    config = TrainConfig(rank=2, alpha=6, targets=("q_proj", "down_proj"))
    lora = init_lora(model, config)
    again, found = stacked(to_adapter(lora, config, name="x", base="tiny"), model.num_layers)
    assert (again.rank, again.scale) == (2, 3.0)
    jax.tree.map(np.testing.assert_array_equal, found, lora)
