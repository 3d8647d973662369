"""From shares to strategies: decisions near a relaxed one, mended by moves that are tried on the objective itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from strategies.native import planner_calls
from strategies.planner.decision import Decision, Moves
from strategies.planner.folded import Folded
from strategies.planner.implementation import either
from strategies.planner.improve import best_fraction, make_fit, single_moves
from strategies.planner.prices import Node, Prices, Shares

ENOUGH = 1e-3
"""Of the objective: a plan this near to the bound is not mended."""

SHARPNESS = (200.0, 1000.0)
_LEVELS = (200.0, 500.0, 1000.0, 3000.0)
"""Sharpness of prices from one round of mending, and of levelling, to the next."""

CLOSE = 40
"""Adapters nearest to a tie, which are mended."""

_DRAWS = 2
_GOLDEN = 0.6180339887498949


def rounded(folded: Folded, node: Node, relaxed: Shares, total: np.ndarray, *, bound_s: float) -> Decision:
    """A decision near the relaxed one.

    Args:
        folded: the problem.
        node: that was relaxed.
        relaxed: shares of all adapters or of some.
        total: [M, S] seconds of choices at the relaxed prices, with bytes.
        bound_s: no plan is better.
    """
    prices = relaxed.prices
    wanted = folded.most_kv if prices.joint > 0 else relaxed.fraction
    decision = Decision(folded, np.zeros(len(folded.rows), int), attention=node.attention, fraction=wanted)
    byte_s = 3 * prices.adapter_byte + bound_s / max(1.0, folded.most_bytes)
    near(decision, node, relaxed, total, byte_s=byte_s, enough_s=bound_s * (1 + ENOUGH))
    return decision


@either(planner_calls.near)
def near(decision: Decision, node: Node, relaxed: Shares, total: np.ndarray, *, byte_s: float, enough_s: float) -> None:
    """Makes a decision one near the relaxed one.

    Args:
        decision: to change, whatever its columns are; keeps its attention strategy and what it wants of P but where
            others are better at last.
        node, relaxed, total: as of `rounded`.
        byte_s: what a byte counts that does not fit.
        enough_s: a decision that is worth no more is not mended.
    """
    folded, prices = decision.folded, relaxed.prices
    open_ = _open(folded, node)
    usable = total if open_ is None else np.where(open_, total, np.inf)
    shares = relaxed.shares if len(relaxed.shares) == len(folded.rows) else _shares(usable, prices)

    def worth(decision: Decision) -> float:
        return decision.value() + byte_s * float(decision.overshoot(decision.bytes))

    decision.take(min(_roundings(decision, shares), key=worth))
    for sharpness in _LEVELS:
        if worth(decision) <= enough_s:
            break
        level(decision, relaxed, usable, sharpness=sharpness, byte_s=byte_s)
    make_fit(decision, total, prices.adapter_byte)
    if decision.value() > enough_s:
        mend(decision, usable)
    best_fraction(decision)


def _open(folded: Folded, node: Node) -> np.ndarray | None:
    """[M, S], columns that a node allows, all where it allows none; None: everything."""
    if node.columns.all():
        return None
    usable = folded.allowed & (node.columns | ~folded.active[:, None])
    return usable | ~usable.any(axis=1, keepdims=True)


def _shares(total: np.ndarray, prices: Prices) -> np.ndarray:
    """The relaxed decision of all adapters at prices that were found from a few."""
    away = total - total.min(axis=1, keepdims=True)
    shares = prices.softness / (away + prices.softness)
    return shares / shares.sum(axis=1, keepdims=True)


def level(decision: Decision, relaxed: Shares, total: np.ndarray, *, sharpness: float, byte_s: float) -> None:
    """Moves adapters that are near a tie away from what the decision loads more than the relaxation did."""
    folded, rows, prices = decision.folded, decision.folded.rows, relaxed.prices
    over = decision.fraction < relaxed.fraction or not decision.fits
    places = 0.5 * prices.places + 0.5 * decision.prices(sharpness)
    leaning = folded.costs(places) + prices.adapter_byte * (1.2 if over else 0.9) * folded.bytes
    leaning[np.isinf(total)] = np.inf
    to = leaning.argmin(axis=1)
    gain = leaning[rows, decision.columns] - leaning[rows, to]
    rising = np.flatnonzero((gain > 0) & np.isfinite(gain))
    gain = gain[rising]
    loss = np.maximum(total[rising, to[rising]] - total[rising, decision.columns[rising]], 0.0)
    order = rising[np.argsort(loss / gain, kind="stable")]
    moves = Moves(order, to[order])
    decision.take_best(moves, sharpness=sharpness, byte_price=byte_s)


def _roundings(decision: Decision, shares: np.ndarray) -> Iterator[Decision]:
    """The largest share of everyone; and shares drawn by sequences that are even over any few neighbours."""
    folded, kv = decision.folded, {"attention": decision.attention, "fraction": decision.wanted}
    largest = shares.argmax(axis=1)
    yield Decision(folded, largest, **kv)
    edges = shares.cumsum(axis=1)
    for draw in range(_DRAWS):
        at = (_GOLDEN * folded.by_home + draw / _DRAWS) % 1 * 0.998 + 0.001
        column = np.minimum((edges < at[:, None]).sum(axis=1), shares.shape[1] - 1)
        yield Decision(folded, np.where(shares[folded.rows, column] > 1e-6, column, largest), **kv)


def mend(decision: Decision, total: np.ndarray) -> None:
    """Single moves of the adapters that are nearest to a tie."""
    rows = closest(decision, total, CLOSE)
    for sharpness in (*SHARPNESS, None):
        single_moves(decision, rows, sharpness=sharpness, rounds=4)
    best_fraction(decision)


@either(planner_calls.closest)
def closest(decision: Decision, total: np.ndarray, number: int) -> np.ndarray:
    """A number of adapters, or all, nearest to a tie between strategies at some prices; in any order."""
    folded = decision.folded
    if len(folded.rows) <= number:
        return folded.rows
    now = total[folded.rows, decision.columns]
    now = np.where(np.isfinite(now), now, 0.0)
    away = total - now[:, None]
    away[folded.rows, decision.columns] = np.inf
    closeness = away.min(axis=1) / np.maximum(np.abs(now), 1e-30)
    return np.argsort(closeness, kind="stable")[:number]


@either(planner_calls.pressing)
def pressing(decision: Decision, *, sharpness: float, number: int) -> np.ndarray:
    """A number of adapters, or all, whose leaving would relieve the busiest places most; in any order."""
    folded = decision.folded
    costs = folded.costs(decision.prices(sharpness))
    gain = costs[folded.rows, decision.columns] - costs.min(axis=1)
    return np.argsort(-gain, kind="stable")[:number]
