"""The default adapters: their measures tell behaviour apart, and their data shows what is measured."""

import json
import pathlib

import pytest

import launch.default
from launch.default.behaviour import MEASURES
from plora_jax.training import read_records

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
