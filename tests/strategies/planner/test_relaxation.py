"""The interior-point method against scipy's linear programs, and bounds against plans."""

import numpy as np
import pytest
from scipy.optimize import linprog

from strategies.planner.folded import Folded
from strategies.planner.optimizer import optimize
from strategies.planner.prices import Part, lower_bounds, nodes, relax
from strategies.planner.relaxation import Relaxation
from tests.strategies.planner.instances import random_instance


def _random(seed, *, rows=15, options=3, places=6):
    rng = np.random.default_rng(seed)
    work = rng.random((rows * options, places)) / rows
    allowed = rng.random((rows, options)) < 0.8
    allowed[:, 0] = True
    work *= allowed.reshape(-1, 1)
    cost = rng.random((rows, options)) / rows
    phase_of = np.array([0, 0, 0, 1, 1, -1])
    least = np.where(allowed, work[:, 5].reshape(rows, options), np.inf).min(axis=1).sum()
    limit = np.concatenate([-0.3 * rng.random(5), [1.3 * least]])
    return work, cost, allowed, phase_of, limit


@pytest.mark.parametrize("seed", range(8))
def test_solve_random_problem_equals_linprog(seed):
    work, cost, allowed, phase_of, limit = _random(seed)
    rows, options = cost.shape
    relaxation = Relaxation(work.reshape(rows, options, -1), cost=cost, allowed=allowed, phase_of=phase_of, limit=limit)
    relaxed = relaxation.solve(gap=1e-6)
    phases = (phase_of[:, None] == np.arange(2)).astype(float)
    reference = linprog(
        np.concatenate([cost.reshape(-1), np.ones(2)]),
        A_ub=np.hstack([work.T, -phases]),
        b_ub=limit,
        A_eq=np.hstack([np.kron(np.eye(rows), np.ones(options)), np.zeros((rows, 2))]),
        b_eq=np.ones(rows),
        bounds=[(0, float(ok)) for ok in allowed.reshape(-1)] + [(None, None)] * 2,
    )
    reduced = np.where(allowed, cost + relaxation.priced(relaxed.prices), np.inf).min(axis=1)
    assert reduced.sum() - limit @ relaxed.prices == pytest.approx(reference.fun, rel=1e-4)
    over = relaxation.work(relaxed.shares) - limit
    times = [over[phase_of == phase].max() for phase in range(2)]
    assert (cost * relaxed.shares * allowed).sum() + sum(times) == pytest.approx(reference.fun, rel=1e-3)
    np.testing.assert_allclose(relaxed.shares.sum(axis=1), 1, atol=1e-9)
    assert (relaxed.shares[~allowed] == 0).all()


def test_solve_limit_that_cannot_be_met_ends():
    work, cost, allowed, phase_of, limit = _random(0)
    limit[-1] = 1e-6
    relaxation = Relaxation(work.reshape(*cost.shape, -1), cost=cost, allowed=allowed, phase_of=phase_of, limit=limit)
    relaxed = relaxation.solve(gap=1e-4)
    assert relaxed.steps <= 25
    assert np.isfinite(relaxed.shares).all()


@pytest.mark.parametrize("seed", [1, 8, 14, 16, 21, 24])
def test_lower_bounds_no_plan_undercuts_them(seed):
    problem = random_instance(seed, n=30)
    folded = Folded(problem)
    plan, _ = optimize(problem)
    among = nodes(folded)
    part = Part(folded.rows, np.ones(len(folded.rows)), folded.base, 0.0)
    for node in among[:: max(1, len(among) // 6)]:
        found = relax(folded, node, part, np.arange(len(folded.keep)), scale_s=plan.objective_s, gap=1e-3)
        total = folded.costs(found.prices.places) + found.prices.adapter_byte * folded.bytes
        bounds = lower_bounds(folded, found.prices, total, among)
        assert bounds.min() <= plan.objective_s * (1 + 1e-6)
        used = np.bincount(plan.strategy[problem.active], minlength=4) > 0
        for bound, other in zip(bounds, among, strict=True):
            same_kv = other.whole if plan.kv_fraction == 1 else problem.kv.strategies[other.attention] == plan.attention
            if same_kv and not (used & ~other.columns).any() and other.whole == (plan.kv_fraction == 1):
                charged = used.sum() == other.columns.sum()
                assert not charged or bound <= plan.objective_s * (1 + 1e-6)
