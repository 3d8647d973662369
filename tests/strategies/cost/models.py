"""Models, machines and steps that the tests of the cost model share."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import numpy as np

from memory_pool.calibration import COEFFICIENTS, calibration_of
from memory_pool.hardware import DEVICES, HARDWARE, parse_link
from strategies.cost import (
    AdapterFeatures,
    CostModel,
    KvLoad,
    Matrix,
    ModelShape,
    PhaseShape,
    adapter_features,
    decoding,
    plan_problem,
    shape_of_dims,
)
from strategies.planner import PlanProblem, evaluate

DIMS = pathlib.Path(__file__).parents[2] / "data" / "cost" / "model_dims.json"
PAPER = HARDWARE["paper"]
CHECKED = dataclasses.replace(PAPER, device=DEVICES["a100-pcie"])
"""The machine of the published check values."""
PAPER_RANKS = np.array([8, 16, 32, 64, 128])
NO_KV = KvLoad(contexts=np.zeros(0, int), queries=np.zeros(0, int))
STRATEGIES = ("resident", "fetch", "near_data", "split")


@functools.cache
def dims():
    return {row["name"]: row for row in json.loads(DIMS.read_text())}


def model(name: str, **options) -> ModelShape:
    return shape_of_dims(dims()[name], **options)


def one_matrix(inputs: int = 4096, outputs: int = 4096) -> ModelShape:
    """A model of one LoRA matrix without base weights, as the published check values have it."""
    phases = (
        PhaseShape(name="q", layers=1, matrices=(Matrix("q_proj", inputs, outputs),)),
        PhaseShape(name="attention", layers=1),
    )
    return ModelShape(name="one matrix", phases=phases, attention=model("Llama-2-7b").attention)


def all_ranks(shape: ModelShape, ranks) -> AdapterFeatures:
    """Adapters of one rank on all projections."""
    return adapter_features(shape, np.repeat(np.asarray(ranks)[:, None], len(shape.names), axis=1))


def step_s(problem: PlanProblem, strategy: int, *, attention: str = "distributed", kv_fraction: float = 0.0) -> float:
    """Seconds of a step with one strategy for all."""
    return evaluate(problem, np.full(problem.num_adapters, strategy), attention, kv_fraction).step_s


def alone_s(cost: CostModel, *, rank: int = 16, tokens: float = 1, home: int = 0) -> np.ndarray:
    """[S] seconds of one adapter and nothing else."""
    problem = plan_problem(
        cost, all_ranks(cost.shape, [rank]), NO_KV, tokens=np.array([tokens]), budget_bytes=1e12, home=np.array([home])
    )
    return np.array([step_s(problem, s) for s in range(len(STRATEGIES))])


def snake(ranks: np.ndarray, pool_devices: int) -> np.ndarray:
    """Homes that share out ranks and adapters alike: by rank, there and back."""
    order, at = np.argsort(-ranks, kind="stable"), np.arange(len(ranks))
    homes = np.empty(len(ranks), int)
    homes[order] = np.where(at // pool_devices % 2, pool_devices - 1 - at % pool_devices, at % pool_devices)
    return homes


def link_of(gb_per_s: float):
    return parse_link(f"{gb_per_s}:200")


def contexts(low: int, high: int, count: int = 32) -> KvLoad:
    return decoding(np.linspace(low, high, count).round().astype(int))


def some_calibration(**changed: float):
    """Every coefficient another number, so that a swapped one shows."""
    rng = np.random.default_rng(7)
    scale = {"call_s": 1e-5, "piece_s": 1e-6}
    coefficients = {n: float(rng.uniform(1, 2)) * scale.get(n.partition(".")[2], 3e-11) for n in COEFFICIENTS}
    return calibration_of({**coefficients, **{name.replace("__", "."): value for name, value in changed.items()}})
