"""Improvements of a decision: make it fit, the best P, single moves, exchanges of two, and of a few.

All of them change a `Decision` in place, and none makes one that fits dearer or unfit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from strategies.native import planner_calls
from strategies.planner.decision import Decision, Moves
from strategies.planner.implementation import either
from strategies.planner.prices import Node, fractions

_AT_ONCE = 16
"""Single moves tried together."""

_EXCHANGES = 48
"""Most promising moves of which all pairs are tried."""

_BARRED = 4
"""Steps at least for which a row does not go back; twice as many at most."""

_DEAR_BYTES = 3.0
"""Price of bytes that do not fit, from which the step would cost as much more if everything were on the device."""

_DEAR = 1e30
"""Seconds of a column that nobody should have."""

_WORTH = 1e-6
"""Of a row's cost: it is not taken to its cheapest column for less."""

_GAIN = 1e-9
"""Of the step: smaller gains are rounding."""


@either(planner_calls.take_cheapest)
def take_cheapest(decision: Decision, total: np.ndarray) -> None:
    """Takes everyone to its cheapest column, the largest relative gains first, as far as that is best.

    Args:
        decision: to change.
        total: [M, S] seconds, costs at some prices; inf: not to be used.
    """
    rows, to = decision.folded.rows, total.argmin(axis=1)
    now = total[rows, decision.columns]
    now = np.where(np.isfinite(now), now, _DEAR)
    gain = (now - total[rows, to]) / np.maximum(np.abs(now), 1e-30)
    rising = np.flatnonzero(gain > _WORTH)
    order = rising[np.argsort(-gain[rising], kind="stable")]
    if len(order):
        decision.take_best(Moves(order, to[order]), sharpness=None, byte_price=np.inf)


@either(planner_calls.make_fit)
def make_fit(decision: Decision, total: np.ndarray, adapter_byte: float) -> None:
    """Brings a decision within all limits, by the least cost a byte.

    Args:
        decision: to change.
        total: [M, S] seconds, costs at prices near those of the decision and `adapter_byte` a byte.
        adapter_byte: seconds a byte.
    """
    costs = total - adapter_byte * decision.folded.bytes
    for _ in range(decision.folded.num_columns):
        over = decision.bytes - decision.folded.adapter_budget_bytes
        if over <= 0:
            return
        _shed(decision, costs, over)


def _shed(decision: Decision, costs: np.ndarray, over: float) -> None:
    """Moves adapters to columns of fewer bytes until `over` bytes are free."""
    folded = decision.folded
    now = decision.columns
    freed = folded.bytes[folded.rows, now][:, None] - folded.bytes
    loss = costs - costs[folded.rows, now][:, None]
    rate = np.where((freed > 0) & folded.allowed, loss / np.maximum(freed, 1e-300), np.inf)
    to = rate.argmin(axis=1)
    order = np.argsort(rate[folded.rows, to], kind="stable")
    order = order[np.isfinite(rate[order, to[order]])]
    total = np.cumsum(freed[order, to[order]])
    decision.apply(Moves(order, to[order]), min(int(np.searchsorted(total, over)) + 1, len(order)))


@either(planner_calls.best_fraction)
def best_fraction(decision: Decision) -> None:
    """Gives KV the best attention strategy and P for the adapters as they are, exactly."""
    folded, kv = decision.folded, decision.folded.problem.kv
    most = min(folded.most_kv, folded.problem.max_fraction(decision.bytes + folded.rest_bytes))
    if most < kv.min_fraction:
        return
    edges = fractions(folded, Node(0, np.ones(0, bool)))
    here = folded.kv_places
    without_kv, fraction = decision.adapter_loads()[here], decision.fraction
    best, best_s = None, np.inf
    trial = decision.copy()
    for attention in range(len(kv.strategies)):
        trial.attention = attention
        at_zero = without_kv + folded.kv_pool[attention, here]
        slope = folded.kv_device[here] - folded.kv_pool[attention, here]
        tried = [fraction] if kv.min_fraction <= fraction <= most else []
        for low, high, move_s in ((edges[0], min(edges[1], most), 0.0), (edges[1], most, kv.move_s)):
            if high >= low:
                tried += _bends(at_zero, slope, move_s, between=(float(low), float(high)))
        at = np.array(tried)
        values = (at_zero + at[:, None] * slope).max(axis=1) + trial.kv_own(at)
        if values.min() < best_s:
            best, best_s = (attention, tried[int(values.argmin())]), float(values.min())
    if best is not None:
        decision.attention, decision.wanted = best
        if decision.wanted >= most * (1 - 1e-12):
            decision.wanted = float(edges[-1])  # more, once there is room


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
    folded, now = decision.folded, decision.columns[rows]
    loads = folded.work[rows] - folded.work[rows, now][:, None]
    own = folded.own[rows] - folded.own[rows, now][:, None]
    if folded.has_fixed:
        acting = folded.active[rows]
        for column in np.flatnonzero(decision.count == 0):
            loads[acting, column] += folded.fixed[column]
            own[acting, column] += folded.fixed_serial[column]
        for at in np.flatnonzero(acting & (decision.count[now] == 1)):
            other = np.arange(folded.num_columns) != now[at]
            loads[at, other] -= folded.fixed[now[at]]
            own[at, other] -= folded.fixed_serial[now[at]]
    return _Singles(loads, own, folded.bytes[rows] - folded.bytes[rows, now][:, None])


def _values(decision: Decision, loads: np.ndarray, bytes_: np.ndarray, rate: float | None) -> np.ndarray:
    """Seconds of the longest places and of KV after changes of loads [..., K] and bytes [...]."""
    return decision.after(decision.adapter_loads() + loads, decision.bytes + bytes_, rate)


@either(planner_calls.single_moves)
def single_moves(decision: Decision, rows: np.ndarray, *, sharpness: float | None, rounds: int) -> None:
    """Takes the best single moves of some rows, several at once, until none helps.

    Args:
        decision: to change.
        rows: adapters that may move.
        sharpness: None: gains in the objective itself. A number: gains where all places near the longest of a phase
            count, so that a phase bound by several places is left step by step.
        rounds: at most.
    """
    for _ in range(rounds if len(rows) else 0):
        singles = _singles(decision, rows)
        values = _values(decision, singles.loads, singles.bytes, decision.rate(sharpness)) + singles.own
        still = float(values[0, decision.columns[rows[0]]])
        values[decision.overshoot(decision.bytes + singles.bytes) > 0] = np.inf
        to = values.argmin(axis=1)
        gain = still - values[np.arange(len(rows)), to]
        order = np.argsort(-gain, kind="stable")[:_AT_ONCE]
        order = order[gain[order] > _GAIN * abs(still)]
        if not len(order):
            return
        moves = Moves(rows[order], to[order])
        _, number = decision.ladder(moves, sharpness=sharpness, byte_price=np.inf)
        if number == 0:
            return
        decision.apply(moves, number)


@either(planner_calls.exchanges)
def exchanges(decision: Decision, rows: np.ndarray, *, sharpness: float | None, rounds: int) -> None:
    """Takes the best pair of moves of two rows, until no pair helps: one may free what the other needs.

    Args:
        decision: to change.
        rows: adapters that may move.
        sharpness: as of `single_moves`.
        rounds: at most.
    """
    s = decision.folded.num_columns
    for _ in range(rounds if len(rows) else 0):
        rate, singles = decision.rate(sharpness), _singles(decision, rows)
        values = _values(decision, singles.loads, singles.bytes, rate) + singles.own
        still = float(values[0, decision.columns[rows[0]]])
        values -= still
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
        pairs = _values(decision, loads[a] + loads[b], bytes_[a] + bytes_[b], rate) + own[a] + own[b] - still
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


def wander(decision: Decision, rows: np.ndarray, *, sharpness: float | None, steps: int) -> None:
    """Takes the best single move again and again, also where it loses, and keeps the best decision on the way.

    A row does not go back to where it was for some steps, which leads out of what single moves and exchanges end in.
    More bytes than fit are allowed on the way, at a price. Source: Glover's tabu search (ORSA J. Computing 1, 1989).

    Args:
        decision: to change.
        rows: adapters that may move.
        sharpness: as of `single_moves`.
        steps: single moves.
    """
    byte_s = _DEAR_BYTES * decision.value() / max(1.0, decision.folded.most_bytes)
    barred = np.random.default_rng(0).integers(_BARRED, 2 * _BARRED, steps)
    walk(decision, rows, barred, sharpness=sharpness, byte_s=byte_s)
    best_fraction(decision)


@either(planner_calls.walk)
def walk(decision: Decision, rows: np.ndarray, barred: np.ndarray, *, sharpness: float | None, byte_s: float) -> None:
    """The steps of `wander`: the row of each is barred from going back for as many; a byte too much costs `byte_s`."""
    folded, best, best_s = decision.folded, decision.copy(), decision.value()
    until = np.zeros((len(rows), folded.num_columns))
    at_row = np.arange(len(rows))
    for step, rest in enumerate(barred if len(rows) else ()):
        singles = _singles(decision, rows)
        values = _values(decision, singles.loads, singles.bytes, decision.rate(sharpness)) + singles.own
        values += byte_s * decision.overshoot(decision.bytes + singles.bytes)
        until[at_row, decision.columns[rows]] = np.maximum(until[at_row, decision.columns[rows]], step + 1)
        values[until > step] = np.inf
        row, column = divmod(int(values.argmin()), folded.num_columns)
        if not np.isfinite(values[row, column]):
            break
        until[row, decision.columns[rows[row]]] = step + 1 + rest
        decision.apply(Moves(rows[[row]], np.array([column])), 1)
        if decision.fits and (value_s := decision.value()) < best_s * (1 - _GAIN):
            best, best_s = decision.copy(), value_s
    decision.take(best)
