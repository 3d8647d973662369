"""The definition of a plan's time, against the same in plain loops, and what it refuses."""

import dataclasses

import numpy as np
import pytest

from strategies.planner.problem import (
    RESOURCES,
    STRIPED,
    KvChoice,
    PlanError,
    PlanProblem,
    evaluate,
    violations,
)

NAMES = ("resident", "fetch", "near_data", "split")
APART = tuple((name,) for name in RESOURCES)
HALF_DUPLEX = (*APART[:4], ("to_pool", "to_device"))
TOGETHER = (RESOURCES,)


def random_problem(seed, *, groups=APART, pool_shared=False, n=12, d=3, f=4):
    """Random figures of every field; nothing about them is real."""
    rng = np.random.default_rng(seed)
    s, r = len(NAMES), len(RESOURCES)
    kv = KvChoice(
        strategies=("local", "distributed"),
        phase=1,
        device_bytes=50.0,
        device_load_s=rng.random(r),
        pool_load_s=rng.random((2, d, r)),
        pool_serial_s=rng.random(2),
        current_fraction=0.25,
        move_s=0.5,
        min_fraction=0.125,
    )
    return PlanProblem(
        strategies=NAMES,
        phases=tuple(f"phase{i}" for i in range(f)),
        groups=groups,
        pool_shared=pool_shared,
        load_s=rng.random((n, s, f, r)),
        serial_s=rng.random((n, s, f)),
        home=rng.integers(STRIPED, d, n),
        fixed_load_s=rng.random((s, f, r)),
        fixed_serial_s=rng.random((s, f)),
        base_load_s=rng.random((f, d, r)),
        base_serial_s=rng.random(f),
        device_bytes=np.array([10.0, 0.0, 0.0, 5.0]) * np.ones((n, 1)),
        allowed=np.ones((n, s), bool),
        active=rng.random(n) < 0.5,
        current=np.full(n, -1),
        move_s=rng.random((n, s)),
        budget_bytes=100.0,
        kv=kv,
    )


def slow_time(problem, strategy, attention, fraction):
    """Phase times by loops over everything."""
    kv, num_pool = problem.kv, problem.base_load_s.shape[1]
    index = kv.strategies.index(attention)
    times = []
    for f in range(len(problem.phases)):
        load = {(r, d): 0.0 for r in RESOURCES for d in range(num_pool)}
        serial = problem.base_serial_s[f]
        sources = [(problem.base_load_s[f, d], d) for d in range(num_pool)]
        used = {strategy[i] for i in range(len(strategy)) if problem.active[i]}
        for s in used:
            sources += [(problem.fixed_load_s[s, f], d) for d in range(num_pool)]
            serial += problem.fixed_serial_s[s, f]
        for i, s in enumerate(strategy):
            serial += problem.serial_s[i, s, f]
            homes = range(num_pool) if problem.home[i] == STRIPED else [problem.home[i]]
            sources += [(problem.load_s[i, s, f], d) for d in homes]
            if 0 not in homes:  # the device is loaded wherever the adapter lies
                sources.append((np.where(np.arange(len(RESOURCES)) < 2, problem.load_s[i, s, f], 0), 0))
        if f == kv.phase:
            sources += [((1 - fraction) * kv.pool_load_s[index, d], d) for d in range(num_pool)]
            sources.append((np.where(np.arange(len(RESOURCES)) < 2, fraction * kv.device_load_s, 0), 0))
            serial += kv.pool_serial_s[index] if fraction < 1 else 0.0
        for values, d in sources:
            for r, value in zip(RESOURCES, values, strict=True):
                if not r.startswith("device") or d == 0:
                    load[r, d] += value
        longest = 0.0
        for group in problem.groups:
            device = sum(load[r, 0] for r in group if r.startswith("device"))
            pool = [sum(load[r, d] for r in group if not r.startswith("device")) for d in range(num_pool)]
            longest = max(longest, device + (sum(pool) if problem.pool_shared else max(pool)))
        times.append(longest + serial)
    return np.array(times)


@pytest.mark.parametrize("pool_shared", [False, True])
@pytest.mark.parametrize("groups", [APART, HALF_DUPLEX, TOGETHER, (RESOURCES[:3], RESOURCES[3:])])
def test_evaluate_any_groups_equals_plain_loops(groups, pool_shared):
    for seed in range(10):
        problem = random_problem(seed, groups=groups, pool_shared=pool_shared)
        strategy = np.random.default_rng(seed).integers(0, 4, problem.num_adapters)
        for attention, fraction in (("local", 0.3), ("distributed", 1.0)):
            plan = evaluate(problem, strategy, attention, fraction)
            expected = slow_time(problem, strategy, attention, fraction)
            np.testing.assert_allclose(plan.phase_s, expected, rtol=1e-12)
            assert plan.step_s == pytest.approx(expected.sum())


def test_evaluate_moves_add_to_objective_alone():
    problem = random_problem(1)
    strategy = np.zeros(12, int)
    plan = evaluate(problem, strategy, "local", 0.75)
    assert plan.objective_s - plan.step_s == pytest.approx(problem.move_s[:, 0].sum() + 0.5 * 0.5)
    dropped = evaluate(problem, strategy, "local", 0.125)
    assert dropped.objective_s - dropped.step_s == pytest.approx(problem.move_s[:, 0].sum())


def test_evaluate_no_adapters_costs_base_and_kv():
    problem = random_problem(3, n=0)
    plan = evaluate(problem, np.zeros(0, int), "local", 1.0)
    np.testing.assert_allclose(plan.phase_s, slow_time(problem, [], "local", 1.0))
    assert plan.device_bytes == 50.0


def test_evaluate_busiest_resource_is_named():
    problem = random_problem(5, groups=HALF_DUPLEX)
    base = problem.base_load_s.copy()
    base[0, 0, 1], base[1, 2, 3], base[2, 1, 4], base[3, 0, 0] = 1000, 1000, 1000, 1000
    problem = dataclasses.replace(problem, base_load_s=base)
    plan = evaluate(problem, np.zeros(12, int), "local", 1.0)
    assert plan.bottleneck == ("device_memory", "near_memory@2", "to_pool+to_device@1", "device_flops")


def test_violations_each_limit_is_said():
    problem = random_problem(2)
    allowed = np.ones((12, 4), bool)
    allowed[7, 0] = False
    kv = dataclasses.replace(problem.kv, adapter_budget_bytes=60.0, kv_budget_bytes=40.0)
    problem = dataclasses.replace(problem, allowed=allowed, kv=kv)
    assert violations(problem, evaluate(problem, np.zeros(12, int), "local", 1.0)) == [
        "adapter 7 may not use resident",
        "adapters and KV take 170 bytes of the device, 100 are allowed",
        "adapters take 120 bytes of the device, 60 are allowed",
        "KV take 50 bytes of the device, 40 are allowed",
    ]
    assert violations(problem, evaluate(problem, np.full(12, 3), "local", 0.8)) == []
    low = evaluate(problem, np.full(12, 1), "local", 0.1)
    assert violations(problem, low) == ["KV fraction 0.1 is not between 0.125 and 1"]


def test_max_fraction_follows_room():
    problem = random_problem(2)
    assert problem.max_fraction(0.0) == 1.0
    assert problem.max_fraction(75.0) == 0.5
    assert problem.max_fraction(99.0) < problem.kv.min_fraction
    limited = dataclasses.replace(problem, kv=dataclasses.replace(problem.kv, kv_budget_bytes=10.0))
    assert limited.max_fraction(0.0) == 0.2
    assert dataclasses.replace(problem, kv=dataclasses.replace(problem.kv, device_bytes=0.0)).max_fraction(1e9) == 1.0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"active": np.ones(5, bool)}, r"active has shape \(5,\), it must be \(12,\)"),
        ({"groups": (RESOURCES[:5],)}, "must have each of device_flops, .*, to_device exactly once"),
        ({"allowed": np.arange(12)[:, None] != [4] * 4}, "adapter 4 may use no strategy: allow at least one"),
    ],
)
def test_problem_that_cannot_be_is_refused(change, text):
    with pytest.raises(PlanError, match=text):
        dataclasses.replace(random_problem(0), **change)


def test_loaded_are_rows_that_load_anything():
    problem = random_problem(0)
    load, serial = problem.load_s.copy(), problem.serial_s.copy()
    load[[2, 5, 7]], serial[[2, 5]] = 0.0, 0.0
    problem = dataclasses.replace(problem, load_s=load, serial_s=serial)
    assert problem.loaded.tolist() == [0, 1, 3, 4, 6, 7, 8, 9, 10, 11]
