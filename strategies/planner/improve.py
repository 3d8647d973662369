"""Improvements of a decision that keep what it is made of: make it fit, the best P, single moves, and exchanges of two.

All of them change a `Decision` in place, and none makes one that fits dearer or unfit.
"""

from __future__ import annotations

import functools
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

_DRAWN = 8
"""Draws of such rows at once."""

_GAIN = 1e-9
"""Of the step: smaller gains are rounding."""


def make_fit(decision: Decision, costs: np.ndarray) -> None:
    """Brings a decision within all limits, by the least cost a byte; P gives way where that is cheaper.

    Args:
        decision: to change.
        costs: [M, S] seconds, `Folded.costs` at prices near those of the decision.
    """
    folded, kv = decision.folded, decision.folded.problem.kv
    for _ in range(folded.num_columns):
        over = decision.bytes - folded.adapter_budget_bytes
        if over <= 0:
            break
        _shed(decision, costs, over)
    for _ in range(folded.num_columns):
        over = float(decision.overshoot(decision.bytes))
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
    folded = decision.folded
    now = decision.columns
    freed = folded.bytes[folded.rows, now][:, None] - folded.bytes
    loss = costs - costs[folded.rows, now][:, None]
    rate = np.where((freed > 0) & folded.allowed, loss / np.maximum(freed, 1e-300), np.inf)
    to = rate.argmin(axis=1)
    order = np.argsort(rate[folded.rows, to])
    order = order[np.isfinite(rate[order, to[order]])]
    total = np.cumsum(freed[order, to[order]])
    number = min(int(np.searchsorted(total, over)) + 1, len(order))
    decision.apply(Moves(order, to[order]), number)
    return bool(number and total[number - 1] >= over)


def best_fraction(decision: Decision) -> None:
    """Gives KV the best attention strategy and P for the adapters as they are, exactly."""
    folded = decision.folded
    problem, kv = folded.problem, folded.problem.kv
    edges = fractions(folded, Node(0, np.ones(0, bool)))
    most = min(float(edges[-1]), problem.max_fraction(decision.bytes + folded.rest_bytes))
    if most < kv.min_fraction:
        return
    here = folded.kv_places
    without_kv = (decision.all_loads() - decision.kv_loads(decision.fraction))[here]
    best, best_s = None, np.inf
    trial = decision.copy()
    for attention in range(len(kv.strategies)):
        trial.attention = attention
        at_zero = without_kv + folded.kv_pool[attention, here]
        slope = folded.kv_device[here] - folded.kv_pool[attention, here]
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
    """Every single move of some rows: [M, S] each, and loads of places [M, S, K]."""

    loads: np.ndarray
    own: np.ndarray
    bytes: np.ndarray


def _singles(decision: Decision, rows: np.ndarray) -> _Singles:
    folded, s = decision.folded, decision.folded.num_columns
    now = decision.columns[rows]
    loads = folded.work[rows] - folded.work[rows, now][:, None]
    own = folded.own[rows] - folded.own[rows, now][:, None]
    if folded.has_fixed:
        acting, other = folded.active[rows], np.arange(s) != now[:, None]
        opens = acting[:, None] & (decision.count == 0)
        closes = (acting & (decision.count[now] == 1))[:, None] & other
        if opens.any() or closes.any():
            loads = loads + opens[..., None] * folded.fixed - closes[..., None] * folded.fixed[now][:, None]
            own = own + opens * folded.fixed_serial - closes * folded.fixed_serial[now][:, None]
    return _Singles(loads, own, folded.bytes[rows] - folded.bytes[rows, now][:, None])


def _values(decision: Decision, changes: np.ndarray, rate: float | None) -> np.ndarray:
    """Seconds of the longest places after changes of loads [..., K]."""
    loads = decision.all_loads() + changes
    return decision.folded.longest(loads) if rate is None else decision.folded.soft_longest(loads, rate)


def _still(decision: Decision, rate: float | None) -> float:
    return float(_values(decision, np.zeros(len(decision.loads)), rate))


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
        rate = None if sharpness is None else decision.rate(sharpness)
        values = _values(decision, singles.loads, rate) + singles.own
        still = _still(decision, rate)
        values = np.where(decision.overshoot(decision.bytes + singles.bytes) <= 0, values, np.inf)
        to = values.argmin(axis=1)
        gain = still - values[np.arange(len(rows)), to]
        order = np.argsort(-gain)[:_AT_ONCE]
        order = order[gain[order] > _GAIN * abs(still)]
        if not len(order):
            return
        moves = Moves(rows[order], to[order])
        _, number = decision.ladder(moves, sharpness=sharpness, byte_price=np.inf)
        if number == 0:
            return
        decision.apply(moves, number)


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
        rate = None if sharpness is None else decision.rate(sharpness)
        singles, still = _singles(decision, rows), _still(decision, rate)
        values = _values(decision, singles.loads, rate) + singles.own - still
        values[np.arange(len(rows)), decision.columns[rows]] = np.inf
        number = min(_EXCHANGES, int(np.isfinite(values).sum()))
        if number < 2:
            return
        row, column = np.divmod(np.argpartition(values.reshape(-1), number - 1)[:number], s)
        a, b = _pairs(number)
        bytes_, loads, own = (part[row, column] for part in (singles.bytes, singles.loads, singles.own))
        good = (row[a] != row[b]) & (decision.overshoot(decision.bytes + bytes_[a] + bytes_[b]) <= 0)
        a, b = a[good], b[good]
        if not len(a):
            return
        pairs = _values(decision, loads[a] + loads[b], rate) + own[a] + own[b] - still
        best = int(pairs.argmin())
        two = np.array([a[best], b[best]])
        moves = Moves(rows[row[two]], column[two])
        _, taken = decision.ladder(moves, sharpness=sharpness, byte_price=np.inf)
        if pairs[best] > -_GAIN * abs(still) or taken == 0:
            return
        decision.apply(moves, taken)


@functools.lru_cache(maxsize=64)
def _pairs(number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.triu_indices(number, 1)


@functools.lru_cache(maxsize=8)
def _together(num_columns: int) -> np.ndarray:
    """[S ** _TOGETHER, _TOGETHER], all columns of as many rows."""
    axes = [np.arange(num_columns)] * _TOGETHER
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, _TOGETHER)


def regroup(decision: Decision, rows: np.ndarray, *, sharpness: float | None, rounds: int) -> None:
    """Tries all columns of a few rows together, for several draws of rows at once.

    Args:
        decision: to change.
        rows: adapters that may move, at least as many as are drawn.
        sharpness: as of `single_moves`.
        rounds: of draws, each of which makes the best change that it finds.
    """
    folded, draw = decision.folded, np.random.default_rng(len(rows))
    columns = _together(folded.num_columns)
    for _ in range(rounds):
        few = draw.random((_DRAWN, len(rows))).argpartition(_TOGETHER - 1, axis=1)[:, :_TOGETHER]
        rate = None if sharpness is None else decision.rate(sharpness)
        singles = _singles(decision, rows)
        at = (few[:, None, :], columns)
        bytes_, own = (part[at].sum(axis=-1) for part in (singles.bytes, singles.own))
        good = np.nonzero((decision.overshoot(decision.bytes + bytes_) <= 0) & np.isfinite(own))
        loads = np.zeros((len(own[good]), len(decision.loads)))
        for one in range(_TOGETHER):
            loads += singles.loads[few[good[0], one], columns[good[1], one]]
        values = _values(decision, loads, rate) + own[good]
        best = int(values.argmin())
        if values[best] < _still(decision, rate) * (1 - _GAIN):
            moves = Moves(rows[few[good[0][best]]], columns[good[1][best]])
            _, taken = decision.ladder(moves, sharpness=sharpness, byte_price=np.inf)
            decision.apply(moves, taken)
