"""What a hardware file says of points of the grid, what the planner chooses there, and how both are judged."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from launch.benchmarks.calibration_points import USUAL
from launch.benchmarks.cold_pages import ColdPages
from launch.benchmarks.mixed_program import mixed_program
from launch.benchmarks.prediction_report import Predicted, PredictedAttention
from launch.benchmarks.strategies import StrategiesCase
from launch.benchmarks.strategy_predictions import BUDGETS, Choice, Prediction, judge, predict
from launch.benchmarks.strategy_programs import AttentionPoint, LoraPoint, model_of
from memory_pool.hardware import HARDWARE
from plora_jax.checkpoints import load_config
from strategies.cost import lane_quantities, predicted_s
from strategies.kernel_tables import choose_kernels
from strategies.lanes import BASE
from strategies.low_rank import CHUNK_ROWS
from tests.launch.small_engine import LLAMA
from tests.strategies.cost.models import STRATEGIES, all_ranks, model, some_calibration

SHAPE = model("SmolLM2-135M-Instruct")
CPU = dataclasses.replace(HARDWARE["cpu"], calibration=some_calibration())
POINT = LoraPoint(16, 4, 8)


def test_prediction_is_the_sum_of_terms_and_the_plans_is_near():
    found = predict(POINT, SHAPE, CPU)
    for name in STRATEGIES:
        quantities = lane_quantities(SHAPE, all_ranks(SHAPE, [16] * 8), np.full(8, 4.0), strategy=name, rows=32)
        assert found.step_s[name] == predicted_s(some_calibration(), quantities)
        # Chunks of `fetch`: two full ones, to which the plan problem adds what multiples of 16 leave empty on average.
        chunks = 2.375 / 2 if name == "fetch" else 1.0
        assert found.planned_s[name] / found.step_s[name] == pytest.approx(chunks, rel=0.06)


def test_choice_is_the_fastest_that_fits():
    cheap = {f"near_{what}__{term}": 1e-16 for what in ("delta", "shrink") for term in ("byte_s", "flop_s")}
    near = dataclasses.replace(CPU, calibration=some_calibration(**cheap, near_delta__again_byte_s=0.0))
    choices = {c.budget: c for c in predict(POINT, SHAPE, near).choices}
    assert tuple(choices) == BUDGETS
    assert choices[BUDGETS[0]].fitting == STRATEGIES
    assert choices[BUDGETS[1]].fitting == ("fetch", "near_data")
    assert all(sum(choice.adapters.values()) == 8 for choice in choices.values())
    slow = {f"near_{what}__byte_s": 1e-7 for what in ("delta", "shrink", "rows")}
    far = dataclasses.replace(CPU, calibration=some_calibration(**slow))
    assert predict(POINT, SHAPE, far).choices[0].adapters == {"resident": 8}


def test_prediction_needs_a_calibration():
    with pytest.raises(ValueError, match=r"hardware paper has no calibration: measure it with python -m launch\.cali"):
        predict(POINT, SHAPE, HARDWARE["paper"])


def some_prediction(factor: float) -> Prediction:
    """Of what takes 1, 8, 2 and 4 s."""
    step_s: dict[str, float] = dict(zip(STRATEGIES, (1.0 * factor, 8.0 * factor, 2.0, 4.0), strict=True))
    mix = Choice(BUDGETS[1], {"near_data": 3, "split": 5}, ("fetch", "near_data"))
    return Prediction(step_s, step_s, (Choice(BUDGETS[0], {"near_data": 8}, STRATEGIES), mix))


def some_measured(mix_s: float) -> dict[str, float]:
    return {**dict(zip(STRATEGIES, (1.0, 8.0, 2.0, 4.0), strict=True)), "3 near_data + 5 split": mix_s}


def test_verdict_compares_with_what_was_measured():
    verdict = judge([some_prediction(1.1), some_prediction(0.7)], [some_measured(2.2), some_measured(1.8)])
    assert verdict.errors["resident"] == pytest.approx([0.1, -0.3])
    assert verdict.errors["split"] == [0.0, 0.0]
    assert verdict.regrets[BUDGETS[0]] == [2.0, 2.0]
    assert verdict.regrets[BUDGETS[1]] == pytest.approx([1.1, 0.9])


def test_report_has_errors_choices_and_regret():
    points = [POINT, LoraPoint(8, 1, 8)]
    predictions, measured = [some_prediction(1.1), some_prediction(0.7)], [some_measured(2.2), some_measured(1.8)]
    attention = [
        PredictedAttention(AttentionPoint(512, 32), 0.011, 0.010),
        PredictedAttention(AttentionPoint(4096, 32), 0.07, 0.1),
    ]
    report = Predicted("x.json", points, predictions, measured, attention)
    lines = [" ".join(line.split()) for line in report.as_lines()]
    for wanted in (
        "predicted by x.json: ms, and the error",
        "16 4 8 1100.00 +10% 8800.00 +10% 2000.00 +0% 4000.00 +0%",
        "MAPE 20.0% 20.0% 0.0% 0.0%",
        "MAPE, as planned 20.0% 20.0% 0.0% 0.0%",
        "512 32 11.00 +10%",
        "4096 32 70.00 -30%",
        "MAPE 20.0%",
        "8 1 8 near_data 2.00 3 near_data + 5 split 0.90",
        "regret, mean 2.000 1.000",
        "regret, worst 2.000 1.100",
    ):
        assert wanted in lines, lines
    got = report.as_json()
    assert got["mape"]["fetch"] == pytest.approx(0.2)
    assert got["attention_mape"] == pytest.approx(0.2)
    assert got["regret"][BUDGETS[1]]["worst"] == pytest.approx(1.1)
    assert got["points"][0]["choices"][1]["best_fixed_s"] == 2.0


def test_calibration_is_measured_elsewhere_than_the_grid_and_around_it():
    grid, measured = StrategiesCase().lora_points, [*USUAL.lora, *USUAL.without_fetch]
    assert not set(grid) & set(measured)
    for axis in LoraPoint._fields:
        values = [getattr(point, axis) for point in measured]
        wanted = [getattr(point, axis) for point in grid]
        assert min(values) <= min(wanted)
        assert max(values) >= max(wanted)
    assert all(point.rank * point.adapters % CHUNK_ROWS == 0 for point in USUAL.lora)
    contexts = StrategiesCase().numbers("contexts")
    assert not {point.context for point in (*USUAL.attention, *USUAL.more_attention)} & set(contexts)


def test_mixed_program_gives_every_token_to_one_strategy():
    config = load_config(LLAMA)
    small = model_of(config, np.dtype("float32"))
    cold = ColdPages(small.layout, num_bytes=1 << 20)
    point, adapters = LoraPoint(4, 2, 5), {"resident": 2, "near_data": 3}
    program = mixed_program("mix", adapters, point, model=small, cold=cold, kernels=choose_kernels().decode)
    arguments = program.arguments()
    lanes = arguments[2]
    assert {name: int(lane.count) for name, lane in lanes.items()} == adapters
    owners = {name: lane.owner for name, lane in lanes.items()}
    assert owners["resident"].tolist() == [0, 1, BASE, BASE, BASE, 0, 1, BASE, BASE, BASE]
    assert owners["near_data"].tolist() == [BASE, BASE, 0, 1, 2, BASE, BASE, 0, 1, 2]
    assert np.isfinite(np.asarray(program.call(*arguments))).all()
    assert program.data_bytes == 5 * 4 * config.num_layers * 4 * sum(map(sum, config.projections.values()))
