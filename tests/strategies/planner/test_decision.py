"""A decision's running sums are those of `evaluate`, and the ladder's values those of the prefixes it stands for."""

import numpy as np
import pytest

from strategies.planner.decision import Decision, Moves
from strategies.planner.folded import Folded
from strategies.planner.improve import best_fraction, exchanges, make_fit, regroup, single_moves
from strategies.planner.problem import evaluate
from tests.strategies.planner.instances import random_instance
from tests.strategies.planner.test_problem import APART, HALF_DUPLEX, TOGETHER, random_problem


def _objective(decision):
    problem = decision.folded.problem
    attention = problem.kv.strategies[decision.attention]
    return evaluate(problem, decision.columns, attention, decision.fraction).objective_s


@pytest.mark.parametrize(("groups", "shared"), [(APART, False), (HALF_DUPLEX, False), (TOGETHER, True)])
def test_decision_value_equals_evaluate(groups, shared):
    for seed in range(5):
        folded = Folded(random_problem(seed, groups=groups, pool_shared=shared))
        columns = np.random.default_rng(seed).integers(0, 4, 12)
        for attention, fraction in ((0, 0.5), (1, 1.0)):
            decision = Decision(folded, columns, attention=attention, fraction=fraction)
            assert decision.value() == pytest.approx(_objective(decision), rel=1e-6)


def test_ladder_best_prefix_has_the_value_it_says():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        folded = Folded(random_problem(seed, n=40))
        decision = Decision(folded, rng.integers(0, 4, 40), attention=1, fraction=0.25)
        moves = Moves(rng.permutation(40), rng.integers(0, 4, 40), 0.75, 11)
        before = decision.value()
        value, number, fraction = decision.ladder(moves, sharpness=None, byte_price=0.0)
        assert value <= before * (1 + 1e-12)
        decision.apply(moves, number, fraction)
        assert decision.value() == pytest.approx(value, rel=1e-9)
        assert decision.value() == pytest.approx(_objective(decision), rel=1e-6)


def test_costs_are_what_a_move_changes_at_given_prices():
    problem = random_problem(3)
    folded = Folded(problem)
    prices = np.random.default_rng(0).random(folded.base.shape) * np.isfinite(folded.base)
    costs = folded.costs(prices)
    columns = np.zeros(12, int)
    moved = columns.copy()
    moved[5] = 2
    change = (prices * (folded.places(folded.sums(moved)) - folded.places(folded.sums(columns)))).sum()
    change += folded.own[5, 2] - folded.own[5, 0]
    assert costs[5, 2] - costs[5, 0] == pytest.approx(change)


def test_make_fit_ends_within_all_limits():
    for seed in range(40):
        problem = random_instance(seed, n=60)
        folded = Folded(problem)
        largest = np.where(problem.allowed, problem.device_bytes, -1).argmax(axis=1)
        decision = Decision(folded, largest, attention=0, fraction=1.0)
        make_fit(decision, folded.costs(decision.prices(100.0)))
        assert decision.fits
        assert decision.bytes <= problem.adapter_budget_bytes * (1 + 1e-9) + 1


def test_best_fraction_no_other_is_better():
    for seed in range(30):
        problem = random_problem(seed)
        decision = Decision(Folded(problem), np.full(12, 1), attention=0, fraction=0.125)
        best_fraction(decision)
        tried = [
            evaluate(problem, decision.columns, attention, fraction).objective_s
            for attention in problem.kv.strategies
            for fraction in np.linspace(0.125, 1, 200)
        ]
        assert decision.value() <= min(tried) * (1 + 1e-6)


def test_improvements_never_make_a_plan_dearer_or_unfit():
    for seed in (0, 2, 5, 8, 11):
        folded = Folded(random_instance(seed, n=20))
        problem = folded.problem
        fewest = np.where(problem.allowed, problem.device_bytes, np.inf).argmin(axis=1)
        decision = Decision(folded, fewest, attention=0, fraction=problem.kv.min_fraction)
        assert decision.fits
        rows = folded.rows
        for improve in (
            lambda d, rows=rows: single_moves(d, rows, sharpness=None, rounds=5),
            lambda d, rows=rows: exchanges(d, rows, sharpness=None, rounds=3),
            lambda d, rows=rows: regroup(d, rows, sharpness=None, rounds=10),
            best_fraction,
        ):
            before = decision.value()
            improve(decision)
            assert decision.value() <= before * (1 + 1e-9)
            assert decision.fits
            assert decision.value() == pytest.approx(_objective(decision), rel=1e-6)
