"""What a calibrated hardware file says of the points of the strategies benchmark, and what the planner chooses there.

Predicted times are exact sums of terms (`lane_quantities`). The planner sees the plan problem of the same adapters, in
which whole chunks of `fetch` are averages, once with room for all adapters on the device and once for half of their B;
moves cost it nothing, since the benchmark asks for the best place and not for the way there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from launch.benchmarks.strategy_programs import AttentionPoint, LoraPoint
from memory_pool.hardware import HardwareSpec
from strategies.cost import (
    LORA_COLUMNS,
    AdapterFeatures,
    KvLoad,
    ModelShape,
    adapter_features,
    attention_quantities,
    cost_model,
    decoding,
    lane_quantities,
    plan_problem,
    predicted_s,
)
from strategies.planner import PlanProblem, evaluate, optimize

BUDGETS = ("room for all", "room for half of B")
_NO_KV = KvLoad(contexts=np.zeros(0, int), queries=np.zeros(0, int))
_FOREVER = 1e12
"""Steps over which moves are spread."""


class Choice(NamedTuple):
    """What the planner chose.

    Attributes:
        budget: of BUDGETS.
        adapters: how many by strategy, of those that it uses.
        fitting: strategies that all adapters could use within the budget.
    """

    budget: str
    adapters: Mapping[str, int]
    fitting: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the program that does it: the strategy, or how many adapters have which."""
        if len(self.adapters) == 1:
            return next(iter(self.adapters))
        return " + ".join(f"{count} {strategy}" for strategy, count in self.adapters.items())


class Prediction(NamedTuple):
    """Of one point.

    Attributes:
        step_s: seconds of the adapters of a step, by strategy.
        planned_s: the same as the planner sees it.
        choices: by budget.
    """

    step_s: Mapping[str, float]
    planned_s: Mapping[str, float]
    choices: tuple[Choice, ...]


class Verdict(NamedTuple):
    """How predictions and choices compare with what was measured.

    Attributes:
        errors: by strategy, (predicted - measured) / measured of each point.
        planned_errors: the same of what the planner sees.
        regrets: by budget, measured time of the choice over that of the best strategy that fits, for each point.
    """

    errors: Mapping[str, Sequence[float]]
    planned_errors: Mapping[str, Sequence[float]]
    regrets: Mapping[str, Sequence[float]]


def predict(point: LoraPoint, shape: ModelShape, hardware: HardwareSpec) -> Prediction:
    """What is expected of a point.

    Args:
        point: of the grid.
        shape: of the base model.
        hardware: with a calibration.

    Raises:
        ValueError: it has none.
    """
    model = cost_model(shape, hardware, "calibrated")
    assert hardware.calibration is not None
    features = adapter_features(shape, np.full((point.adapters, len(shape.names)), point.rank))
    tokens = np.full(point.adapters, float(point.tokens_per_adapter))
    exact = {
        name: predicted_s(
            hardware.calibration, lane_quantities(shape, features, tokens, strategy=name, rows=point.rows)
        )
        for name in LORA_COLUMNS
    }
    problems = [
        _without_base(
            plan_problem(
                model, features, _NO_KV, tokens=tokens, rows=point.rows, budget_bytes=room, horizon_steps=_FOREVER
            )
        )
        for room in _rooms(features)
    ]
    planned = {name: _step_s(problems[0], column) for column, name in enumerate(LORA_COLUMNS)}
    choices = tuple(_choice(problem, budget) for problem, budget in zip(problems, BUDGETS, strict=True))
    return Prediction(exact, planned, choices)


def predict_attention(point: AttentionPoint, shape: ModelShape, hardware: HardwareSpec) -> float:
    """Seconds that the near-data function of attention is expected to take.

    Args:
        point: of the grid.
        shape: of the base model.
        hardware: with a calibration.
    """
    assert hardware.calibration is not None
    load = decoding(np.full(point.sequences, point.context))
    return predicted_s(hardware.calibration, attention_quantities(shape, load, strategy="near"))


def judge(predictions: Sequence[Prediction], measured: Sequence[Mapping[str, float]]) -> Verdict:
    """Compares.

    Args:
        predictions: of each point.
        measured: of each point, seconds by program; choices of several strategies are in it under their name.
    """
    pairs = list(zip(predictions, measured, strict=True))
    regrets: dict[str, list[float]] = {budget: [] for budget in BUDGETS}
    for prediction, seconds in pairs:
        for choice in prediction.choices:
            best = min(seconds[name] for name in choice.fitting)
            regrets[choice.budget].append(seconds[choice.name] / best)
    return Verdict(
        {name: [p.step_s[name] / seconds[name] - 1 for p, seconds in pairs] for name in LORA_COLUMNS},
        {name: [p.planned_s[name] / seconds[name] - 1 for p, seconds in pairs] for name in LORA_COLUMNS},
        regrets,
    )


def _rooms(features: AdapterFeatures) -> tuple[float, float]:
    a, b = (float(stored.sum()) for stored in (features.stored_a_bytes, features.stored_b_bytes))
    return a + b, b / 2


def _without_base(problem: PlanProblem) -> PlanProblem:
    """The benchmark has no base model, beside which small differences would not count."""
    return dataclasses.replace(problem, base_load_s=np.zeros_like(problem.base_load_s))


def _step_s(problem: PlanProblem, column: int) -> float:
    return evaluate(problem, np.full(problem.num_adapters, column), "local", 1.0).step_s


def _choice(problem: PlanProblem, budget: str) -> Choice:
    plan, _ = optimize(problem)
    counts = np.bincount(plan.strategy, minlength=len(LORA_COLUMNS))
    fits = problem.device_bytes.sum(axis=0) <= problem.budget_bytes * (1 + 1e-9)
    return Choice(
        budget,
        {name: int(count) for name, count in zip(LORA_COLUMNS, counts, strict=True) if count},
        tuple(name for name, fit in zip(LORA_COLUMNS, fits, strict=True) if fit),
    )
