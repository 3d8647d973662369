"""The published formulas and the values that they are checked with (arXiv 2608.05483)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memory_pool.hardware import HARDWARE
from strategies.cost import Matrix, ModelShape, PhaseShape, cost_model, matrix_times, plan_problem, weight_read_floor
from strategies.cost.paper import pool_times
from tests.strategies.cost.models import (
    CHECKED,
    NO_KV,
    PAPER,
    PAPER_RANKS,
    all_ranks,
    alone_s,
    link_of,
    model,
    one_matrix,
    step_s,
)


def test_published_check_values_come_out():
    """One token, rank 16, 4096 x 4096, A100 PCIe, 128 GB/s, 200 ns, 4 devices of 2 TFLOP/s."""
    found = matrix_times(1, 16, 4096, 4096, hardware=CHECKED) * 1e9
    assert found == pytest.approx([135.47, 2248.0, 360.77, 280.63], abs=0.01)


def test_many_tokens_are_bound_by_compute():
    resident, fetch, near_data, split = matrix_times(1000, 16, 4096, 4096, hardware=CHECKED)
    flops = 4 * 1000 * 4096 * 16
    assert resident == pytest.approx(flops / 312e12)
    assert fetch == pytest.approx(2248e-9)
    assert near_data == pytest.approx(200e-9 + 4 * 4096 * 1000 / 128e9 + flops / 8e12)
    assert split == pytest.approx(200e-9 + 2 * 1000 * (4096 + 16) / 128e9 + flops / 2 / 8e12)


def test_split_takes_the_longer_of_its_two_sides():
    instant = dataclasses.replace(
        CHECKED,
        link=dataclasses.replace(link_of(1e9), latency_s=0.0),
        pool_device=dataclasses.replace(CHECKED.pool_device, near_flops_per_s=1e21),
    )
    assert matrix_times(1, 16, 4096, 4096, hardware=instant)[3] == pytest.approx(16 * 4096 * 2 / 1935e9)
    assert matrix_times(1000, 16, 4096, 4096, hardware=instant)[3] == pytest.approx(2 * 1000 * 4096 * 16 / 312e12)


def test_int8_adapters_take_half_the_time_to_stream_and_to_read_and_activations_as_long():
    at = (np.array(1), np.array(64), np.array(4096), np.array(4096))
    wide, narrow = (pool_times(*at, hardware=CHECKED, lora_item_bytes=item) for item in (None, 1))
    latency = CHECKED.link.latency_s
    assert narrow[0][1] - latency == pytest.approx((wide[0][1] - latency) / 2), "fetch"
    assert narrow[0][2:].tolist() == wide[0][2:].tolist(), "near_data, split"
    assert narrow[1][[0, 3]] == pytest.approx(wide[1][[0, 3]] / 2), "resident, expand of split"
    assert narrow[1][1] == wide[1][1], "products of fetch"


def test_times_are_vectorised_and_nothing_costs_nothing():
    found = matrix_times(np.array([[0], [1]]), np.array([0, 16, 64]), 4096, 4096, hardware=CHECKED)
    assert found.shape == (4, 2, 3)
    assert not found[:, 0].any()
    assert not found[:, :, 0].any()
    assert found[:, 1, 1] == pytest.approx(matrix_times(1, 16, 4096, 4096, hardware=CHECKED))


def test_weight_read_floors_of_the_paper():
    assert weight_read_floor(7e9, 32, hardware=PAPER) == pytest.approx(7657, abs=0.5)
    assert weight_read_floor(13e9, 32, hardware=PAPER) == pytest.approx(4123, abs=0.5)


def test_plain_read_of_256_kb_takes_2369_ns():
    assert PAPER.plain_read_s(256 * 1024) == pytest.approx(2369e-9, abs=0.5e-9)


def test_thousand_adapters_on_split_take_91_gb_of_the_device():
    """Mean rank 49.6, 32 layers of 7 matrices of 4096 x r."""
    matrices = tuple(Matrix(f"m{i}", 4096, 4096) for i in range(7))
    phases = (PhaseShape(name="all", layers=32, matrices=matrices), PhaseShape(name="attention", layers=32))
    shape = ModelShape(name="square", phases=phases, attention=model("Llama-2-7b").attention)
    features = all_ranks(shape, np.repeat(PAPER_RANKS, 200))
    problem = plan_problem(cost_model(shape, PAPER, "paper"), features, NO_KV, tokens=np.zeros(1000), budget_bytes=80e9)
    assert problem.device_bytes[:, 3].sum() == pytest.approx(91.0e9, rel=1e-3)
    assert problem.device_bytes[:, 0].sum() == pytest.approx(2 * problem.device_bytes[:, 3].sum())
    assert not problem.device_bytes[:, 1:3].any()


def test_plan_problem_of_one_adapter_gives_the_formulas():
    assert alone_s(cost_model(one_matrix(), CHECKED, "paper")) * 1e9 == pytest.approx(
        [135.47, 2248.0, 360.77, 280.63], abs=0.01
    )


def test_plan_problem_adds_matrices_of_all_layers():
    shape = model("Llama-3-8B")
    features = all_ranks(shape, [16])
    cost = cost_model(shape, PAPER, "paper")
    problem = plan_problem(cost, features, NO_KV, tokens=np.ones(1), budget_bytes=1e12)
    want = sum(matrix_times(1, 16, m.inputs, m.outputs, hardware=PAPER)[1] for m in shape.matrices) * 32
    assert not problem.base_load_s.any()  # A step without tokens of the base.
    assert step_s(problem, 1) == pytest.approx(want)


def test_without_near_data_compute_its_strategies_are_not_offered():
    shape, hardware = model("Llama-2-7b"), HARDWARE["gh200"]
    for mode in ("paper", "ideal"):
        problem = plan_problem(
            cost_model(shape, hardware, mode), all_ranks(shape, [8]), NO_KV, tokens=np.ones(1), budget_bytes=1e12
        )
        assert problem.allowed.tolist() == [[True, True, False, False]]
        assert problem.kv.strategies == ("local",)
        assert np.isfinite(problem.load_s).all()
