"""Improvements of a decision that keep what it is made of: make it fit, the best P, single moves, and exchanges of two.

All of them change a `Decision` in place, and none makes one that fits dearer or unfit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strategies.planner.decision import Decision, Moves
from strategies.planner.prices import Node, fractions

_AT_ONCE = 16
"""Single moves tried together."""

_EXCHANGES = 48
"""Most promising moves of which all pairs are tried."""

_TOGETHER = 4
"""Rows whose columns are tried in every combination."""

_GAIN = 1e-9
"""Of the step: smaller gains are rounding."""


def make_fit(decision: Decision, costs: np.ndarray) -> None:
    """Brings a decision within all limits, by the least cost a byte; P gives way where that is cheaper.

    Args:
        decision: to change.
        costs: [N, S] seconds, `Folded.costs` at prices near those of the decision.
    """
    problem, kv = decision.folded.problem, decision.folded.problem.kv
    for _ in range(decision.folded.num_columns):
        over = decision.bytes - problem.adapter_budget_bytes
        if over <= 0:
            break
        _shed(decision, costs, over)
    for _ in range(decision.folded.num_columns):
        over = float(decision.overshoot(decision.bytes, decision.fraction))
        if over <= 0:
            return
        options = []
        if (decision.fraction - kv.min_fraction) * kv.device_bytes >= over * (1 - 1e-9):
            fewer = decision.copy()
            fewer.fraction = max(kv.min_fraction, decision.fraction - over * (1 + 1e-9) / kv.device_bytes)
            options.append(fewer)
        smaller = decision.copy()
        if _shed(smaller, costs, over) or not options:
            options.append(smaller)
        decision.take(min(options, key=Decision.value))


def _shed(decision: Decision, costs: np.ndarray, over: float) -> bool:
    """Moves adapters to columns of fewer bytes until `over` bytes are free; says whether that many could be freed."""
    folded, problem = decision.folded, decision.folded.problem
    now = decision.columns
    freed = problem.device_bytes[folded.rows, now][:, None] - problem.device_bytes
    loss = costs - costs[folded.rows, now][:, None]
    rate = np.where((freed > 0) & problem.allowed, loss / np.maximum(freed, 1e-300), np.inf)
    to = rate.argmin(axis=1)
    order = np.argsort(rate[folded.rows, to])
    order = order[np.isfinite(rate[order, to[order]])]
    total = np.cumsum(freed[order, to[order]])
    number = min(int(np.searchsorted(total, over)) + 1, len(order))
    decision.apply(Moves(order, to[order], decision.fraction, 0), number, decision.fraction)
    return bool(number and total[number - 1] >= over)


def best_fraction(decision: Decision) -> None:
    """Gives KV the best attention strategy and P for the adapters as they are, exactly."""
    problem, kv = decision.folded.problem, decision.folded.problem.kv
    edges = fractions(decision.folded, Node(0, np.ones(0, bool)))
    most = min(float(edges[-1]), problem.max_fraction(decision.bytes))
    if most < kv.min_fraction:
        return
    without_kv = decision.all_loads()[kv.phase]
    without_kv -= decision.kv_loads(decision.fraction)
    best, best_s = None, np.inf
    trial = decision.copy()
    for attention in range(len(kv.strategies)):
        trial.attention = attention
        at_zero = without_kv + trial.kv_loads(0.0)
        slope = trial.kv_loads(1.0) - trial.kv_loads(0.0)
        tried = [decision.fraction] if kv.min_fraction <= decision.fraction <= most else []
        for low, high, move_s in ((edges[0], min(edges[1], most), 0.0), (edges[1], most, kv.move_s)):
            if high >= low:
                tried += _bends(at_zero, slope, move_s, between=(float(low), float(high)))
        at = np.array(tried)
        values = (at_zero + at[:, None] * slope).max(axis=1) + trial.kv_own(at)
        if values.min() < best_s:
            best, best_s = (attention, tried[int(values.argmin())]), float(values.min())
    if best is not None:
        decision.attention, decision.fraction = best


def _bends(at_zero: np.ndarray, slope: np.ndarray, move_s: float, *, between: tuple[float, float]) -> list[float]:
    """The ends, and where the largest of the places' lines in P is least: by tangents from both sides."""
    left, right = between
    ends = [left, right]
    for _ in range(len(slope)):
        a, b = int((at_zero + left * slope).argmax()), int((at_zero + right * slope).argmax())
        if slope[a] + move_s >= 0 or slope[b] + move_s <= 0 or a == b:
            return ends
        middle = min(max(float((at_zero[a] - at_zero[b]) / (slope[b] - slope[a])), left), right)
        at = int((at_zero + middle * slope).argmax())
        if at in (a, b) or middle in (left, right):
            return [*ends, middle]
        left, right = (middle, right) if slope[at] + move_s < 0 else (left, middle)
    return [*ends, left, right]


class _Singles(NamedTuple):
    """Every single move of some rows: [M, S] each, and loads of places [M, S, F, Q]."""

    loads: np.ndarray
    own: np.ndarray
    bytes: np.ndarray


def _singles(decision: Decision, rows: np.ndarray) -> _Singles:
    folded, problem, s = decision.folded, decision.folded.problem, decision.folded.num_columns
    now = decision.columns[rows]
    change = folded.load[rows] - folded.load[rows, now][:, None]
    shape = (len(rows), s, *folded.problem.load_s.shape[2:])
    loads = folded.places_of(change.reshape(shape), folded.home[rows])
    own = folded.own[rows] - folded.own[rows, now][:, None]
    if folded.has_fixed:
        acting, other = problem.active[rows], np.arange(s) != now[:, None]
        opens = acting[:, None] & (decision.count == 0)
        closes = (acting & (decision.count[now] == 1))[:, None] & other
        if opens.any() or closes.any():
            loads = loads + opens[..., None, None] * folded.fixed - closes[..., None, None] * folded.fixed[now][:, None]
            own = own + opens * folded.fixed_serial - closes * folded.fixed_serial[now][:, None]
    bytes_ = problem.device_bytes[rows] - problem.device_bytes[rows, now][:, None]
    return _Singles(loads, own, bytes_)


def single_moves(decision: Decision, rows: np.ndarray, *, sharpness: float | None, rounds: int) -> None:
    """Takes the best single moves of some rows, several at once, until none helps.

    Args:
        decision: to change.
        rows: adapters that may move.
        sharpness: None: gains in the objective itself. A number: gains where all places near the longest of a phase
            count, so that a phase bound by several places is left step by step.
        rounds: at most.
    """
    for _ in range(rounds):
        singles = _singles(decision, rows)
        base = decision.all_loads()
        values = _longest(base + singles.loads, base, sharpness).sum(axis=-1) + singles.own
        still = float(_longest(base, base, sharpness).sum())
        fits = decision.overshoot(decision.bytes + singles.bytes, decision.fraction) <= 0
        values = np.where(fits, values, np.inf)
        to = values.argmin(axis=1)
        gain = still - values[np.arange(len(rows)), to]
        order = np.argsort(-gain)[:_AT_ONCE]
        order = order[gain[order] > _GAIN * abs(still)]
        if not len(order):
            return
        moves = Moves(rows[order], to[order], decision.fraction, len(order))
        _, number, _ = decision.ladder(moves, sharpness=sharpness, byte_price=np.inf)
        if number == 0:
            return
        decision.apply(moves, number, decision.fraction)


def _longest(loads: np.ndarray, base: np.ndarray, sharpness: float | None) -> np.ndarray:
    longest = loads.max(axis=-1)
    if sharpness is None:
        return longest
    rate = sharpness / max(float(base.max(axis=-1).sum()), 1e-30)
    return longest + np.log(np.exp(rate * (loads - longest[..., None])).sum(axis=-1)) / rate


def exchanges(decision: Decision, rows: np.ndarray, *, sharpness: float | None, rounds: int) -> None:
    """Takes the best pair of moves of two rows, until no pair helps: one may free what the other needs.

    Args:
        decision: to change.
        rows: adapters that may move.
        sharpness: as of `single_moves`.
        rounds: at most.
    """
    s = decision.folded.num_columns
    for _ in range(rounds):
        singles, base = _singles(decision, rows), decision.all_loads()
        still = float(_longest(base, base, sharpness).sum())
        values = _longest(base + singles.loads, base, sharpness).sum(axis=-1) + singles.own - still
        values[np.arange(len(rows)), decision.columns[rows]] = np.inf
        number = min(_EXCHANGES, int(np.isfinite(values).sum()))
        if number < 2:
            return
        row, column = np.divmod(np.argpartition(values.reshape(-1), number - 1)[:number], s)
        a, b = np.triu_indices(number, 1)
        bytes_ = decision.bytes + singles.bytes[row[a], column[a]] + singles.bytes[row[b], column[b]]
        good = (row[a] != row[b]) & (decision.overshoot(bytes_, decision.fraction) <= 0)
        a, b = a[good], b[good]
        if not len(a):
            return
        loads, own = singles.loads[row, column], singles.own[row, column]
        pairs = _longest(base + loads[a] + loads[b], base, sharpness).sum(axis=-1) + own[a] + own[b] - still
        best = int(pairs.argmin())
        two = np.array([a[best], b[best]])
        moves = Moves(rows[row[two]], column[two], decision.fraction, 2)
        _, taken, _ = decision.ladder(moves, sharpness=sharpness, byte_price=np.inf)
        if pairs[best] > -_GAIN * abs(still) or taken == 0:
            return
        decision.apply(moves, taken, decision.fraction)


def regroup(decision: Decision, rows: np.ndarray, *, sharpness: float | None, rounds: int) -> None:
    """Tries all columns of a few rows together, drawn anew each round.

    Args:
        decision: to change.
        rows: adapters that may move, at least as many as are drawn.
        sharpness: as of `single_moves`.
        rounds: draws.
    """
    s = decision.folded.num_columns
    draw = np.random.default_rng(len(rows))
    columns = np.stack(np.meshgrid(*[np.arange(s)] * _TOGETHER, indexing="ij"), axis=-1).reshape(-1, _TOGETHER)
    for _ in range(rounds):
        few = draw.choice(rows, _TOGETHER, replace=False)
        singles, base = _singles(decision, few), decision.all_loads()
        at = np.arange(_TOGETHER)
        bytes_ = decision.bytes + singles.bytes[at, columns].sum(axis=1)
        own = singles.own[at, columns].sum(axis=1)
        good = np.flatnonzero((decision.overshoot(bytes_, decision.fraction) <= 0) & np.isfinite(own))
        loads = base + sum(singles.loads[row, columns[good, row]] for row in range(_TOGETHER))
        values = _longest(loads, base, sharpness).sum(axis=-1) + own[good]
        best = int(values.argmin())
        if values[best] < float(_longest(base, base, sharpness).sum()) * (1 - _GAIN):
            moves = Moves(few, columns[good[best]], decision.fraction, _TOGETHER)
            _, taken, _ = decision.ladder(moves, sharpness=sharpness, byte_price=np.inf)
            decision.apply(moves, taken, decision.fraction)
