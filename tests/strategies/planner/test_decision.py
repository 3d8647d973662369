"""A decision's running sums are those of `evaluate`, and the ladder's values those of the prefixes it stands for."""

import dataclasses

import numpy as np
import pytest

from strategies.planner.decision import Decision, Moves
from strategies.planner.folded import Folded, num_places
from strategies.planner.improve import best_fraction, exchanges, make_fit, single_moves, wander
from strategies.planner.problem import evaluate
from strategies.planner.settled import costs_of_loads, prices_by_home
from tests.strategies.planner.instances import random_instance
from tests.strategies.planner.test_problem import APART, HALF_DUPLEX, TOGETHER, random_problem


def _objective(decision):
    problem = decision.folded.problem
    attention = problem.kv.strategies[decision.attention]
    return evaluate(problem, decision.columns, attention, decision.fraction).objective_s


@pytest.mark.parametrize(("groups", "shared"), [(APART, False), (HALF_DUPLEX, False), (TOGETHER, True)])
def test_decision_value_equals_evaluate(groups, shared):
    for seed in range(5):
        folded = Folded(random_problem(seed, groups=groups, pool_shared=shared), fold_idle=False)
        columns = np.random.default_rng(seed).integers(0, 4, 12)
        for attention, fraction in ((0, 0.5), (1, 1.0)):
            decision = Decision(folded, columns, attention=attention, fraction=fraction)
            assert decision.value() == pytest.approx(_objective(decision), rel=1e-6)


def test_ladder_best_prefix_has_the_value_it_says():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        folded = Folded(random_problem(seed, n=40))
        decision = Decision(folded, rng.integers(0, 4, 40), attention=1, fraction=0.25)
        moves = Moves(rng.permutation(40), rng.integers(0, 4, 40))
        before = decision.value()
        value, number = decision.ladder(moves, sharpness=None, byte_price=0.0)
        assert value <= before * (1 + 1e-12)
        decision.apply(moves, number)
        assert decision.value() == pytest.approx(value, rel=1e-9)
        assert decision.value() == pytest.approx(_objective(decision), rel=1e-6)


def test_costs_are_what_a_move_changes_at_given_prices():
    folded = Folded(random_problem(3))
    prices = np.random.default_rng(0).random(len(folded.base))
    costs = folded.costs(prices)
    columns = np.zeros(len(folded.rows), int)
    moved = columns.copy()
    moved[5] = 2
    before, after = (Decision(folded, chosen, attention=0, fraction=0.5) for chosen in (columns, moved))
    change = prices @ (after.loads - before.loads) + after.own - before.own
    assert costs[5, 2] - costs[5, 0] == pytest.approx(change)


def test_places_left_out_are_never_the_longest():
    for seed in range(20):
        problem = random_instance(seed, n=30)
        folded, rng = Folded(problem, fold_idle=False), np.random.default_rng(seed)
        assert len(folded.keep) <= num_places(problem)
        for attention in (0, 1):
            columns = np.array([rng.choice(np.flatnonzero(row)) for row in problem.allowed])
            decision = Decision(folded, columns, attention=attention, fraction=float(rng.random()))
            assert decision.value() == pytest.approx(_objective(decision), rel=1e-6)


def test_idle_rows_that_nobody_expects_keep_what_fits():
    problem = random_problem(2)
    load, serial = problem.load_s.copy(), problem.serial_s.copy()
    load[4:], serial[4:] = 0.0, 0.0
    problem = dataclasses.replace(
        problem,
        load_s=load,
        serial_s=serial,
        active=np.arange(12) < 4,
        current=np.repeat([1, 0], [5, 7]),
        move_s=np.zeros((12, 4)),
    )
    folded = Folded(problem)
    assert folded.live.tolist() == [0, 1, 2, 3]
    columns = folded.all_columns(np.array([0, 0, 1, 1]), 50.0)
    assert columns[:5].tolist() == [0, 0, 1, 1, 1]
    assert np.bincount(columns[5:], minlength=2).tolist() == [3, 4], "30 of 100 bytes are left for those of 10"


def test_make_fit_ends_within_all_limits():
    for seed in range(40):
        problem = random_instance(seed, n=60)
        folded = Folded(problem)
        largest = np.where(folded.allowed, folded.bytes, -1).argmax(axis=1)
        decision = Decision(folded, largest, attention=0, fraction=1.0)
        make_fit(decision, folded.costs(decision.prices(100.0)), 0.0)
        assert decision.fits
        assert decision.bytes <= folded.adapter_budget_bytes * (1 + 1e-9) + 1


def test_moves_that_take_memory_drive_out_kv():
    for seed in range(20):
        problem = random_problem(seed)
        problem = dataclasses.replace(problem, budget_bytes=60.0, move_s=np.zeros((12, 4)))
        folded = Folded(problem, fold_idle=False)
        decision = Decision(folded, np.full(12, 1), attention=0, fraction=1.0)
        assert decision.fraction == 1.0
        moves = Moves(np.arange(8), np.zeros(8, int))  # of 10 bytes each, where KV takes 50
        decision.apply(moves, 3)
        assert decision.fraction == pytest.approx(30 / 50)
        assert decision.value() == pytest.approx(_objective(decision), rel=1e-6)
        decision.apply(Moves(moves.rows[3:], moves.columns[3:]), 5)
        assert decision.fraction == problem.kv.min_fraction
        assert not decision.fits
        assert decision.overshoot(decision.bytes) == pytest.approx(80 - (60 - 0.125 * 50))


def test_best_fraction_no_other_is_better():
    for seed in range(30):
        problem = random_problem(seed)
        decision = Decision(Folded(problem, fold_idle=False), np.full(12, 1), attention=0, fraction=0.125)
        best_fraction(decision)
        tried = [
            evaluate(problem, decision.columns, attention, fraction).objective_s
            for attention in problem.kv.strategies
            for fraction in np.linspace(0.125, 1, 200)
        ]
        assert decision.value() <= min(tried) * (1 + 1e-6)


def test_improvements_never_make_a_plan_dearer_or_unfit():
    for seed in (0, 2, 5, 8, 11):
        problem = random_instance(seed, n=20)
        folded = Folded(problem, fold_idle=False)
        fewest = np.where(problem.allowed, problem.device_bytes, np.inf).argmin(axis=1)
        decision = Decision(folded, fewest, attention=0, fraction=problem.kv.min_fraction)
        assert decision.fits
        rows = folded.rows
        for improve in (
            lambda d, rows=rows: single_moves(d, rows, sharpness=None, rounds=5),
            lambda d, rows=rows: exchanges(d, rows, sharpness=None, rounds=3),
            lambda d, rows=rows: wander(d, rows, sharpness=300.0, steps=20),
            best_fraction,
        ):
            before = decision.value()
            improve(decision)
            assert decision.value() <= before * (1 + 1e-9)
            assert decision.fits
            assert decision.value() == pytest.approx(_objective(decision), rel=1e-6)


@pytest.mark.parametrize("seed", [1, 2, 3, 7])
def test_settled_rows_are_worth_what_they_are_as_live_ones(seed):
    problem = random_problem(seed, n=40)
    rng = np.random.default_rng(seed)
    columns = np.where(problem.allowed, rng.random(problem.allowed.shape), -1.0).argmax(axis=1)
    idle = np.flatnonzero(~problem.active)
    folded = Folded(problem, settled=(idle[::2], columns[idle[::2]]), fold_idle=False)
    assert set(folded.live) == set(range(40)) - set(idle[::2])
    decision = Decision(folded, columns[folded.live], attention=0, fraction=0.25)
    whole = Decision(Folded(problem, fold_idle=False), columns, attention=0, fraction=0.25)
    assert decision.value() == pytest.approx(whole.value(), rel=1e-6)
    assert decision.bytes + folded.rest_bytes == pytest.approx(whole.bytes)
    assert decision.fits == whole.fits
    np.testing.assert_array_equal(folded.all_columns(decision.columns, 0.0), columns)


@pytest.mark.parametrize("same_home", [False, True])
def test_costs_of_loads_are_those_of_places(same_home):
    for seed in range(6):
        problem = random_problem(seed, n=30)
        if same_home:
            problem = dataclasses.replace(problem, home=np.full(30, problem.home[0]))
        folded = Folded(problem, fold_idle=False)
        places = np.random.default_rng(seed).random(num_places(problem))
        places[np.setdiff1d(np.arange(len(places)), folded.keep)] = 0.0
        rows = np.arange(0, 30, 1 if same_home else 4)
        want = (folded.work @ places[folded.keep])[rows]
        np.testing.assert_allclose(
            costs_of_loads(problem, rows, prices_by_home(problem, places)), want, rtol=1e-9, atol=1e-15
        )
