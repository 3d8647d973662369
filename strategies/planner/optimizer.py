"""The joint choice: which strategy serves each adapter, how KV is attended, and how much of it is on the device.

All adapters share what bounds a phase and the device's memory, so none can be decided alone. Prices of a second on
every place and of a byte come from the linear relaxation; adapters that have a clear best strategy at these prices take
it, those at a tie are rounded, and what rounding spoils is mended by moves that are tried on the objective itself. Sets
of strategies in use (each has fixed charges) and attention strategies are parts of the search: bounds from the prices
say which of them can still hold something better.

From an earlier answer (`Duals`) only the last part is done: prices change slowly, and few adapters with them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strategies.planner.decision import Decision, Moves
from strategies.planner.folded import Folded
from strategies.planner.improve import best_fraction, exchanges, make_fit, regroup, single_moves
from strategies.planner.policies import FixedPolicy
from strategies.planner.prices import Node, Part, Prices, Shares, lower_bounds, nodes, relax
from strategies.planner.problem import Plan, PlanError, PlanProblem, evaluate

_SAMPLE = 44
"""Adapters that are heavy, and as many that stand for the others, where prices are found from fewer than all."""

_GAP = 1e-3
"""Of the objective, where the relaxation stops."""

_WORTH = 1e-2
"""Of the objective: a part of the plans that can hold no more than this is not looked into."""

_NODES = 5
"""Parts that are looked into at most."""

_SAMPLE_GAP = 4e-3
"""The same where prices are found from some adapters: more would be lost on the choice of these."""

_CLOSE = 40
"""Adapters nearest to a tie, which are mended."""

_DIVE = 64
"""Undecided adapters, the heaviest, that are decided a few at a time."""

_FEW = 3
"""Undecided adapters that are decided at once."""

_ENOUGH = 1e-3
"""Of the objective: a plan this near to the bound is not mended."""

_FAR = 0.01
"""Of the objective: a plan this far from its bound is looked at harder."""

_REFINED = 16
"""Adapters nearest to a tie that a start from an earlier answer mends."""

_TIE_BREAK = 3e-3
"""Of the objective: noise on costs, so that most of equal adapters are decided by the relaxation."""

_MANY, _REGROUPED = 6, 50
"""Adapters from which a few are regrouped, and how often."""

_SHARPNESS = (200.0, 1000.0)
_LEVELS = (200.0, 500.0, 1000.0, 3000.0)
_MORE_LEVELS = (300.0, 1000.0, 3000.0) * 4
_POLISHED = 4
"""Sharpness of prices from one round of levelling to the next, and the decisions that are polished at last."""
_DRAWS = 2
_GOLDEN = 0.6180339887498949


class Duals(NamedTuple):
    """What the next plan of nearly the same problem starts from.

    Attributes:
        strategy: [N] columns of the plan.
        attention: index of its attention strategy.
        fraction: its P.
        prices: that supported it.
        bound_s: no plan of that problem has a smaller objective (after a start: none with the same strategies in use).
    """

    strategy: np.ndarray
    attention: int
    fraction: float
    prices: Prices
    bound_s: float


def optimize(problem: PlanProblem, start: Duals | None = None) -> tuple[Plan, Duals]:
    """The plan of least objective that was found, which fits all limits, and where to start next time.

    Args:
        problem: what is decided.
        start: of a problem with the same adapters in the same order and the same columns; makes it several times
            faster where little has changed.

    Raises:
        PlanError: nothing fits: pinned adapters and KV that must be on the device exceed the budget.
    """
    folded = Folded(problem)
    if start is not None and len(start.strategy) == problem.num_adapters:
        return _refined(folded, start)
    return _searched(folded)


def _smallest(folded: Folded) -> Decision:
    """Every adapter in its strategy of fewest bytes, the cheapest of these, and the best P beside them."""
    problem = folded.problem
    bytes_ = np.where(problem.allowed, problem.device_bytes, np.inf)
    fewest = bytes_ <= bytes_.min(axis=1, keepdims=True)
    alone = np.where(fewest, folded.load @ np.ones(folded.load.shape[-1]) + folded.own, np.inf)
    decision = Decision(folded, alone.argmin(axis=1), attention=0, fraction=problem.kv.min_fraction)
    if not decision.fits or decision.bytes > problem.adapter_budget_bytes * (1 + 1e-9):
        raise PlanError(
            f"{problem.budget_bytes:.0f} bytes of device memory cannot hold the {decision.bytes:.0f} of pinned "
            f"adapters and the {problem.kv.min_fraction * problem.kv.device_bytes:.0f} of KV that is being written: "
            "unpin adapters, run fewer sequences or raise the budget"
        )
    for attention in range(len(problem.kv.strategies)):
        trial = decision.copy()
        trial.attention, trial.fraction = attention, max(trial.fraction, problem.max_fraction(trial.bytes))
        if trial.fits and trial.value() < decision.value():
            decision.take(trial)
    return decision


class _Found(NamedTuple):
    """A decision, and the part of the plans and the relaxation it came from."""

    decision: Decision
    value_s: float
    node: Node
    relaxed: Shares
    costs: np.ndarray


def _searched(folded: Folded) -> tuple[Plan, Duals]:
    """Looks into the most promising part of the plans until none is left that could be better."""
    smallest = _smallest(folded)
    scale_s = smallest.value()
    among, sample = nodes(folded), _sample(folded)
    gap = _GAP if len(sample.rows) == len(folded.rows) else _SAMPLE_GAP
    open_, lost, best = np.ones(len(among), bool), None, None
    node = Node(smallest.attention, np.ones(folded.num_columns, bool), charged=False)
    relaxed = relax(folded, node, sample, scale_s=scale_s, gap=gap)
    costs = folded.costs(relaxed.prices.places)
    bounds = lower_bounds(folded, relaxed.prices, costs, among)
    for turn in range(_NODES + 1):
        at = int(np.where(open_, bounds, np.inf).argmin())
        if best is not None and bounds[at] + 0.5 * (lost or 0.0) > (1 - _WORTH) * best.value_s:
            break
        if turn:
            relaxed = relax(folded, among[at], sample, scale_s=scale_s, gap=gap)
            costs = folded.costs(relaxed.prices.places)
            bounds = np.maximum(bounds, lower_bounds(folded, relaxed.prices, costs, among))
        found = _rounded(folded, among[at], relaxed, costs, float(bounds[at]))
        open_[at] = turn == 0 and found.value_s > bounds[at] * (1 + _WORTH)
        if not open_[at]:
            missed = max(0.0, found.value_s - float(bounds[at]))
            lost = missed if lost is None else min(lost, missed)
        if best is None or found.value_s < best.value_s:
            best = found
        if not open_.any():
            break
    assert best is not None
    bound_s = float(bounds.min())
    if best.value_s > bound_s * (1 + _FAR):
        best = _harder(folded, best, among[int(bounds.argmin())], bound_s)
    decision = best.decision if best.value_s <= scale_s else smallest
    return _answer(decision, best.relaxed.prices, bound_s)


def _harder(folded: Folded, best: _Found, likely: Node, bound_s: float) -> _Found:
    """What takes longer, in the part where the best plan was found and in the one that may hold the best."""
    everyone = Part(folded.rows, np.ones(len(folded.rows)), folded.base, 0.0)
    places = [best.node] if _alike(best.node, likely) else [likely, best.node]
    decisions = [best.decision, _simplest(folded)]
    for node in places:
        relaxed = relax(folded, node, everyone, scale_s=best.value_s, gap=_GAP / 2, tie_break=_TIE_BREAK)
        costs = folded.costs(relaxed.prices.places)
        again = _rounded(folded, node, relaxed, costs, bound_s, levels=_LEVELS + _MORE_LEVELS)
        decisions.append(again.decision)
        undecided = np.flatnonzero(relaxed.shares.max(axis=1) < 0.95)
        if len(undecided) > 1:
            heavy = folded.load[undecided].sum(axis=(1, 2))
            decisions.append(_dived(folded, again, undecided[np.argsort(-heavy)[:_DIVE]]))
        best = min(best, again, key=lambda found: found.value_s)
    decisions = sorted(decisions, key=Decision.value)[:_POLISHED]
    for decision in decisions:
        _polish(decision, best)
    decision = min(decisions, key=Decision.value)
    return best._replace(decision=decision, value_s=decision.value())


def _alike(node: Node, other: Node) -> bool:
    return node[0] == other[0] and node.whole == other.whole and bool((node.columns == other.columns).all())


def _polish(decision: Decision, near: _Found) -> None:
    """Moves and exchanges among many adapters, with as little KV on the device as the relaxation wants."""
    folded, before = decision.folded, decision.copy()
    decision.fraction = min(decision.fraction, near.relaxed.fraction)
    total = near.costs + near.relaxed.prices.adapter_byte * folded.problem.device_bytes
    rows = np.union1d(_closest(decision, total), _pressing(decision))
    for sharpness in (*_SHARPNESS, None):
        single_moves(decision, rows, sharpness=sharpness, rounds=4)
        exchanges(decision, rows, sharpness=sharpness, rounds=6)
    for sharpness in (_SHARPNESS[-1], None) if len(rows) >= _MANY else ():
        regroup(decision, rows, sharpness=sharpness, rounds=_REGROUPED)
    best_fraction(decision)
    if decision.value() > before.value():
        decision.take(before)


def _simplest(folded: Folded) -> Decision:
    """The best of the plans that give everyone the same strategy."""
    plans = [FixedPolicy(name).choose(folded.problem) for name in folded.problem.strategies]
    plan = min(plans, key=lambda plan: plan.objective_s)
    attention = folded.problem.kv.strategies.index(plan.attention)
    return Decision(folded, plan.strategy.astype(int), attention=attention, fraction=plan.kv_fraction)


def _sample(folded: Folded) -> Part:
    """Adapters whose prices are those of all: the heaviest ones as they are, others by a few that stand for them."""
    n = len(folded.rows)
    if n <= 2 * _SAMPLE:
        return Part(folded.rows, np.ones(n), folded.base, 0.0)
    bytes_ = folded.problem.device_bytes
    seconds = (folded.load @ np.ones(folded.load.shape[-1])).sum(axis=1)
    size = seconds / max(float(seconds.sum()), 1e-300) + bytes_.sum(axis=1) / max(float(bytes_.sum()), 1.0)
    heavy = np.argpartition(-size, _SAMPLE)[:_SAMPLE]
    light = np.setdiff1d(folded.rows, heavy)
    light = light[np.lexsort((size[light], folded.home[light]))]
    picked = light[((np.arange(_SAMPLE) + 0.5) * (len(light) / _SAMPLE)).astype(int)]
    weight = np.concatenate([np.ones(_SAMPLE), np.full(_SAMPLE, len(light) / _SAMPLE)])
    return Part(np.concatenate([heavy, picked]), weight, folded.base, 0.0)


def _rounded(
    folded: Folded, node: Node, relaxed: Shares, costs: np.ndarray, bound_s: float, levels: tuple[float, ...] = _LEVELS
) -> _Found:
    """A decision near the relaxed one, mended."""
    prices, problem = relaxed.prices, folded.problem
    total = costs + prices.adapter_byte * problem.device_bytes + _barred(folded, node)
    shares = relaxed.shares if len(relaxed.shares) == len(folded.rows) else _shares(total, prices)
    byte_s = 3 * prices.adapter_byte + bound_s / max(1.0, float(problem.device_bytes.max(axis=1, initial=0.0).sum()))

    def worth(decision: Decision) -> float:
        return decision.value() + byte_s * float(decision.overshoot(decision.bytes, decision.fraction))

    best = min(_roundings(folded, node, shares, relaxed.fraction), key=worth)
    for sharpness in levels:
        if worth(best) <= bound_s * (1 + _ENOUGH):
            break
        _level(best, prices, total, sharpness=sharpness, byte_s=byte_s)
    make_fit(best, costs)
    if best.value() > bound_s * (1 + _ENOUGH):
        _mend(best, total)
    best_fraction(best)
    return _Found(best, best.value(), node, relaxed, costs)


def _barred(folded: Folded, node: Node) -> np.ndarray:
    """[N, S], inf where a node does not allow a column and leaves another."""
    usable = folded.problem.allowed & (node.columns | ~folded.problem.active[:, None])
    return np.where(usable | ~usable.any(axis=1, keepdims=True), 0.0, np.inf)


def _shares(total: np.ndarray, prices: Prices) -> np.ndarray:
    """The relaxed decision of all adapters at prices that were found from a few."""
    away = total - total.min(axis=1, keepdims=True)
    shares = prices.softness / (away + prices.softness)
    return shares / shares.sum(axis=1, keepdims=True)


def _level(decision: Decision, prices: Prices, total: np.ndarray, *, sharpness: float, byte_s: float) -> None:
    """Moves adapters that are near a tie away from what the decision loads more than the relaxation did."""
    folded, problem, rows = decision.folded, decision.folded.problem, decision.folded.rows
    over = decision.overshoot(decision.bytes, decision.fraction) > 0
    places = 0.5 * prices.places + 0.5 * decision.prices(sharpness)
    leaning = folded.costs(places) + prices.adapter_byte * (1.2 if over else 0.9) * problem.device_bytes
    leaning[np.isinf(total)] = np.inf
    to = leaning.argmin(axis=1)
    gain = leaning[rows, decision.columns] - leaning[rows, to]
    rising = np.flatnonzero((gain > 0) & np.isfinite(gain))
    gain = gain[rising]
    loss = np.maximum(total[rising, to[rising]] - total[rising, decision.columns[rising]], 0.0)
    order = rising[np.argsort(-gain / (loss + 1e-2 * gain + 1e-30))]
    moves = Moves(order, to[order], decision.fraction, len(order))
    _, number, _ = decision.ladder(moves, sharpness=sharpness, byte_price=byte_s)
    decision.apply(moves, number, decision.fraction)


def _wanted(decision: Decision, total: np.ndarray) -> Moves:
    """Everyone to its cheapest strategy, the largest relative gains first."""
    rows = decision.folded.rows
    now, to = total[rows, decision.columns], total.argmin(axis=1)
    gain = (now - total[rows, to]) / np.maximum(np.abs(now), 1e-30)
    order = np.argsort(-gain)[: int((gain > 1e-6).sum())]
    return Moves(order, to[order], decision.fraction, len(order))


def _roundings(folded: Folded, node: Node, shares: np.ndarray, fraction: float):
    """The largest share of everyone; and shares drawn by sequences that are even over any few neighbours."""
    largest = shares.argmax(axis=1)
    yield Decision(folded, largest, attention=node.attention, fraction=fraction)
    edges = shares.cumsum(axis=1)
    turn = np.empty(len(shares))
    turn[np.lexsort((folded.own.min(axis=1) + folded.problem.device_bytes.sum(axis=1), folded.home))] = folded.rows
    for draw in range(_DRAWS):
        at = (_GOLDEN * turn + draw / _DRAWS) % 1 * 0.998 + 0.001
        column = (edges < at[:, None]).sum(axis=1)
        column = np.where(shares[folded.rows, np.minimum(column, shares.shape[1] - 1)] > 1e-6, column, largest)
        yield Decision(folded, column, attention=node.attention, fraction=fraction)


def _dived(folded: Folded, best: _Found, free: np.ndarray) -> Decision:
    """Decides the clearest of the `free` adapters, relaxes the rest again, until all are decided; mended."""
    node, fraction = best.node, best.relaxed.fraction
    columns, shares = best.decision.columns.copy(), best.relaxed.shares[free]
    while len(free):
        clear = shares.max(axis=1)
        columns[free] = shares.argmax(axis=1)
        free = free[clear < min(0.95, float(np.quantile(clear, 0.5)))] if len(free) > _FEW else free[:0]
        if len(free) == 0:
            break
        used = float(folded.problem.device_bytes[folded.rows, columns].sum())
        used -= float(folded.problem.device_bytes[free, columns[free]].sum())
        loads = folded.base + folded.places(folded.sums(columns, without=free))
        part = Part(free, np.ones(len(free)), loads, used)
        shares, fraction = relax(
            folded, node, part, scale_s=best.value_s, gap=_GAP, tie_break=_TIE_BREAK * len(free) / len(folded.rows)
        )[1:]
    decision = Decision(folded, columns, attention=node.attention, fraction=fraction)
    make_fit(decision, best.costs)
    _mend(decision, best.costs + best.relaxed.prices.adapter_byte * folded.problem.device_bytes)
    return decision


def _mend(decision: Decision, total: np.ndarray) -> None:
    """Single moves of the adapters that are nearest to a tie."""
    rows = _closest(decision, total)
    for sharpness in (*_SHARPNESS, None):
        single_moves(decision, rows, sharpness=sharpness, rounds=4)
    best_fraction(decision)


def _closest(decision: Decision, total: np.ndarray, number: int = _CLOSE) -> np.ndarray:
    folded = decision.folded
    if len(folded.rows) <= number:
        return folded.rows
    now = total[folded.rows, decision.columns]
    now = np.where(np.isfinite(now), now, 0.0)
    away = total - now[:, None]
    away[folded.rows, decision.columns] = np.inf
    closeness = away.min(axis=1) / np.maximum(np.abs(now), 1e-30)
    return np.argpartition(closeness, number)[:number]


def _pressing(decision: Decision) -> np.ndarray:
    """Adapters whose leaving would relieve the busiest places most."""
    folded = decision.folded
    costs = folded.costs(decision.prices(_SHARPNESS[-1]))
    gain = costs[folded.rows, decision.columns] - costs.min(axis=1)
    return np.argsort(-gain)[:_REFINED]


def _refined(folded: Folded, start: Duals) -> tuple[Plan, Duals]:
    """The earlier plan, after the moves that its prices ask for now."""
    problem, prices = folded.problem, start.prices
    columns = start.strategy.astype(int)
    barred = ~problem.allowed[folded.rows, columns]
    costs = folded.costs(prices.places)
    total = costs + prices.adapter_byte * problem.device_bytes
    columns = np.where(barred, total.argmin(axis=1), columns)
    decision = Decision(folded, columns, attention=start.attention, fraction=start.fraction)
    make_fit(decision, costs)
    if not decision.fits:
        return _searched(folded)
    moves = _wanted(decision, total)
    if len(moves.rows):
        _, number, _ = decision.ladder(moves, sharpness=None, byte_price=np.inf)
        decision.apply(moves, number, decision.fraction)
    single_moves(decision, _closest(decision, total, _REFINED), sharpness=None, rounds=1)
    best_fraction(decision)
    ways = [(attention, False) for attention in range(len(problem.kv.strategies))] + [(0, True)]
    bound = lower_bounds(folded, prices, costs, [Node(a, decision.count > 0, whole) for a, whole in ways]).min()
    return _answer(decision, prices, float(bound))


def _answer(decision: Decision, prices: Prices, bound_s: float) -> tuple[Plan, Duals]:
    problem = decision.folded.problem
    attention = problem.kv.strategies[decision.attention]
    plan = evaluate(problem, decision.columns, attention, decision.fraction)
    return plan, Duals(plan.strategy, decision.attention, decision.fraction, prices, bound_s)
