"""Measured costs as a plan problem: held against the exact sum of terms for the same lane."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memory_pool.calibration import TERMS
from memory_pool.hardware import HARDWARE
from strategies.cost import (
    KvLoad,
    attention_quantities,
    cost_model,
    decoding,
    lane_quantities,
    plan_problem,
    predicted_s,
)
from strategies.cost.cost_model import StepSize
from strategies.planner import RESOURCES, STRIPED
from tests.strategies.cost.models import NO_KV, PAPER, STRATEGIES, all_ranks, model, some_calibration, step_s

SHAPE = model("SmolLM2-135M-Instruct")
CALIBRATION = some_calibration()
CPU = dataclasses.replace(HARDWARE["cpu"], calibration=CALIBRATION)


def base_s(problem):
    return problem.base_load_s[:, 0].sum()


def test_grid_point_of_the_strategies_benchmark_is_predicted_exactly():
    """Ranks that fill chunks: nothing is rounded, so the problem's linear costs are the lane's, but the part of a chunk
    that multiples of the rank leave empty on average."""
    tokens = np.full(32, 4.0)
    for rank in (8, 16, 64):
        features = all_ranks(SHAPE, [rank] * 32)
        kv = KvLoad(contexts=np.full(32, 4), queries=np.full(32, 4))
        problem = plan_problem(cost_model(SHAPE, CPU, "calibrated"), features, kv, tokens=tokens, budget_bytes=1e12)
        without = plan_problem(
            cost_model(SHAPE, CPU, "calibrated"),
            features,
            kv,
            tokens=tokens,
            budget_bytes=1e12,
            active=np.zeros(32, bool),
        )
        common = base_s(problem) + problem.kv.device_load_s.sum()
        for s, strategy in enumerate(STRATEGIES):
            exact = predicted_s(CALIBRATION, lane_quantities(SHAPE, features, tokens, strategy=strategy, rows=128))
            found = step_s(problem, s, kv_fraction=1.0) - common
            if strategy == "fetch":
                assert found - exact == pytest.approx((0.5 - rank / 128) / (rank * 32 / 64) * exact, rel=0.05)
            else:
                assert found == pytest.approx(exact, rel=1e-9)
            assert step_s(without, s, kv_fraction=1.0) < step_s(problem, s, kv_fraction=1.0)


@pytest.mark.parametrize("attention", ["local", "distributed"])
def test_attention_in_the_pool_is_predicted_exactly(attention):
    """Contexts of whole rounds; half a round is what rounding costs on average."""
    kv = decoding(np.full(32, 512))
    problem = plan_problem(
        cost_model(SHAPE, CPU, "calibrated"), all_ranks(SHAPE, [8]), kv, tokens=np.zeros(1), budget_bytes=1e12
    )
    exact = predicted_s(CALIBRATION, attention_quantities(SHAPE, kv, strategy=attention))
    found = step_s(problem, 0, attention=attention) - base_s(problem)
    assert found == pytest.approx(exact, rel=0.04 if attention == "local" else 1e-9)
    on_device = predicted_s(CALIBRATION, attention_quantities(SHAPE, kv, strategy="device"))
    call = 30 * CALIBRATION.device_attention.call_s
    assert step_s(problem, 0, kv_fraction=1.0) - base_s(problem) + call == pytest.approx(on_device)


def test_functions_load_their_own_side():
    tokens = np.array([2.0])
    problem = plan_problem(
        cost_model(SHAPE, dataclasses.replace(PAPER, calibration=CALIBRATION), "calibrated"),
        all_ranks(SHAPE, [16]),
        NO_KV,
        tokens=tokens,
        budget_bytes=1e12,
        home=np.array([2]),
    )
    assert problem.groups == (("device_flops", "device_memory"), RESOURCES[2:])
    loaded = {
        strategy: {name for r, name in enumerate(RESOURCES) if problem.load_s[0, s, ..., r].any()}
        for s, strategy in enumerate(STRATEGIES)
    }
    assert loaded == {
        "resident": {"device_flops", "device_memory"},
        "fetch": set(RESOURCES) - {"to_pool"},
        "near_data": {"near_flops", "near_memory"},
        "split": {"near_flops", "near_memory"},
    }
    assert problem.serial_s[0, 3, 0] > 0
    assert not problem.serial_s[0, :3].any()
    assert problem.fixed_load_s[2, 0, 4] > 0


def test_striped_adapter_gives_each_pool_device_its_part():
    hardware = dataclasses.replace(PAPER, calibration=CALIBRATION)
    problems = [
        plan_problem(
            cost_model(SHAPE, hardware, "calibrated"),
            all_ranks(SHAPE, [16]),
            NO_KV,
            tokens=np.ones(1),
            budget_bytes=1e12,
            home=np.array([home]),
        )
        for home in (0, STRIPED)
    ]
    assert problems[1].load_s[..., 2:] == pytest.approx(problems[0].load_s[..., 2:] / 4)
    assert problems[1].load_s[..., :2] == pytest.approx(problems[0].load_s[..., :2])


def test_base_is_the_measured_step_between_its_points():
    points = {SHAPE.name: ((8.0, 0.010), (32.0, 0.022))}
    cost = cost_model(
        SHAPE, dataclasses.replace(CPU, calibration=dataclasses.replace(CALIBRATION, base_steps=points)), "calibrated"
    )
    call = 30 * CALIBRATION.device_attention.call_s
    for rows, seconds in ((4, 0.010), (8, 0.010), (20, 0.016), (500, 0.022)):
        base = cost.base(StepSize(tokens=rows, rows=rows, sampled=rows, max_rank=8))
        assert base.sum() == pytest.approx(seconds + call)
    assert (base[[0, 2, 3, 4, 5]].sum(axis=1) > 0).all()


def test_base_of_another_model_is_the_measured_products():
    cost = cost_model(SHAPE, CPU, "calibrated")
    size = StepSize(tokens=5, rows=8, sampled=3, max_rank=8)
    free = some_calibration(**{f"matmul__{term}": 0.0 for term in TERMS})
    without = cost_model(SHAPE, dataclasses.replace(CPU, calibration=free), "calibrated").base(size)
    head = (cost.base(size) - without)[-1].sum()
    numbers, matmul = 49152 * 576, CALIBRATION.matmul
    assert head == pytest.approx(matmul.call_s + numbers * 2 * matmul.byte_s + 2 * 3 * numbers * matmul.flop_s)
    lanes = CALIBRATION.lanes
    assert without[2].sum() == pytest.approx(4 * 30 * (lanes.call_s + 8 * 576 * 4 * lanes.operand_byte_s))


@pytest.mark.parametrize("points", [{}, {SHAPE.name: ((8.0, 0.010), (32.0, 0.022))}], ids=["products", "measured"])
def test_int8_weights_take_as_much_less_as_their_bytes(points):
    hardware = dataclasses.replace(CPU, calibration=dataclasses.replace(CALIBRATION, base_steps=points))
    size = StepSize(tokens=16, rows=16, sampled=16, max_rank=8)
    wide, narrow = (
        cost_model(dataclasses.replace(SHAPE, weight_bytes=each), hardware, "calibrated").base(size)
        for each in (None, 1)
    )
    assert (wide - narrow).sum() == pytest.approx(SHAPE.base_numbers * CALIBRATION.matmul.byte_s)


def test_mode_without_a_calibration_says_what_to_do():
    with pytest.raises(
        ValueError, match=r"hardware paper has no calibration: measure it with python -m launch\.calibrate"
    ):
        cost_model(SHAPE, PAPER, "calibrated")
    with pytest.raises(ValueError, match="mode 'real' of the cost model is unknown: choose paper, ideal, calibrated"):
        cost_model(SHAPE, PAPER, "real")
