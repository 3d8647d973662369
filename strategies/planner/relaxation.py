"""The linear relaxation of choosing one option a row, by an interior-point method made for its shape.

Every row shares one unit among its options, and options load a few common places:

    minimise   sum of cost * x + sum of t
    so that    G x - E t + slack = limit,   sum over options of x = 1 in every row,   x, slack >= 0

E has the place's phase; rows without one (memory) have no t. A Newton step needs a matrix of places alone, because
rows are eliminated one by one: time grows linearly with rows. All figures should be of the order of the whole
objective, scaled to 1.

Source: Mehrotra's predictor and corrector (SIAM J. Optimization 2, 1992).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.linalg.lapack import dpotrf, dpotrs  # pyright: ignore[reportAttributeAccessIssue]  # made by f2py

from strategies.native import planner_calls
from strategies.planner.implementation import either

_STEP = 0.99
"""Of the way to the nearest boundary."""

_FEASIBLE = 1e-3
"""Largest violation of a place's limit that counts as none."""


class Relaxed(NamedTuple):
    """What the relaxation says.

    Attributes:
        shares: [N, S], x.
        prices: [places], of a unit of work on each.
        softness: how far from the cheapest an option still has a share worth naming.
        steps: that it took.
    """

    shares: np.ndarray
    prices: np.ndarray
    softness: float
    steps: int


class _Point(NamedTuple):
    """Primal and dual variables, or a direction of them."""

    x: np.ndarray
    slack: np.ndarray
    t: np.ndarray
    z: np.ndarray
    prices: np.ndarray


class Relaxation:
    """A problem of this shape.

    Args:
        work: [N, S, places], what every option adds to each; 0 where not allowed.
        cost: [N, S].
        allowed: [N, S] bool, at least one a row.
        phase_of: [places], or -1 for a row without t.
        limit: [places].
        home: [N] int, rows of one home load about the same places (which changes nothing but the time); None: all do.
    """

    def __init__(
        self,
        work: np.ndarray,
        *,
        cost: np.ndarray,
        allowed: np.ndarray,
        phase_of: np.ndarray,
        limit: np.ndarray,
        home: np.ndarray | None = None,
    ) -> None:
        self.rows_work = np.ascontiguousarray(work, float)
        self.flat_work = self.rows_work.reshape(-1, work.shape[-1])
        self.cost = np.ascontiguousarray(np.where(allowed, cost, 0.0), float)
        self.allowed = np.ascontiguousarray(allowed, bool)
        self.phase_of = np.ascontiguousarray(phase_of, np.int64)
        self.limit = np.ascontiguousarray(limit, float)
        self.home = np.zeros(len(work), np.int64) if home is None else np.ascontiguousarray(home, np.int64)

    def work(self, shares: np.ndarray) -> np.ndarray:
        """G x."""
        return shares.reshape(-1) @ self.flat_work

    def priced(self, prices: np.ndarray) -> np.ndarray:
        """G' prices, [N, S]."""
        return (self.flat_work @ prices).reshape(self.cost.shape)

    def solve(self, *, gap: float, max_steps: int = 25) -> Relaxed:
        """Shares and prices whose values differ by `gap` of the value or less, if `max_steps` are enough."""
        return Relaxed(*interior_point(self, gap, max_steps))


@either(planner_calls.interior_point)
def interior_point(problem: Relaxation, gap: float, max_steps: int) -> tuple[np.ndarray, np.ndarray, float, int]:
    """The fields of `Relaxed`."""
    return _Solver(problem).solve(gap, max_steps)


class _Solver:
    """The method in numpy."""

    def __init__(self, problem: Relaxation) -> None:
        allowed, phase_of = problem.allowed, problem.phase_of
        self.rows_work, self.flat_work = problem.rows_work, problem.flat_work
        self.work, self.priced, self.cost, self.limit = problem.work, problem.priced, problem.cost, problem.limit
        self.mask = allowed.astype(float)
        self.closed = 1.0 - self.mask
        self.options = float(self.mask.sum())
        self.barred = np.where(allowed, 0.0, np.inf)
        self.each = np.ones(allowed.shape[1])
        self.phases = (phase_of[:, None] == np.arange(int(phase_of.max(initial=-1)) + 1)).astype(float)

    def solve(self, gap: float, max_steps: int) -> tuple[np.ndarray, np.ndarray, float, int]:
        point = self._start()
        best_bound, aim, step = -np.inf, gap, 0
        while True:
            dual = self.cost + self.priced(point.prices)
            bound = float(np.ascontiguousarray((dual + self.barred).T).min(axis=0).sum() - self.limit @ point.prices)
            best_bound = max(best_bound, bound)
            value = float(np.vdot(self.cost, point.x) + point.t.sum())
            missing = self.limit - self.work(point.x) + self.phases @ point.t - point.slack
            done = value - best_bound <= gap * abs(value) and np.abs(missing).max(initial=0.0) <= _FEASIBLE
            if done or step == max_steps or not np.isfinite(bound):
                break
            moved = self._step(point, missing)
            if moved is None:
                break
            point, aim = moved
            step += 1
        return point.x, point.prices, aim, step

    def _start(self) -> _Point:
        """Inside all bounds, with prices that are feasible; limits without t may be missed."""
        x = self.mask / self.mask.sum(axis=1, keepdims=True)
        timed = self.phases.any(axis=1)
        over = self.work(x) - self.limit
        t = np.where(self.phases > 0, over[:, None], -np.inf).max(axis=0, initial=-np.inf)
        scale = max(float(np.abs(t).max(initial=0.0)), 1e-9)
        t = t + 0.1 * scale
        slack = np.where(timed, self.phases @ t - over, np.maximum(-over, 0.1))
        prices = np.where(timed, 1.0 / slack, 0.0)
        prices = np.where(timed, prices / np.maximum(self.phases @ (self.phases.T @ prices), 1e-300), 0.1)
        dual = self.cost + self.priced(prices)
        least = (dual + self.barred).min(axis=1, keepdims=True)
        mean = (dual * self.mask).sum(axis=1, keepdims=True) / self.mask.sum(axis=1, keepdims=True)
        level = least - 0.1 * (mean - least) - 1e-4 * np.abs(least) - 1e-9
        z = (dual - level) * self.mask + self.closed
        return _Point(x, slack, t, z, prices)

    def _step(self, point: _Point, missing: np.ndarray) -> tuple[_Point, float] | None:
        """The next point and the complementarity it aims at; None when the equations cannot be solved."""
        x, slack, t, z, prices = point
        newton = _Newton(self, point, missing)
        try:
            newton.prepare()
        except np.linalg.LinAlgError:
            return None
        gaps, slack_gaps = x * z * self.mask, slack * prices
        total = float(gaps.sum() + slack_gaps.sum())
        trial = newton.direction(-gaps, -slack_gaps)
        by, dual_by = _reach(point, trial)
        after = float(
            np.vdot((x + by * trial.x) * self.mask, z + dual_by * trial.z)
            + (slack + by * trial.slack) @ (prices + dual_by * trial.prices)
        )
        aim = total / (self.options + len(slack)) * min(1.0, after / total) ** 3
        move = newton.direction(
            (aim - gaps - trial.x * trial.z) * self.mask, aim - slack_gaps - trial.slack * trial.prices
        )
        by, dual_by = (min(1.0, _STEP * reach) for reach in _reach(point, move))
        return _Point(
            x + by * move.x,
            slack + by * move.slack,
            t + by * move.t,
            z + dual_by * move.z,
            prices + dual_by * move.prices,
        ), aim


class _Newton:
    """The equations of one step, reduced to the places."""

    def __init__(self, problem: _Solver, point: _Point, missing: np.ndarray) -> None:
        self.problem, self.point, self.missing = problem, point, missing
        self.weight = point.x / point.z * problem.mask
        self.total = self.weight @ problem.each

    def prepare(self) -> None:
        """Factors the matrix of places.

        Raises:
            LinAlgError: it is singular.
        """
        normal = self._normal()
        normal.reshape(-1)[:: len(normal) + 1] += self.point.slack / self.point.prices
        phases = self.problem.phases
        self.factor = _factor(normal)
        self.towards_t = dpotrs(self.factor, phases)[0]
        self.of_t = _factor(phases.T @ self.towards_t)

    def _normal(self) -> np.ndarray:
        """G (W - W 1 1' W / total) G' for the weights W of the options."""
        work, flat = self.problem.rows_work, self.problem.flat_work
        mean = np.matmul(self.weight[:, None], work)[:, 0]
        mean /= np.sqrt(self.total)[:, None]
        return flat.T @ (flat * self.weight.reshape(-1, 1)) - mean.T @ mean

    def direction(self, gaps: np.ndarray, slack_gaps: np.ndarray) -> _Point:
        """The move after which products of primal and dual variables have changed by `gaps`, to first order."""
        problem, point = self.problem, self.point
        free = gaps / point.z
        surplus = free @ problem.each
        wanted = problem.work(free - self.weight * (surplus / self.total)[:, None])
        wanted += slack_gaps / point.prices - self.missing
        base = dpotrs(self.factor, wanted)[0]
        t = dpotrs(self.of_t, base @ problem.phases)[0]
        prices = base - self.towards_t @ t
        priced = problem.priced(prices)
        level = ((self.weight * priced) @ problem.each - surplus) / self.total
        z = (priced - level[:, None]) * problem.mask
        return _Point(free - self.weight * z, (slack_gaps - point.slack * prices) / point.prices, t, z, prices)


def _factor(matrix: np.ndarray) -> np.ndarray:
    """The Cholesky factor of a symmetric matrix.

    Raises:
        LinAlgError: it has none.
    """
    factor, failed = dpotrf(matrix)
    if failed:
        raise np.linalg.LinAlgError("not positive definite")
    return factor


def _reach(point: _Point, move: _Point) -> tuple[float, float]:
    """How far along a move all primal, and all dual variables stay positive; at most 1 / _STEP."""
    # There may be no options at all: no adapters, and KV whose place is settled.
    primal = max(-(move.x / np.maximum(point.x, 1e-300)).min(initial=0.0), -(move.slack / point.slack).min())
    dual = max(-(move.z / point.z).min(initial=0.0), -(move.prices / point.prices).min())
    return 1.0 / max(primal, _STEP), 1.0 / max(dual, _STEP)
