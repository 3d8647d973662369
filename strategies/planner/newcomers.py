"""Adapters that begin between two choices: until the next one they keep the lanes of their strategies in use.

A plan that leaves a lane empty saves what the lane costs whoever is in it, but only until somebody begins there. With m
beginnings expected in it until the next choice, one after the other at random, the lane is in use for

    1 - (1 - exp(-m)) / m

of the steps whatever the plan. So much of its fixed charges belongs to every plan, and the rest to those that use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from strategies.planner.problem import DEVICE_RESOURCES, PlanProblem

_KEPT = 0.75
"""Of what is known of beginnings, from choice to choice."""


class Newcomers:
    """Counts beginnings by the strategy that serves them first."""

    def __init__(self) -> None:
        self._before: frozenset[int] = frozenset()
        self._began: set[int] = set()
        self._expected: np.ndarray | None = None

    def observe(self, tokens: Mapping[int, int]) -> None:
        """One step that has run: an adapter begins where it has tokens and had none in the step before."""
        now = frozenset(tokens)
        self._began |= now - self._before
        self._before = now

    def forget(self, row: int) -> None:
        """The row belongs to another adapter from here on."""
        self._began.discard(row)
        self._before -= {row}

    def in_problem(self, problem: PlanProblem) -> PlanProblem:
        """The problem of a choice with the charges of lanes that newcomers keep in use; counts those since the last.

        What came before the first choice says nothing of a rate.
        """
        began = [row for row in self._began if row < problem.num_adapters]
        self._began.clear()
        counts = np.bincount(problem.current[began] + 1, minlength=len(problem.strategies) + 1)[1:].astype(float)
        if self._expected is None:
            self._expected = np.zeros(len(counts))
            return problem
        self._expected += (1 - _KEPT) * (counts - self._expected)
        if not (expected := self._expected).any():
            return problem
        in_use = np.zeros(len(expected))
        some = expected > 0
        in_use[some] = 1 + np.expm1(-expected[some]) / expected[some]
        always_s = np.einsum("s,sfr->fr", in_use, problem.fixed_load_s)
        base_s = problem.base_load_s + always_s[:, None]
        base_s[:, 1:, :DEVICE_RESOURCES] = problem.base_load_s[:, 1:, :DEVICE_RESOURCES]
        return dataclasses.replace(
            problem,
            base_load_s=base_s,
            base_serial_s=problem.base_serial_s + in_use @ problem.fixed_serial_s,
            fixed_load_s=problem.fixed_load_s * (1 - in_use)[:, None, None],
            fixed_serial_s=problem.fixed_serial_s * (1 - in_use)[:, None],
        )
