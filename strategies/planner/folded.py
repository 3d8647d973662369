"""A planning problem as the optimizer computes with it: pool devices that are one folded into one, costs added up.

A place is a group on a pool device, Q of them a phase; groups without pool resources count on pool device 0 alone. Work
is summed by home first (sums: [..., H, F, R] with H = D + 1, the last for striped adapters) and spread to places
afterwards, so that a decision of a thousand adapters is a few small arrays.
"""

from __future__ import annotations

import numpy as np

from strategies.planner.problem import DEVICE_RESOURCES, RESOURCES, STRIPED, PlanProblem

_TIE = 1e-9
"""Of the base step: what decides between columns that cost the same (stay, then few bytes)."""


class Folded:
    """Arrays derived from a PlanProblem; read-only after construction.

    Attributes:
        problem: where they come from.
        rows: [N], 0 to N - 1.
        home: [N], index into H.
        spread: [H, D'], how often work at a home loads each pool device.
        own: [N, S] seconds that no other choice changes: serial time and moves; inf where not allowed.
        load: [N, S, F * R].
        for_free: [S] bool, columns that everyone may have and that take no device memory.
        base: [F, Q], -inf at places that do not count.
        fixed: [S, F, Q] and fixed_serial: [S], while an active adapter uses the column.
        kv_device: [Q], kv_pool: [A, Q], of the phase of attention.
        serial_s: of the base.
    """

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        n, s, f, r = problem.load_s.shape
        d = problem.num_pool_devices
        self.num_phases, self.num_columns = f, s
        self.rows = np.arange(n)
        self.home = np.where(problem.home == STRIPED, d, problem.home)
        self._at_home = (self.home == np.arange(d + 1)[:, None]).astype(float)
        spread = np.vstack([np.eye(d), np.ones((1, d))])
        self.spread = spread.sum(axis=1, keepdims=True) if problem.pool_shared else spread
        self.num_homes = d + 1
        self._matrix = problem.group_matrix
        self.load = problem.load_s.reshape(n, s, f * r)
        self.fixed_serial = problem.fixed_serial_s.sum(axis=1)
        self.serial_s = float(problem.base_serial_s.sum())
        striped = np.zeros((s, d + 1, f, r))
        striped[:, d] = problem.fixed_load_s
        self.fixed = self.places(striped)
        self.has_fixed = bool(self.fixed.any() or self.fixed_serial.any())
        self.base = self._by_device(problem.base_load_s)
        in_pool = (np.arange(r) >= DEVICE_RESOURCES) @ self._matrix > 0
        count = np.zeros((self.spread.shape[1], len(problem.groups)), bool)
        count[0], count[1:] = True, in_pool
        self.base[:, ~count.reshape(-1)] = -np.inf
        kv = problem.kv
        on_device = np.zeros((1, d, r))
        on_device[0, :, :DEVICE_RESOURCES] = kv.device_load_s[:DEVICE_RESOURCES]
        self.kv_device = self._by_device(on_device)[0]
        self.kv_pool = self._by_device(kv.pool_load_s)
        tie = _TIE * (float(problem.base_load_s.max(axis=(1, 2)).sum()) + self.serial_s)
        largest = max(float(problem.device_bytes.max(initial=0.0)), 1.0)
        own = problem.serial_s @ np.ones(f)
        own += problem.move_s
        own += (tie / largest) * problem.device_bytes
        stays = problem.current >= 0
        own[self.rows[stays], problem.current[stays]] -= tie
        self.own = np.where(problem.allowed, own, np.inf)
        self.for_free = (problem.allowed & (problem.device_bytes <= 0)).all(axis=0)

    def _by_device(self, load: np.ndarray) -> np.ndarray:
        """Loads [F, D, R], device columns of pool device 0, as places [F, Q]."""
        full = load.copy()
        full[..., :DEVICE_RESOURCES] = full[:, :1, :DEVICE_RESOURCES]
        if self.problem.pool_shared:
            full[:, 0, DEVICE_RESOURCES:] = full[..., DEVICE_RESOURCES:].sum(axis=1)
            full = full[:, :1]
        return (full @ self._matrix).reshape(len(full), -1)

    def places(self, sums: np.ndarray) -> np.ndarray:
        """Sums by home [..., H, F, R] as loads of places [..., F, Q]."""
        device = sums[..., :DEVICE_RESOURCES].sum(axis=-3) @ self._matrix[:DEVICE_RESOURCES]
        pool = np.moveaxis(sums[..., DEVICE_RESOURCES:], -3, -2)
        pool = (self.spread.T @ pool) @ self._matrix[DEVICE_RESOURCES:]
        total = pool + device[..., None, :]
        return total.reshape(*total.shape[:-2], -1)

    def places_of(self, loads: np.ndarray, home: np.ndarray) -> np.ndarray:
        """Loads [M, S, F, R] of things at `home` [M] as loads of places [M, S, F, Q]."""
        device = loads[..., :DEVICE_RESOURCES] @ self._matrix[:DEVICE_RESOURCES]
        pool = loads[..., DEVICE_RESOURCES:] @ self._matrix[DEVICE_RESOURCES:]
        total = device[..., None, :] + self.spread[home][:, None, None, :, None] * pool[..., None, :]
        return total.reshape(*total.shape[:-2], self.base.shape[1] if len(total) == 0 else -1)

    def sums(self, strategy: np.ndarray, without: np.ndarray | None = None) -> np.ndarray:
        """[H, F, R] of a decision; rows `without` count nothing."""
        chosen = self.load[self.rows, strategy]
        if without is not None:
            chosen[without] = 0.0
        summed = self._at_home @ chosen
        return summed.reshape(len(summed), self.num_phases, len(RESOURCES))

    def costs(self, prices: np.ndarray) -> np.ndarray:
        """[N, S] seconds of every choice when a second of load on a place costs `prices` [F, Q]; inf: not allowed."""
        by_group = prices.reshape(self.num_phases, self.spread.shape[1], -1)
        by_resource = by_group @ self._matrix.T
        at = np.empty((len(self.spread), self.num_phases, len(RESOURCES)))
        at[..., :DEVICE_RESOURCES] = by_resource[..., :DEVICE_RESOURCES].sum(axis=1)
        pool = np.swapaxes(by_resource[..., DEVICE_RESOURCES:], 0, 1).reshape(self.spread.shape[1], -1)
        at[..., DEVICE_RESOURCES:] = (self.spread @ pool).reshape(len(at), self.num_phases, -1)
        costs = np.einsum("nsk,nk->ns", self.load, at.reshape(len(at), -1)[self.home])
        costs += self.own
        return costs
