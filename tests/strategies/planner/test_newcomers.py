"""Lanes that are in use until the next choice whatever a plan says."""

import dataclasses

import numpy as np
import pytest

from strategies.planner.newcomers import Newcomers
from strategies.planner.problem import NOWHERE, evaluate
from tests.strategies.planner.test_problem import random_problem

NEAR = 2


def problem_of(current):
    problem = random_problem(1, n=4, d=2, f=3)
    return dataclasses.replace(problem, current=np.array(current), active=np.ones(4, bool))


def test_problem_is_as_it_was_before_anybody_began():
    problem, newcomers = problem_of([NEAR] * 4), Newcomers()
    newcomers.observe({0: 1, 1: 1})
    assert newcomers.in_problem(problem) is problem, "what came before the first choice says nothing of a rate"
    newcomers.observe({0: 1, 1: 1})
    assert newcomers.in_problem(problem) is problem, "both go on"


def test_charges_of_a_lane_go_over_to_every_plan_as_far_as_it_is_in_use():
    problem, newcomers = problem_of([NEAR, NEAR, NEAR, NOWHERE]), Newcomers()
    newcomers.in_problem(problem)
    for tokens in ({0: 1}, {0: 1, 1: 2}, {2: 1, 3: 1}):
        newcomers.observe(tokens)
    expected = 0.25 * 3  # a quarter of what was counted; row 3 is served by nobody
    in_use = 1 - (1 - np.exp(-expected)) / expected
    found = newcomers.in_problem(problem)
    np.testing.assert_allclose(found.fixed_load_s[NEAR], (1 - in_use) * problem.fixed_load_s[NEAR])
    others = [0, 1, 3]
    np.testing.assert_array_equal(found.fixed_load_s[others], problem.fixed_load_s[others])
    np.testing.assert_allclose(found.fixed_serial_s[NEAR], (1 - in_use) * problem.fixed_serial_s[NEAR])
    np.testing.assert_allclose(found.base_load_s[:, 0], problem.base_load_s[:, 0] + in_use * problem.fixed_load_s[NEAR])
    everyone_near = np.full(4, NEAR)
    before, after = (evaluate(p, everyone_near, "local", 1.0).step_s for p in (problem, found))
    assert after == pytest.approx(before), "who uses the lane pays for all of it"


def test_rate_fades_when_nobody_begins_and_a_row_that_is_given_up_is_forgotten():
    problem, newcomers = problem_of([NEAR] * 4), Newcomers()
    newcomers.in_problem(problem)
    newcomers.observe({0: 1, 1: 1, 2: 1})
    newcomers.forget(2)
    charges = []
    for _ in range(3):
        charges.append(newcomers.in_problem(problem).fixed_serial_s[NEAR].sum())
        newcomers.observe({0: 1, 1: 1})
    assert charges[0] < charges[1] < charges[2] < problem.fixed_serial_s[NEAR].sum()
    newcomers.observe({2: 1})
    assert newcomers.in_problem(problem).fixed_serial_s[NEAR].sum() < charges[2], "the row began anew"
