"""Planners that a test drives: plans made at once, every step, by a policy of the test's own."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, Future

import numpy as np

from plora_jax.engine import planning
from strategies.planner import Plan, PlanProblem, evaluate

AUTO = {"lora_strategy": "auto", "attention_strategy": "auto", "hardware": "cpu"}


class Inline(Executor):
    """Runs what is submitted before it returns."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class RandomPolicy:
    """Any plan that is allowed and fits."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.chosen: set[str] = set()

    def observe(self, tokens: Mapping[int, int]) -> None:
        """Learns nothing."""

    def forget(self, row: int) -> None:
        """Knows nothing."""

    def choose(self, problem: PlanProblem) -> Plan:
        rows = np.arange(problem.num_adapters)
        columns = np.where(problem.allowed, self._rng.random(problem.allowed.shape), -1.0).argmax(axis=1)
        smallest = np.where(problem.allowed, problem.device_bytes, np.inf).argmin(axis=1)
        for row in self._rng.permutation(rows):
            if problem.device_bytes[rows, columns].sum() > problem.adapter_budget_bytes:
                columns[row] = smallest[row]
        most = problem.max_fraction(float(problem.device_bytes[rows, columns].sum()))
        fraction = float(self._rng.choice([problem.kv.min_fraction, most, self._rng.uniform(0, 1)]))
        attention = str(self._rng.choice(problem.kv.strategies))
        self.chosen |= {attention, *(problem.strategies[column] for column in set(columns.tolist()))}
        fraction = min(max(fraction, problem.kv.min_fraction), most)
        return evaluate(problem, columns, attention, fraction)


def drive(built, policy, monkeypatch, *, always: bool = True):
    """Has a deployment plan by a policy, between any two steps that are far enough apart, before the next one.

    Returns:
        The planner, whose `moved` lists the pages copied between steps.
    """
    planner = built.engine._planner
    planner._worker._policy, planner._thread = policy, Inline()
    if always:
        monkeypatch.setattr(planning, "_LOOK_AGAIN", 0)
    planner.moved = []
    between_steps = planner.between_steps

    def counted(running):
        turn = between_steps(running)
        planner.moved.append(turn.moved_pages)
        return turn

    planner.between_steps = counted
    return planner
