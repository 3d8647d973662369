"""The policies that the joint planner is held to, and load tracking."""

import dataclasses

import numpy as np
import pytest

from strategies.planner.joint import JointPlanner
from strategies.planner.load import AdapterLoad
from strategies.planner.policies import FixedPolicy, LruPolicy, PaperManager, alone_seconds
from strategies.planner.problem import PlanError, evaluate, violations
from tests.strategies.planner.instances import NAMES, random_instance
from tests.strategies.planner.test_joint import FETCH, RESIDENT, rotating_problem


def test_load_half_life_halves_and_forgets():
    load = AdapterLoad(4)
    for _ in range(200):
        load.observe({2: 8})
    assert load.tokens_per_step(4) == pytest.approx([0, 0, 8, 0], abs=1e-3)
    for _ in range(4):
        load.observe({})
    assert load.tokens_per_step(3)[2] == pytest.approx(4, abs=1e-3)
    load.observe({7: 1})
    assert load.last_step(8).tolist() == [0, 0, 200, 0, 0, 0, 0, 205]
    load.forget(2)
    assert load.tokens_per_step(3)[2] == 0
    assert len(load.tokens_per_step(0)) == 0


def test_load_equals_average_over_all_steps():
    rng = np.random.default_rng(0)
    load, keep, mean = AdapterLoad(10), 0.5**0.1, np.zeros(20)
    for _ in range(100):
        rows = rng.choice(20, 5, replace=False)
        tokens = dict(zip(rows.tolist(), rng.integers(1, 9, 5).tolist(), strict=True))
        load.observe(tokens)
        mean = keep * mean + (1 - keep) * np.array([tokens.get(row, 0) for row in range(20)])
    np.testing.assert_allclose(load.tokens_per_step(20), mean)


def test_load_half_life_of_zero_is_refused():
    with pytest.raises(ValueError, match="half_life_steps 0 must be above 0"):
        AdapterLoad(0)


@pytest.mark.parametrize("make", [*(lambda name=name: FixedPolicy(name) for name in NAMES), LruPolicy, PaperManager])
def test_choose_random_problems_fits(make):
    for seed in range(20):
        policy, problem = make(), random_instance(seed, n=60)
        policy.observe({0: 3, 5: 1})
        assert violations(problem, policy.choose(problem)) == [], seed


@pytest.mark.parametrize("make", [LruPolicy, PaperManager])
def test_row_that_is_given_up_is_as_though_it_was_never_used(make):
    policies = make(), make()
    problem = rotating_problem([], np.full(8, FETCH))
    for policy in policies:
        policy.observe({4: 1, 5: 1})
        policy.forget(20)  # a row that nobody has had
    policies[0].forget(4)
    columns = [policy.choose(problem).strategy for policy in policies]
    assert [column[4] == RESIDENT for column in columns] == [False, True]
    assert [column[5] == RESIDENT for column in columns] == [True, True]
    policies[0].observe({4: 1, 5: 1})
    assert policies[0].choose(problem).strategy[4] == RESIDENT, "the next adapter in it begins"


def test_fixed_policy_serves_active_first_and_fetches_the_rest():
    problem = rotating_problem([5, 6, 7], np.full(8, FETCH))
    plan = FixedPolicy("resident").choose(problem)
    assert set(np.flatnonzero(plan.strategy == RESIDENT)) == {5, 6}
    assert plan.strategy[7] == FETCH


def test_fixed_policy_unknown_strategy_is_refused():
    with pytest.raises(PlanError, match="strategy 'magic' is unknown: choose from resident, fetch"):
        FixedPolicy("magic").choose(random_instance(0, n=10))


def test_lru_policy_keeps_what_was_used_last():
    policy = LruPolicy()
    for row in (0, 1, 2, 3):
        policy.observe({row: 1})
    plan = policy.choose(rotating_problem([], np.full(8, FETCH)))
    assert set(np.flatnonzero(plan.strategy == RESIDENT)) == {2, 3}
    plan = policy.choose(rotating_problem([6], np.full(8, FETCH)))
    assert set(np.flatnonzero(plan.strategy == RESIDENT)) == {6, 3}


def test_paper_manager_caches_hot_adapters_and_evicts_cold_ones():
    manager = PaperManager(num_hot=1)
    for step in range(12):
        manager.observe({0: 1} if step % 2 else {0: 1, 4: 1})
    for step in range(6):
        manager.observe({1: 1} if step % 2 else {})
    current = np.full(8, FETCH)
    current[[0, 2]] = RESIDENT
    plan = manager.choose(rotating_problem([5], current))
    assert plan.strategy[5] == RESIDENT, "resident costs it nothing, over the cold adapter"
    assert plan.strategy[2] != RESIDENT
    assert (plan.strategy == RESIDENT).sum() == 2


def test_paper_manager_evicts_others_that_serve_where_they_lose_less():
    problem = rotating_problem([0, 1, 2], np.full(8, FETCH))
    load = problem.load_s.copy()
    load[2, FETCH:] *= 3
    plan = PaperManager().choose(dataclasses.replace(problem, load_s=load))
    assert plan.strategy[2] == RESIDENT, "3 s are saved over an adapter that loses 1 s"
    assert np.bincount(plan.strategy[:2], minlength=2).tolist()[:2] == [1, 1]
    equal = PaperManager().choose(problem)
    assert equal.strategy[:3].tolist() == [RESIDENT, RESIDENT, FETCH], "nobody is evicted for nothing"


def test_paper_manager_cools_towards_the_mean():
    manager = PaperManager()
    manager.observe({0: 5, 3: 1})
    np.testing.assert_allclose(manager._temperature, np.array([1, 0, 0, 1]) * 0.9 + 0.1 * 0.5)
    manager.observe({0: 5})  # the same request goes on
    assert manager._temperature[0] < 1


def test_alone_seconds_is_a_step_with_one_adapter():
    problem = random_instance(1, n=10)
    one = dataclasses.replace(
        problem,
        base_load_s=np.zeros_like(problem.base_load_s),
        kv=dataclasses.replace(problem.kv, device_load_s=np.zeros(6)),
        **{
            name: getattr(problem, name)[:1]
            for name in ("load_s", "serial_s", "home", "device_bytes", "current", "move_s")
        },
        allowed=np.ones((1, 4), bool),
        active=np.ones(1, bool),
    )
    for column in range(4):
        plan = evaluate(one, np.array([column]), "local", 1.0)
        assert alone_seconds(one)[0, column] == pytest.approx(plan.step_s)


def test_policies_without_adapters_plan_the_kv_alone():
    whole = random_instance(3)
    rows = ("load_s", "serial_s", "home", "device_bytes", "allowed", "active", "current", "move_s")
    problem = dataclasses.replace(whole, **{name: getattr(whole, name)[:0] for name in rows})
    for policy in (JointPlanner(), PaperManager(), LruPolicy(), FixedPolicy("fetch")):
        plan = policy.choose(problem)
        assert len(plan.strategy) == 0
        assert not violations(problem, plan), policy.name
