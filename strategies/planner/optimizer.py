"""The joint choice: which strategy serves each adapter, how KV is attended, and how much of it is on the device.

All adapters share what bounds a phase and the device's memory, so none can be decided alone. Prices of a second on
every place and of a byte come from the linear relaxation; adapters that have a clear best strategy at these prices take
it, those at a tie are rounded, and what rounding spoils is mended by moves that are tried on the objective itself. Sets
of strategies in use (each has fixed charges) and attention strategies are parts of the search: bounds from the prices
say which of them can still hold something better. Simple plans are candidates, so none of them is better. Where the
best plan is far from its bound still, everyone is relaxed at once, and the best decisions walk out of local optima.

From an earlier answer (`Duals`) only moves at its prices are tried: prices change slowly, and few adapters with them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from strategies.planner.decision import Decision
from strategies.planner.filling import fillings
from strategies.planner.folded import Folded, num_places, sample
from strategies.planner.improve import best_fraction, exchanges, make_fit, single_moves, take_cheapest, wander
from strategies.planner.prices import Node, Nodes, Part, Prices, Shares, lower_bounds, nodes, relax
from strategies.planner.problem import Plan, PlanError, PlanProblem, evaluate
from strategies.planner.rounding import CLOSE, SHARPNESS, closest, pressing, rounded
from strategies.planner.settled import Settled, settled

_SAMPLE = 44
"""Adapters that are heavy, and as many that stand for the others, where prices are found from fewer than all."""

_GAP = 1e-3
"""Of the objective, where the relaxation stops."""

_SAMPLE_GAP = 4e-3
"""The same where prices are found from some adapters: more would be lost on the choice of these."""

_GUIDE_GAP = 1e-2
"""The same where prices only say which part of the plans to look into first."""

_WORTH = 1e-2
"""Of the objective: a part of the plans that can hold no more than this is not looked into."""

_NODES = 5
"""Parts that are looked into at most."""

_FAR = 0.01
"""Of the objective: a plan this far from its bound is looked at harder."""

_REFINED = 16
"""Adapters nearest to a tie that a start from an earlier answer mends."""

_TIE_BREAK = 3e-3
"""Of the objective: noise on costs, so that most of equal adapters are decided by the relaxation."""

_AFFORDABLE = 4e6
"""Adapters x strategies x places x places that are relaxed together at most."""

_POLISHED = 4
"""Decisions that are polished at last."""

_TIGHT = 0.97
"""Of the longest place of its phase: a place with more has a price from then on."""

_WANDERED, _STEPS = (300.0, 1000.0), 60
"""Sharpness of walks from a plan that is far from its bound, and how long they are."""

_LEADING = 0.3
"""Of the longest place of its phase, in any simple plan: what has less than this in all of them has no price."""


class Duals(NamedTuple):
    """What the next plan of nearly the same problem starts from.

    Attributes:
        strategy: [N] columns of the plan.
        attention: index of its attention strategy.
        fraction: its P.
        used: [S] bool, columns of active adapters.
        places: prices of a second of load, of all places.
        joint, adapters, softness: as of `Prices`.
        costs: [N, S] seconds of every choice at these prices, with its bytes.
        bound_s: no plan of that problem has a smaller objective (after a start: none with the same strategies in use).
    """

    strategy: np.ndarray
    attention: int
    fraction: float
    used: np.ndarray
    places: np.ndarray
    joint: float
    adapters: float
    softness: float
    costs: np.ndarray
    bound_s: float


class _Found(NamedTuple):
    """A decision, the part of the plans and the relaxation it came from, costs at its prices with bytes, its places."""

    decision: Decision
    value_s: float
    node: Node
    relaxed: Shares
    total: np.ndarray
    leading: np.ndarray


class _Outcome(NamedTuple):
    """A decision, prices that support it, costs at these with bytes, and a bound; rows that needed none."""

    decision: Decision
    prices: Prices
    total: np.ndarray
    bound_s: float
    known: Settled | None = None


def optimize(
    problem: PlanProblem,
    start: Duals | None = None,
    *,
    candidates: Sequence[Plan] = (),
    max_seconds: float = np.inf,
) -> tuple[Plan, Duals]:
    """The plan of least objective that was found, which fits all limits, and where to start next time.

    Args:
        problem: what is decided.
        start: of a problem with the same adapters in the same order and the same columns; makes it several times
            faster where little has changed.
        candidates: plans of this problem that fit; the answer is not worse than any of them.
        max_seconds: after which no other improvement is begun.

    Raises:
        PlanError: nothing fits: pinned adapters and KV that must be on the device exceed the budget.
    """
    until = time.perf_counter() + max_seconds
    outcome = None
    if start is not None and len(start.strategy) == problem.num_adapters and len(start.places) == num_places(problem):
        outcome = _refined(problem, start)
    if outcome is None:
        outcome = _searched(Folded(problem), until)
    decision, prices, total, bound_s, known = outcome
    folded = decision.folded
    kv = problem.kv
    columns = folded.all_columns(decision.columns, decision.fraction * kv.device_bytes)
    plan = evaluate(problem, columns, kv.strategies[decision.attention], decision.fraction)
    plan = min([plan, *candidates], key=lambda plan: plan.objective_s)
    places = np.zeros(num_places(problem))
    places[folded.keep] = prices.places
    costs = problem.move_s + prices.adapter_byte * problem.device_bytes
    costs[folded.live] = total
    if known is not None:
        costs[known.rows] = known.costs
    attention = kv.strategies.index(plan.attention)
    used = np.bincount(plan.strategy[problem.active], minlength=folded.num_columns) > 0
    return plan, Duals(plan.strategy, attention, plan.kv_fraction, used, places, *prices[1:], costs, bound_s)


def _simple(folded: Folded) -> list[Decision]:
    """Everyone in the strategy of fewest bytes; and for each strategy, everyone in it who fits, the others fetched."""
    problem = folded.problem
    fetch = problem.strategies.index("fetch") if "fetch" in problem.strategies else None
    columns, free = fillings(folded, problem.current[folded.live], fetch)
    if free < -1e-9 * max(1.0, problem.budget_bytes):
        raise PlanError(
            f"{problem.budget_bytes:.0f} bytes of device memory cannot hold the "
            f"{folded.adapter_budget_bytes - free + folded.rest_bytes:.0f} of pinned adapters and the "
            f"{problem.kv.min_fraction * problem.kv.device_bytes:.0f} of KV that is being written: "
            "unpin adapters, run fewer sequences or raise the budget"
        )
    decisions = [Decision(folded, each, attention=0, fraction=problem.kv.min_fraction) for each in columns]
    for decision in decisions:
        best_fraction(decision)
    return decisions


def _searched(folded: Folded, until: float) -> _Outcome:
    """Looks into the most promising part of the plans until none is left that could be better."""
    decisions = _simple(folded)
    simple, leading = min(decisions, key=Decision.value), _leading(folded, decisions)
    scale_s = max(simple.value(), 1e-30)
    among, few = nodes(folded), _sample(folded)
    gap = _GAP if len(few.rows) == len(folded.rows) else _SAMPLE_GAP
    first = Node(simple.attention, np.ones(folded.num_columns, bool), charged=False)
    relaxed = relax(folded, first, few, leading, scale_s=scale_s, gap=_GUIDE_GAP if folded.has_fixed else gap)
    total = _total(folded, relaxed.prices)
    bounds = lower_bounds(folded, relaxed.prices, total, among)
    open_, lost, best = np.ones(len(among), bool), None, None
    for turn in range(_NODES):
        at = int(np.where(open_, bounds, np.inf).argmin())
        if best is not None and bounds[at] + 0.5 * (lost or 0.0) > (1 - _WORTH) * best.value_s:
            break
        open_[at] = False
        if turn or folded.has_fixed or not _alike(first, among[at]):
            relaxed = relax(folded, among[at], few, leading, scale_s=scale_s, gap=gap)
            total = _total(folded, relaxed.prices)
            bounds = np.maximum(bounds, lower_bounds(folded, relaxed.prices, total, among))
        decision = rounded(folded, among[at], relaxed, total, bound_s=float(bounds[at]))
        decisions.append(decision)
        found = _Found(decision, decision.value(), among[at], relaxed, total, leading)
        missed = max(0.0, found.value_s - float(bounds[at]))
        lost = missed if lost is None else min(lost, missed)
        leading = np.union1d(leading, _longest(decision))
        if best is None or found.value_s < best.value_s:
            best = found
        if not open_.any() or time.perf_counter() > until:
            break
    assert best is not None
    if scale_s < best.value_s:
        best = best._replace(decision=simple, value_s=scale_s)
    if best.value_s > float(bounds.min()) * (1 + _FAR):
        best = _harder(folded, best, decisions, among, bounds, until)
    return _Outcome(best.decision, best.relaxed.prices, best.total, float(bounds.min()))


def _leading(folded: Folded, decisions: Sequence[Decision]) -> np.ndarray:
    """Indices of places that are long in some of the decisions, with KV on the device or in the pool."""
    ways = np.vstack([folded.kv_device, folded.kv_pool])
    loads = np.stack([decision.adapter_loads() for decision in decisions])[:, None] + ways
    longest = np.maximum.reduceat(loads, folded.starts, axis=-1)[..., folded.phase_of]
    return np.flatnonzero((loads >= _LEADING * longest).any(axis=(0, 1)))


def _total(folded: Folded, prices: Prices) -> np.ndarray:
    return folded.costs(prices.places) + prices.adapter_byte * folded.bytes


def _harder(
    folded: Folded, best: _Found, decisions: list[Decision], among: Nodes, bounds: np.ndarray, until: float
) -> _Found:
    """What takes longer: relaxes everyone where the best plan was found or may be, and polishes; raises bounds."""
    likely = among[int(bounds.argmin())]
    for node in [best.node] if _alike(best.node, likely) else [likely, best.node]:
        if time.perf_counter() > until:
            return best
        again = _undecided(folded, best, node, bound_s=float(bounds.min()))
        np.maximum(bounds, lower_bounds(folded, again.relaxed.prices, again.total, among), out=bounds)
        decisions.append(again.decision)
        if again.value_s < best.value_s:
            best = again
    for decision in sorted(decisions, key=Decision.value)[:_POLISHED]:
        if best.value_s <= float(bounds.min()) * (1 + _FAR) or time.perf_counter() > until:
            break
        _polish(decision, best, until)
        if (value_s := decision.value()) < best.value_s:
            best = best._replace(decision=decision, value_s=value_s)
    return best


def _undecided(folded: Folded, best: _Found, node: Node, *, bound_s: float) -> _Found:
    """Relaxes everyone, or those nearest to a tie and the others as prices say where that are too many."""
    affordable = int(_AFFORDABLE / (folded.num_columns * len(best.leading) ** 2))
    rows = np.sort(closest(best.decision, best.total, affordable))
    others = _others(folded, rows)
    columns = best.total[others].argmin(axis=1)
    loads = folded.base + folded.work[others, columns].sum(axis=0)
    part = Part(rows, np.ones(len(rows)), loads, float(folded.bytes[others, columns].sum()))
    leading = np.union1d(best.leading, _longest(best.decision))
    relaxed = relax(folded, node, part, leading, scale_s=best.value_s, gap=_GAP / 2, tie_break=_TIE_BREAK)
    shares = np.zeros(folded.own.shape)
    shares[others, columns] = 1.0
    shares[rows] = relaxed.shares
    relaxed = relaxed._replace(shares=shares)
    total = _total(folded, relaxed.prices)
    decision = rounded(folded, node, relaxed, total, bound_s=bound_s)
    return _Found(decision, decision.value(), node, relaxed, total, leading)


def _longest(decision: Decision) -> np.ndarray:
    """Indices of places that are about the longest of their phases."""
    folded, loads = decision.folded, decision.all_loads()
    longest = np.maximum.reduceat(loads, folded.starts)[folded.phase_of]
    return np.flatnonzero(loads >= _TIGHT * longest)


def _alike(node: Node, other: Node) -> bool:
    return node[0] == other[0] and node.whole == other.whole and bool((node.columns == other.columns).all())


def _polish(decision: Decision, near: _Found, until: float) -> None:
    """Moves and exchanges among many adapters."""
    before = decision.copy()
    rows = np.union1d(
        closest(decision, near.total, CLOSE), pressing(decision, sharpness=SHARPNESS[-1], number=_REFINED)
    )
    for sharpness in (*SHARPNESS, None):
        single_moves(decision, rows, sharpness=sharpness, rounds=4)
        exchanges(decision, rows, sharpness=sharpness, rounds=6)
        if time.perf_counter() > until:
            break
    best_fraction(decision)
    if len(rows) == len(decision.folded.rows):  # walks among some of many adapters find next to nothing
        for sharpness in _WANDERED:
            if time.perf_counter() < until:
                wander(decision, rows, sharpness=sharpness, steps=_STEPS)
    if decision.value() > before.value():
        decision.take(before)


def _sample(folded: Folded) -> Part:
    """Adapters whose prices are those of all: the heaviest ones as they are, others by a few that stand for them."""
    n = len(folded.rows)
    if n <= 2 * _SAMPLE:
        return Part(folded.rows, np.ones(n), folded.base, 0.0)
    weight = np.repeat([1.0, (n - _SAMPLE) / _SAMPLE], _SAMPLE)
    return Part(sample(folded, _SAMPLE), weight, folded.base, 0.0)


def _others(folded: Folded, rows: np.ndarray) -> np.ndarray:
    others = np.ones(len(folded.rows), bool)
    others[rows] = False
    return np.flatnonzero(others)


def _refined(problem: PlanProblem, start: Duals) -> _Outcome | None:
    """The earlier plan, after the moves that its prices ask for now; None if it cannot be made to fit."""
    known = settled(problem, start.strategy, start.places, start.joint + start.adapters)
    folded = Folded(problem, settled=(known.rows, known.columns))
    kv, rows = problem.kv, folded.rows
    prices = Prices(start.places[folded.keep], start.joint, start.adapters, start.softness)
    total = _total(folded, prices)
    usual = np.where(start.used | ~folded.active[:, None], total, np.inf)
    usual = np.where(np.isinf(usual.min(axis=1, keepdims=True)), total, usual)
    columns = start.strategy[folded.live].astype(int)
    columns = np.where(np.isfinite(usual[rows, columns]), columns, usual.argmin(axis=1))
    # Interior points leave a price on what does not bind.
    scarce = start.joint * kv.device_bytes > _GAP * start.bound_s
    wanted = folded.most_kv if scarce else start.fraction
    decision = Decision(folded, columns, attention=start.attention, fraction=wanted)
    make_fit(decision, total, prices.adapter_byte)
    if not decision.fits:
        return None
    take_cheapest(decision, usual)
    single_moves(decision, closest(decision, total, _REFINED), sharpness=None, rounds=1)
    best_fraction(decision)
    ways = [(attention, False) for attention in range(len(kv.strategies))] + [(0, True)]
    among = Nodes(Node(attention, decision.count > 0, whole) for attention, whole in ways)
    return _Outcome(decision, prices, total, float(lower_bounds(folded, prices, total, among).min()), known)
