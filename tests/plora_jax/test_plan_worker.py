"""From snapshots to decisions, without an engine."""

import dataclasses

import numpy as np
import pytest

from memory_pool.hardware import HARDWARE
from plora_jax.checkpoints import load_config
from plora_jax.engine.machine import shape_of_model
from plora_jax.engine.plan_reasons import PlanReasons
from plora_jax.engine.plan_worker import POLICIES, PlanWorker, Snapshot, make_policy
from strategies.cost import LORA_COLUMNS, adapter_features, cost_model, decoding
from strategies.planner import NOWHERE, JointPlanner, implementation
from tests.plora_jax.conformance import PACK

SHAPE = shape_of_model(load_config(str(PACK / "models" / "llama")), name="llama", item_bytes=4)
IDLE, BUSY, PINNED = range(3)


def make_worker(policy, *, room=2.0, attention=None):
    """Room for so many of the adapters of `snapshot`."""
    model = cost_model(SHAPE, HARDWARE["cpu"], "ideal")
    whole = float(features().stored_a_bytes[0] + features().stored_b_bytes[0])
    return PlanWorker(model, policy, adapter_bytes=room * whole, kv_bytes=1e9, attention=attention)


def features():
    return adapter_features(SHAPE, np.full((3, len(SHAPE.names)), 8))


def snapshot(**changes):
    """One adapter is idle, one runs, one is pinned and idle."""
    made = Snapshot(
        ids=np.array([11, 12, 13]),
        features=features(),
        home=np.zeros(3, int),
        current=np.full(3, NOWHERE),
        pinned=np.array([False, False, True]),
        running={BUSY: 2},
        kv=decoding(np.array([30, 40, 50])),
        rows=8,
        near_data=True,
        events=[],
    )
    return dataclasses.replace(made, **changes)


def strategies(decision):
    return [LORA_COLUMNS[column] for column in decision.plan.strategy]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_by_its_name_plans_within_the_budget(name):
    policy = make_policy(name, interval_steps=16)
    decision = make_worker(policy).decide(snapshot())
    assert policy.name == name
    assert decision.plan.device_bytes <= 2 * 1e9
    assert decision.problem.active.tolist() == [False, True, False]
    assert decision.seconds > 0


@pytest.mark.parametrize(
    ("room", "near_data", "wanted"),
    [(2.0, True, "resident"), (0.9, True, "split"), (0.1, True, "near_data"), (0.1, False, "fetch")],
)
def test_pinned_is_served_from_the_device_as_far_as_it_fits(room, near_data, wanted):
    decision = make_worker(JointPlanner(), room=room).decide(snapshot(near_data=near_data))
    assert strategies(decision)[PINNED] == wanted
    assert PlanReasons(decision).short(13) == f"pinned: {wanted} is the best that fits for it"


def test_without_near_data_nobody_is_served_there():
    decision = make_worker(JointPlanner()).decide(snapshot(near_data=False))
    assert set(strategies(decision)) <= {"resident", "fetch"}
    assert decision.plan.attention == "local"


@pytest.mark.parametrize("attention", ["local", "distributed"])
def test_forced_attention_is_the_only_one(attention):
    decision = make_worker(JointPlanner(), attention=attention).decide(snapshot())
    assert decision.problem.kv.strategies == (attention,)
    assert decision.plan.attention == attention


def test_forced_attention_that_is_lost_is_not_missed():
    decision = make_worker(JointPlanner(), attention="distributed").decide(snapshot(near_data=False))
    assert decision.plan.attention == "local"


@pytest.mark.parametrize("name", POLICIES)
def test_policy_forgets_a_row_that_is_given_up(name, monkeypatch):
    policy, forgotten = make_policy(name, interval_steps=1), []
    monkeypatch.setattr(policy, "forget", forgotten.append)
    make_worker(policy).decide(snapshot(events=[{IDLE: 3}, IDLE]))
    assert forgotten == [IDLE]


def test_loads_are_those_of_steps_until_a_row_is_given_up():
    worker = make_worker(JointPlanner())
    decision = worker.decide(snapshot(events=[{IDLE: 3}] * 40))
    assert 0 < decision.tokens[IDLE] < 1
    assert decision.tokens[BUSY] == 2
    assert PlanReasons(decision).short(11).startswith("idle, 0.")
    assert worker.decide(snapshot(events=[IDLE])).tokens[IDLE] == 0


def test_move_that_has_not_paid_says_how_much_is_missing():
    worker = make_worker(make_policy("joint", interval_steps=1))
    decision = worker.decide(snapshot(current=np.array([2, 2, 0])))
    assert strategies(decision)[BUSY] == "near_data"
    assert "waits until the move pays" in PlanReasons(decision).short(12)
    patient = make_worker(make_policy("joint", interval_steps=10**9))
    assert strategies(patient.decide(snapshot(current=np.array([2, 2, 0]))))[BUSY] != "near_data"


def test_adapter_loaded_after_the_plan_has_no_long_reason():
    reasons = PlanReasons(make_worker(JointPlanner()).decide(snapshot()))
    assert reasons.short(99) == "loaded after the last plan"
    assert reasons.long(99, "x") is None


def test_make_policy_builds_what_a_first_choice_would_wait_for(monkeypatch):
    asked = []
    monkeypatch.setattr(implementation, "unavailable", lambda: asked.append(1))
    make_policy("lru", interval_steps=1)
    assert asked
