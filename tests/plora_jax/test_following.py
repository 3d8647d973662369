"""Policies over traffic whose popular adapters change, without an engine: what is on the device follows them.

Copies take no time here; what an adapter reads on the device is there when the plan says so, until it says otherwise.
"""

from __future__ import annotations

import collections
import functools

import numpy as np
import pytest

from memory_pool.hardware import HARDWARE
from plora_jax.checkpoints import load_config
from plora_jax.engine.machine import shape_of_model
from plora_jax.engine.plan_worker import PlanWorker, Snapshot, make_policy
from strategies.cost import LORA_COLUMNS, adapter_features, cost_model, decoding, plan_problem
from strategies.planner import evaluate
from tests.plora_jax.conformance import PACK

ADAPTERS, STREAMS, TOKENS, PERIOD, INTERVAL, ROOM = 120, 16, 32, 60, 8, 20
NEAR = LORA_COLUMNS.index("near_data")
ON_DEVICE = [LORA_COLUMNS.index(name) for name in ("resident", "split")]
SHAPE = shape_of_model(load_config(str(PACK / "models" / "llama")), name="llama", item_bytes=2)
FEATURES = adapter_features(SHAPE, np.full((ADAPTERS, len(SHAPE.names)), 32))


def requests(periods):
    """(adapter, tokens) of each request, a power law over another order in each period."""
    rng = np.random.default_rng(5)
    law = 1 / np.arange(1, ADAPTERS + 1)
    for _ in range(periods):
        order = rng.permutation(ADAPTERS)
        for place in rng.choice(ADAPTERS, PERIOD, p=law / law.sum()):
            yield int(order[place]), int(rng.integers(TOKENS // 2, 2 * TOKENS))


@functools.cache
def served(policy):
    """Mean predicted seconds of a step as it was served, and the share of tokens read on the device at the end."""
    model = cost_model(SHAPE, HARDWARE["h100"], "ideal")
    room = ROOM * float(FEATURES.stored_a_bytes[0] + FEATURES.stored_b_bytes[0])
    worker = PlanWorker(model, make_policy(policy, interval_steps=INTERVAL), adapter_bytes=room, kv_bytes=1e9)
    current, events, running, seconds, on_device = np.full(ADAPTERS, NEAR), [], [], [], []
    for adapter, tokens in requests(4):
        running.append([adapter, tokens])
        while len(running) == STREAMS:
            counts = dict(collections.Counter(adapter for adapter, _ in running))
            kv = decoding(np.full(STREAMS, 40))
            if len(seconds) % INTERVAL == 0:
                plan = worker.decide(
                    Snapshot(
                        ids=np.arange(1, ADAPTERS + 1),
                        features=FEATURES,
                        home=np.zeros(ADAPTERS, int),
                        current=current,
                        pinned=np.zeros(ADAPTERS, bool),
                        running=counts,
                        kv=kv,
                        rows=STREAMS,
                        near_data=True,
                        events=events,
                    )
                ).plan
                current, events = plan.strategy.astype(int), []
            events.append(counts)
            load = np.zeros(ADAPTERS)
            load[list(counts)] = list(counts.values())
            problem = plan_problem(model, FEATURES, kv, tokens=load, budget_bytes=1e12, current=current)
            seconds.append(evaluate(problem, current, plan.attention, 1.0).step_s)
            on_device += [np.isin(current[adapter], ON_DEVICE) for adapter, _ in running]
            running = [[adapter, left - 1] for adapter, left in running if left > 1]
    return float(np.mean(seconds)), float(np.mean(on_device[-len(on_device) // 8 :]))


def test_joint_planner_keeps_popular_adapters_on_the_device_over_a_link():
    _, share = served("joint")
    assert share > 0.5


@pytest.mark.parametrize("other", ["paper", "lru"])
def test_joint_planner_is_as_good_as_others_while_popularity_drifts(other):
    assert served("joint")[0] <= 1.05 * served(other)[0]
