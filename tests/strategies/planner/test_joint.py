"""The joint planner over many steps: moves are paid for before they are made, whatever the load does."""

import dataclasses

import numpy as np
import pytest

from strategies.planner.joint import JointPlanner
from strategies.planner.problem import evaluate, violations
from tests.strategies.planner.instances import random_instance
from tests.strategies.planner.test_problem import NAMES, random_problem

RESIDENT, FETCH = 0, 1


def rotating_problem(hot, current, *, n=8, gain_s=1.0, move_steps=1e-2):
    """Hot adapters save `gain_s` a step when resident; two of them fit; a move takes 10 s, divided by 1000 steps."""
    problem = random_problem(0, n=n, d=1, f=2)
    load = np.zeros_like(problem.load_s)
    load[list(hot), FETCH, 0, 1] = gain_s
    load[list(hot), 2:, 0, 1] = 2 * gain_s
    bytes_ = np.zeros((n, 4))
    bytes_[:, RESIDENT] = 10.0
    active = np.zeros(n, bool)
    active[list(hot)] = True
    move = np.where((np.arange(4) == RESIDENT) & (current[:, None] != RESIDENT), move_steps, 0.0)
    kv = dataclasses.replace(problem.kv, device_bytes=0.0, move_s=0.0, min_fraction=0.0, current_fraction=1.0)
    return dataclasses.replace(
        problem,
        load_s=load,
        serial_s=np.zeros_like(problem.serial_s),
        fixed_load_s=np.zeros_like(problem.fixed_load_s),
        fixed_serial_s=np.zeros_like(problem.fixed_serial_s),
        base_load_s=np.zeros_like(problem.base_load_s),
        base_serial_s=np.zeros_like(problem.base_serial_s),
        device_bytes=bytes_,
        active=active,
        current=current,
        move_s=move,
        budget_bytes=20.0,
        kv=kv,
    )


def run(hot_at, steps, **figures):
    """[(step, row)] moves to the device, and the columns at the end."""
    planner = JointPlanner(horizon_steps=1000)
    current = np.full(8, FETCH)
    moves = []
    for step in range(steps):
        problem = rotating_problem(hot_at(step), current, **figures)
        plan = planner.choose(problem)
        assert violations(problem, plan) == []
        columns = plan.strategy.astype(int)
        moves += [(step, int(row)) for row in np.flatnonzero((columns == RESIDENT) & (current != RESIDENT))]
        current = columns
    return moves, current


def test_choose_steady_load_moves_once_it_has_paid():
    moves, current = run(lambda step: [0, 1], 60)
    assert sorted(row for _, row in moves) == [0, 1]
    assert all(step >= 9 for step, _ in moves), "a move of 10 s pays after ten steps that would have saved 1 s each"
    assert current[0] == current[1] == RESIDENT


def test_choose_drift_is_followed():
    _, current = run(lambda step: [0, 1] if step < 60 else [4, 5], 200)
    assert set(np.flatnonzero(current == RESIDENT)) == {4, 5}


def test_choose_copies_leave_the_device_for_a_gain_or_for_room_only():
    """Whoever has no tokens, or gains next to nothing elsewhere, stays as long as nobody else wants the room."""
    _, current = run(lambda step: [0, 1] if step < 60 else [], 80)
    assert set(np.flatnonzero(current == RESIDENT)) == {0, 1}
    for saved_s, stays in ((0.005, True), (0.5, False)):
        problem = rotating_problem([0], np.full(8, RESIDENT))
        load = problem.load_s.copy()
        load[0, RESIDENT, 0, 1], load[0, FETCH, 0, 1] = 2.0, 2.0 - saved_s
        problem = dataclasses.replace(problem, load_s=load, current=np.array([RESIDENT, *[FETCH] * 7]))
        plan = JointPlanner(horizon_steps=1000).choose(problem)
        assert (plan.strategy[0] == RESIDENT) == stays, saved_s


@pytest.mark.parametrize("period", [1, 2, 5, 17, 40])
def test_choose_alternating_load_stays_within_the_bound(period):
    steps = 400
    moves, _ = run(lambda step: [0, 1] if step // period % 2 == 0 else [4, 5], steps)
    for row in (0, 1, 4, 5):
        times = [step for step, moved in moves if moved == row]
        wanted = np.array([row in ([0, 1] if s // period % 2 == 0 else [4, 5]) for s in range(steps)])
        for before, after in zip([-1, *times], times, strict=False):
            gains = wanted[before + 1 : after + 1].sum() * 1.0  # at most gain_s in each step that wants it
            assert gains >= 10.0 * (1 - 1e-6), f"row {row} moved at {before} and {after}, which has not paid"
        assert len(times) * 10.0 <= wanted.sum() * 1.0


def test_choose_random_problems_moves_cost_less_than_they_were_to_gain():
    moves = 0
    for seed in (0, 3, 4, 9):
        planner = JointPlanner(horizon_steps=100)
        base = random_instance(seed, n=40)
        current, spent = np.full(40, FETCH), np.zeros(40)
        free = base.allowed.sum(axis=1) > 1
        for step in range(20):
            load = base.load_s * np.random.default_rng(step).choice([0.2, 1.0, 3.0], 40)[:, None, None, None]
            grows = np.maximum(0, base.device_bytes - base.device_bytes[np.arange(40), current][:, None])
            problem = dataclasses.replace(base, load_s=load, current=current, move_s=grows * 1e-14)
            plan = planner.choose(problem)
            assert violations(problem, plan) == []
            columns = plan.strategy.astype(int)
            cost = problem.move_s[np.arange(40), columns] * (columns != current)
            spent += cost * 100
            moves += int((cost > 0).sum())
            current = columns
        gained = np.array([planner.gained_s.get(row, 0.0) for row in range(40)])
        assert (spent[free] <= gained[free] * (1 + 1e-9)).all()
    assert moves > 20


def test_choose_pinned_where_it_is_not_yet_moves_at_once():
    problem = rotating_problem([0, 1], np.full(8, FETCH))
    allowed = problem.allowed.copy()
    allowed[3] = [True, False, False, False]
    plan = JointPlanner().choose(dataclasses.replace(problem, allowed=allowed))
    assert plan.strategy[3] == RESIDENT


def lanes_problem(current, *, lane_s, each_s, move_steps=1e-2):
    """Four of eight adapters run; a lane costs whoever is in it, an adapter the same in any; all fit the device."""
    problem = rotating_problem(range(4), current, gain_s=0.0, move_steps=move_steps)
    load, fixed = problem.load_s.copy(), problem.fixed_load_s.copy()
    load[:4, :, 0, 1] = each_s
    fixed[:, 0, 1] = lane_s
    return dataclasses.replace(problem, load_s=load, fixed_load_s=fixed, budget_bytes=80.0)


def test_choose_moves_that_save_only_together_are_paid_together():
    planner, current = JointPlanner(horizon_steps=1000), np.full(8, FETCH)
    moved = []
    for step in range(30):
        plan = planner.choose(lanes_problem(current, lane_s=[1.0, 9.0, 20.0, 20.0], each_s=1.0))
        columns = plan.strategy.astype(int)
        moved += [step] * int((columns != current).sum())
        current = columns
    # To leave one lane for the other saves 8 s a step, and four moves cost 40 s.
    assert moved == [4] * 4
    assert (current[:4] == RESIDENT).all()


def test_choose_leaves_a_lane_in_use_that_newcomers_begin_in():
    planner, current = JointPlanner(horizon_steps=1000), np.full(8, FETCH)
    for step in range(40):
        planner.observe(dict.fromkeys(range(4), 1) if step % 2 else {})
        problem = lanes_problem(current, lane_s=[8.0, 9.0, 20.0, 20.0], each_s=1.0, move_steps=1e-5)
        plan = planner.choose(problem)
        stays = (plan.strategy[:4] == FETCH).all()
        assert stays or step < 8, "a second lane costs more than it saves while one is in use anyway"
    alone = evaluate(problem, plan.strategy, plan.attention, plan.kv_fraction)
    assert plan.step_s == alone.step_s, "what a plan says of a step has no newcomers in it"
    for _ in range(40):
        planner.observe(dict.fromkeys(range(4), 1))
        plan = planner.choose(lanes_problem(current, lane_s=[8.0, 9.0, 20.0, 20.0], each_s=1.0, move_steps=1e-5))
        current = plan.strategy.astype(int)
    assert (current[:4] == RESIDENT).all(), "nobody has begun for long"


def test_full_searches_become_rare_where_they_find_nothing(monkeypatch):
    planner, searches, plans = JointPlanner(horizon_steps=1000), [], []
    search = planner._search
    monkeypatch.setattr(planner, "_search", lambda problem: searches.append(len(plans)) or search(problem))
    while len(plans) < 200:
        plans.append(planner.choose(rotating_problem([0, 1], np.full(8, FETCH), move_steps=1.0)))
    assert searches == [0, 1, 3, 7, 15, 31, 63, 127, 191]


def test_choose_growth_of_kv_fraction_waits_until_it_pays():
    problem = rotating_problem([], np.full(8, FETCH))
    device, pool = np.zeros(6), np.zeros((2, 1, 6))
    device[1], pool[:, :, 3], pool[:, :, 5] = 0.1, 1.0, 1.0
    kv = dataclasses.replace(
        problem.kv,
        device_bytes=10.0,
        device_load_s=device,
        pool_load_s=pool,
        pool_serial_s=np.zeros(2),
        current_fraction=0.0,
        move_s=5e-3,
    )
    problem = dataclasses.replace(problem, kv=kv)
    planner = JointPlanner(horizon_steps=1000)
    fractions = [planner.choose(problem).kv_fraction for _ in range(12)]
    assert fractions[:4] == [0.0] * 4
    assert max(fractions) > 0.5


def test_waiting_says_what_is_missing():
    planner = JointPlanner(horizon_steps=1000)
    planner.choose(rotating_problem([0, 1], np.full(8, FETCH)))
    move = planner.waiting[0]
    assert (move.column, move.cost_s) == (RESIDENT, 10.0)
    assert 0 < move.saved_s < 10.0
    planner.forget(0)
    assert 0 not in planner.waiting
    assert NAMES[move.column] == "resident"
