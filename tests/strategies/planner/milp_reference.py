"""The exact optimum of a planning problem, by mixed integer programming (scipy's HiGHS).

For each attention strategy: one binary x per adapter and allowed strategy, one y per strategy in use (the fixed
charges), P with a binary for "P is below 1", the growth of P, and one time t per phase that is at least every group's
load. The cheaper of the attention strategies is the optimum.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array, hstack, vstack

from strategies.planner.problem import DEVICE_RESOURCES, STRIPED, PlanProblem, evaluate


def _by_place(problem: PlanProblem, loads: np.ndarray, home: np.ndarray) -> np.ndarray:
    """Loads [K, F, R] of things at `home` [K] as [K, F * D' * G] loads of every group on every pool device."""
    num_pool = problem.num_pool_devices
    here = (home[:, None] == np.arange(num_pool)) | (home[:, None] == STRIPED)
    full = np.repeat(loads[:, :, None, :], num_pool, axis=2)
    full[..., DEVICE_RESOURCES:] *= here[:, None, :, None]
    if problem.pool_shared:
        full[:, :, 0, DEVICE_RESOURCES:] = full[..., DEVICE_RESOURCES:].sum(axis=2)
        full = full[:, :, :1]
    return (full @ problem.group_matrix).reshape(len(loads), -1)


def exact(problem: PlanProblem, *, time_limit_s: float = 30.0, gap: float = 1e-4) -> tuple[float, float]:
    """The smallest objective that was found, and the largest bound that is proven (equal but for `gap`)."""
    found = [_exact(problem, index, time_limit_s, gap) for index in range(len(problem.kv.strategies))]
    return min(value for value, _ in found), min(bound for _, bound in found)


def _exact(problem: PlanProblem, attention: int, time_limit_s: float, gap: float) -> tuple[float, float]:
    kv = problem.kv
    rows, columns = np.nonzero(problem.allowed)
    num_x, s, f = len(rows), len(problem.strategies), len(problem.phases)
    on_striped = np.full(1, STRIPED)
    phase_of = np.zeros((1, f, 6))

    def one_phase(load: np.ndarray) -> np.ndarray:
        spread = phase_of.copy()
        spread[0, kv.phase] = load
        return spread

    def base_like(load: np.ndarray) -> np.ndarray:
        """[F, D, R] as places."""
        full = load.copy()
        full[..., :DEVICE_RESOURCES] = full[:, :1, :DEVICE_RESOURCES]
        if problem.pool_shared:
            full[:, 0, DEVICE_RESOURCES:] = full[..., DEVICE_RESOURCES:].sum(axis=1)
            full = full[:, :1]
        return (full @ problem.group_matrix).reshape(-1)

    pool = np.zeros((f, problem.num_pool_devices, 6))
    pool[kv.phase] = kv.pool_load_s[attention]
    in_pool = base_like(pool)
    on_device = _by_place(problem, one_phase(np.where(np.arange(6) < 2, kv.device_load_s, 0.0)), on_striped)[0]
    x_places = _by_place(problem, problem.load_s[rows, columns], problem.home[rows])
    y_places = _by_place(problem, problem.fixed_load_s, np.full(s, STRIPED))
    base = base_like(problem.base_load_s) + in_pool
    num_places = len(base)
    # variables: x, y [S], P, z (P < 1), growth, t [F]
    phase_rows = coo_array(
        (-np.ones(num_places), (np.arange(num_places), np.repeat(np.arange(f), num_places // f))),
        shape=(num_places, f),
    )
    places = hstack(
        [
            csr_array(x_places.T),
            csr_array(y_places.T),
            csr_array((on_device - in_pool)[:, None]),
            csr_array((num_places, 2)),
            phase_rows,
        ]
    )
    width = num_x + s + 3 + f
    blocks, upper, lower = [places], [-base], [np.full(num_places, -np.inf)]

    def add(data: np.ndarray, at: tuple[np.ndarray, np.ndarray], low: np.ndarray, high: np.ndarray) -> None:
        blocks.append(csr_array((data, at), shape=(len(low), width)))
        lower.append(low)
        upper.append(high)

    one, inf = np.ones(1), np.full(1, np.inf)
    n = problem.num_adapters
    add(np.ones(num_x), (rows, np.arange(num_x)), np.ones(n), np.ones(n))
    acting = np.flatnonzero(problem.active[rows])
    k = len(acting)
    add(
        np.concatenate([np.ones(k), -np.ones(k)]),
        (np.concatenate([np.arange(k)] * 2), np.concatenate([acting, num_x + columns[acting]])),
        np.full(k, -np.inf),
        np.zeros(k),
    )
    p, z, growth = num_x + s, num_x + s + 1, num_x + s + 2
    add(np.ones(2), (np.zeros(2, int), np.array([p, z])), one, inf)  # P + z >= 1
    add(np.array([1.0, -1.0]), (np.zeros(2, int), np.array([growth, p])), -kv.current_fraction * one, inf)
    bytes_ = problem.device_bytes[rows, columns]
    unit = max(1.0, float(problem.device_bytes.max(initial=0)))
    at = (np.zeros(num_x + 1, int), np.arange(num_x + 1))
    at[1][-1] = p
    for limit, with_x, with_kv in (
        (problem.budget_bytes, 1, 1),
        (kv.adapter_budget_bytes, 1, 0),
        (kv.kv_budget_bytes, 0, 1),
    ):
        if limit is not None:
            data = np.concatenate([bytes_ * with_x, [kv.device_bytes * with_kv]]) / unit
            add(data, at, -inf, np.full(1, limit / unit))
    cost = np.concatenate(
        [
            problem.serial_s[rows, columns].sum(axis=1) + problem.move_s[rows, columns],
            problem.fixed_serial_s.sum(axis=1),
            [0.0, kv.pool_serial_s[attention], kv.move_s],
            np.ones(f),
        ]
    )
    scale = 1e3 / max(1e-9, _any_plan(problem).objective_s)  # seconds are too small for the solver's tolerances
    constraint = vstack(blocks).tocsr()
    t_columns = np.concatenate([np.ones(width - f), np.full(f, 1 / scale)])
    limits = [np.concatenate(lower), np.concatenate(upper)]
    limits = [np.concatenate([values[:num_places] * scale, values[num_places:]]) for values in limits]
    by_row = np.concatenate([np.full(num_places, scale), np.ones(len(limits[0]) - num_places)])
    constraint = constraint.multiply(by_row[:, None]).multiply(t_columns[None, :]).tocsr()
    result = milp(
        cost * scale * t_columns,
        integrality=np.concatenate([np.ones(num_x), np.ones(s), [0, 1, 0], np.zeros(f)]),
        bounds=Bounds(
            np.concatenate([np.zeros(num_x + s), [kv.min_fraction, 0, 0], np.zeros(f)]),
            np.concatenate([np.ones(num_x + s + 3), np.full(f, np.inf)]),
        ),
        constraints=LinearConstraint(constraint, *limits),
        options={"mip_rel_gap": gap, "time_limit": time_limit_s},
    )
    constant = float(problem.base_serial_s.sum())
    if result.x is None:
        raise ValueError(f"no plan found: {result.message}")
    x = np.asarray(result.x)
    strategy = np.zeros(n, int)
    picked = x[:num_x] > 0.5
    strategy[rows[picked]] = columns[picked]
    fraction = min(1.0, float(x[p])) if x[z] > 0.5 else 1.0
    value = evaluate(problem, strategy, kv.strategies[attention], fraction).objective_s
    return value, result.mip_dual_bound / scale + constant


def _any_plan(problem: PlanProblem):
    return evaluate(problem, problem.allowed.argmax(axis=1), problem.kv.strategies[0], problem.kv.min_fraction)
