"""The planner's native functions, by ctypes: no other thread waits for Python while they run.

They see the arrays of a problem (`FoldedView`) and of a decision (`DecisionView`) where these are.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from strategies.native import build

if TYPE_CHECKING:
    from strategies.planner.decision import Decision
    from strategies.planner.folded import Folded
    from strategies.planner.prices import Node, Nodes, Part, Prices, Shares
    from strategies.planner.problem import PlanProblem
    from strategies.planner.relaxation import Relaxation

_INT, _DOUBLE, _ARRAY = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class FoldedView(ctypes.Structure):
    """`Folded` of planner_decision.h; `arrays` are those that it points to, which it keeps alive."""

    arrays: list[np.ndarray]
    _fields_ = (
        *((name, _INT) for name in ("rows", "columns", "places", "phases", "kv_first", "kv_end")),
        *((name, _ARRAY) for name in ("work", "own", "bytes", "allowed", "active", "home", "base")),
        *((name, _ARRAY) for name in ("fixed", "fixed_serial", "starts")),
        *((name, _ARRAY) for name in ("kv_device", "kv_pool", "kv_serial")),
        ("attentions", _INT),
        *((name, _DOUBLE) for name in ("budget", "adapter_budget", "adapter_limit", "kv_budget", "slack", "kv_slack")),
        *((name, _DOUBLE) for name in ("kv_bytes", "kv_move_s", "current_fraction", "min_fraction", "most_fraction")),
    )


class ProblemView(ctypes.Structure):
    """`Problem` of planner_problem.cc; `arrays` are those that it points to, which it keeps alive."""

    arrays: list[np.ndarray]
    _fields_ = (
        *((name, _INT) for name in ("columns", "resources", "phases", "homes")),
        *((name, _ARRAY) for name in ("load", "serial", "bytes", "move", "home")),
    )


class DecisionView(ctypes.Structure):
    """`Decision` of planner_decision.h."""

    _fields_ = (
        *((name, _ARRAY) for name in ("columns", "loads", "count")),
        ("attention", _INT),
        *((name, _DOUBLE) for name in ("wanted", "own", "bytes")),
    )


_PROBLEM = ctypes.POINTER(ProblemView)
_VIEWS = (ctypes.POINTER(FoldedView), ctypes.POINTER(DecisionView))
_ARGUMENTS = {
    "relaxation": (_INT, _INT, _INT, *6 * (_ARRAY,), _DOUBLE, _INT, _ARRAY, _ARRAY, ctypes.POINTER(_DOUBLE)),
    "extremes": (*4 * (_INT,), *6 * (_ARRAY,)),
    "work": (*4 * (_INT,), *3 * (_ARRAY,), _INT, _ARRAY, _ARRAY),
    "least_sums": (_INT, _INT, _INT, *4 * (_ARRAY,)),
    "lower_bounds": (_VIEWS[0], _ARRAY, _DOUBLE, _DOUBLE, _ARRAY, _INT, *4 * (_ARRAY,)),
    "chosen": (_PROBLEM, _INT, *5 * (_ARRAY,)),
    "own": (_PROBLEM, _INT, *3 * (_ARRAY,), _DOUBLE, _DOUBLE, _ARRAY),
    "settled": (_PROBLEM, _INT, *4 * (_ARRAY,), _DOUBLE, _DOUBLE, *3 * (_ARRAY,)),
    "sample": (_VIEWS[0], _INT, _ARRAY),
    "pressing": (*_VIEWS, _DOUBLE, _INT, _ARRAY),
    "sums": _VIEWS,
    "value": _VIEWS,
    "fillings": (_VIEWS[0], _ARRAY, _INT, _ARRAY),
    "part": (
        *(_VIEWS[0], _INT, _ARRAY, _INT, _INT),
        *(_INT, *3 * (_ARRAY,), _DOUBLE),
        *(_INT, _ARRAY, _DOUBLE, _DOUBLE, *4 * (_ARRAY,)),
    ),
    "best_fraction": _VIEWS,
    "make_fit": (*_VIEWS, _ARRAY, _DOUBLE),
    "take_cheapest": (*_VIEWS, _ARRAY),
    "that_matter": (_INT, _INT, _INT, _ARRAY, _ARRAY, _INT, _ARRAY, _ARRAY),
    "closest": (*_VIEWS, _ARRAY, _INT, _ARRAY),
    "single_moves": (*_VIEWS, _ARRAY, _INT, _DOUBLE, _INT),
    "exchanges": (*_VIEWS, _ARRAY, _INT, _DOUBLE, _INT),
    "walk": (*_VIEWS, _ARRAY, _INT, _DOUBLE, _ARRAY, _INT, _DOUBLE),
    "round": (*_VIEWS, _ARRAY, _ARRAY, _DOUBLE, _DOUBLE, _ARRAY, _ARRAY, _DOUBLE, _ARRAY, _DOUBLE, _DOUBLE),
}
_RESULTS = {"relaxation": _INT, "value": _DOUBLE, "fillings": _DOUBLE, "settled": _INT, "that_matter": _INT}


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    function = build.function(f"plora_plan_{name}")
    function.argtypes, function.restype = _ARGUMENTS[name], _RESULTS.get(name)
    return function


def _doubles(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float64)


def _integers(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.int64)


def _flags(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.bool_)


def _limit(value: float | None) -> float:
    return np.inf if value is None else value


def view_of(folded: Folded) -> FoldedView:
    """What native functions see of a problem."""
    kv = folded.problem.kv
    charged = ("fixed", "fixed_serial") if folded.has_fixed else ()
    numbers = ("work", "own", "bytes", "base", "kv_device", "kv_pool", *charged)
    arrays = {name: _doubles(getattr(folded, name)) for name in numbers}
    arrays |= {name: _flags(getattr(folded, name)) for name in ("allowed", "active")}
    arrays |= {name: _integers(getattr(folded, name)) for name in ("home", "starts")}
    arrays["kv_serial"] = _doubles(kv.pool_serial_s)
    m, s, k = folded.work.shape
    view = FoldedView(
        rows=m,
        columns=s,
        places=k,
        phases=len(folded.starts),
        kv_first=folded.kv_places.start,
        kv_end=folded.kv_places.stop,
        attentions=len(kv.strategies),
        budget=folded.budget_bytes,
        adapter_budget=folded.adapter_budget_bytes,
        adapter_limit=_limit(folded.adapter_limit_bytes),
        kv_budget=_limit(kv.kv_budget_bytes),
        slack=folded.slack_bytes,
        kv_slack=folded.problem.slack_bytes,
        kv_bytes=kv.device_bytes,
        kv_move_s=kv.move_s,
        current_fraction=kv.current_fraction,
        min_fraction=kv.min_fraction,
        most_fraction=folded.most_kv,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    view.arrays = list(arrays.values())
    return view


def view_of_problem(problem: PlanProblem) -> ProblemView:
    """What native functions see of a problem as it is given."""
    named = {"load": problem.load_s, "serial": problem.serial_s, "bytes": problem.device_bytes, "move": problem.move_s}
    arrays = {name: _doubles(array) for name, array in named.items()} | {"home": _integers(problem.home)}
    _, s, f, r = problem.load_s.shape
    view = ProblemView(columns=s, resources=f * r, phases=f, homes=problem.num_pool_devices + 1)
    for name, array in arrays.items():
        setattr(view, name, array.ctypes.data)
    view.arrays = list(arrays.values())
    return view


def view_of_decision(decision: Decision) -> DecisionView:
    """What native functions see of a decision, but for the numbers, which `_seen` brings up to date."""
    return DecisionView(decision.columns.ctypes.data, decision.loads.ctypes.data, decision.count.ctypes.data)


def _seen(decision: Decision) -> DecisionView:
    view = decision.view
    view.attention, view.wanted = decision.attention, decision.wanted
    view.own, view.bytes = decision.own, decision.bytes
    return view


def _change(name: str, decision: Decision, *arguments: float | None) -> None:
    """Calls a function that changes a decision."""
    view = _seen(decision)
    _function(name)(decision.folded.view, view, *arguments)
    decision.attention, decision.wanted = view.attention, view.wanted
    decision.own, decision.bytes = view.own, view.bytes


def chosen(problem: PlanProblem, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """As strategies.planner.problem.chosen."""
    f, r = problem.load_s.shape[2:]
    loads, serial, totals = np.empty((problem.num_pool_devices + 1, f, r)), np.empty(f), (2 * _DOUBLE)()
    rows, columns = _integers(rows), _integers(columns)
    found = loads.ctypes.data, serial.ctypes.data, totals
    _function("chosen")(problem.view, len(rows), rows.ctypes.data, columns.ctypes.data, *found)
    return loads, serial, *totals


def own(problem: PlanProblem, rows: np.ndarray, tie: float, tie_byte: float) -> np.ndarray:
    """As strategies.planner.folded.own."""
    rows, allowed, current = _integers(rows), _flags(problem.allowed), _integers(problem.current)
    out = np.empty((len(rows), allowed.shape[1]))
    given = (array.ctypes.data for array in (rows, allowed, current))
    _function("own")(problem.view, len(rows), *given, tie, tie_byte, out.ctypes.data)
    return out


def settled(
    problem: PlanProblem, rows: np.ndarray, strategy: np.ndarray, prices: np.ndarray, *, byte: float, sure: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As strategies.planner.settled.settled_rows."""
    rows, allowed, strategy, prices = _integers(rows), _flags(problem.allowed), _integers(strategy), _doubles(prices)
    found, columns, costs = (
        np.empty(shape, kind)
        for shape, kind in (
            (len(rows), np.int64),
            (len(rows), np.int64),
            ((len(rows) + 1, allowed.shape[1]), np.float64),
        )
    )
    given = (array.ctypes.data for array in (rows, allowed, strategy, prices))
    number = _function("settled")(
        problem.view, len(rows), *given, byte, sure, found.ctypes.data, columns.ctypes.data, costs.ctypes.data
    )
    return found[:number], columns[:number], costs[:number]


def extremes(
    load: np.ndarray, rows: np.ndarray, home: np.ndarray, homes: int, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As strategies.planner.folded.extremes."""
    sums = np.zeros((2, homes, load.shape[-1]))
    load, rows, home, allowed = _doubles(load), _integers(rows), _integers(home), _flags(allowed)
    given = (array.ctypes.data for array in (load, rows, home, allowed, sums[0], sums[1]))
    _function("extremes")(len(rows), *load.shape[1:], homes, *given)
    return sums[0], sums[1]


def that_matter(loads: np.ndarray, exists: np.ndarray, starts: np.ndarray, columns: int) -> np.ndarray:
    """As strategies.planner.folded.that_matter."""
    loads, exists, starts = _doubles(loads), _flags(exists), _integers(starts)
    keep = np.empty(len(exists), np.int64)
    given = *loads.shape, loads.ctypes.data, exists.ctypes.data, len(starts), starts.ctypes.data, keep.ctypes.data
    return keep[: _function("that_matter")(columns, *given)]


def work_at_places(
    load: np.ndarray, rows: np.ndarray, home: np.ndarray, device: np.ndarray, pool: np.ndarray, here: np.ndarray
) -> np.ndarray:
    """As strategies.planner.folded.work_at_places."""
    homes, places = here.shape
    shares = _doubles(device.T + here[..., None] * pool.T)
    load, rows, home = _doubles(load), _integers(rows), _integers(home)
    work = np.empty((len(rows), load.shape[1], places))
    given = load.ctypes.data, rows.ctypes.data, home.ctypes.data, places, shares.ctypes.data, work.ctypes.data
    _function("work")(len(rows), *load.shape[1:], homes, *given)
    return work


def least_sums(values: np.ndarray, active: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """As strategies.planner.folded.least_sums."""
    values, active, sets = _doubles(values), _flags(active), _flags(sets)
    sums = np.empty(len(sets))
    given = (array.ctypes.data for array in (values, active, sets, sums))
    _function("least_sums")(*values.shape, len(sets), *given)
    return sums


def lower_bounds(folded: Folded, prices: Prices, total: np.ndarray, among: Nodes) -> np.ndarray:
    """As strategies.planner.prices.lower_bounds."""
    attention, columns, whole = among.arrays
    places, total, bounds = _doubles(prices.places), _doubles(total), np.empty(len(attention))
    of_nodes = (array.ctypes.data for array in (attention, columns, whole, bounds))
    costs = prices.joint, prices.adapters, total.ctypes.data
    _function("lower_bounds")(folded.view, places.ctypes.data, *costs, len(attention), *of_nodes)
    return bounds + folded.serial_s


def sample(folded: Folded, number: int) -> np.ndarray:
    """As strategies.planner.folded.sample."""
    rows = np.empty(2 * number, np.int64)
    _function("sample")(folded.view, number, rows.ctypes.data)
    return rows


def add_up(decision: Decision, /) -> None:
    """As Decision._add_up."""
    _change("sums", decision)


def value(decision: Decision, /) -> float:
    """As Decision.value."""
    return decision.folded.serial_s + _function("value")(decision.folded.view, _seen(decision))


def fillings(folded: Folded, current: np.ndarray, fetch: int | None) -> tuple[np.ndarray, float]:
    """As strategies.planner.filling.fillings."""
    columns, current = np.empty((1 + folded.num_columns, len(folded.rows)), np.int64), _integers(current)
    to = -1 if fetch is None else fetch
    return columns, _function("fillings")(folded.view, current.ctypes.data, to, columns.ctypes.data)


def relaxed_part(
    folded: Folded,
    node: Node,
    part: Part,
    places: np.ndarray,
    *,
    scale_s: float,
    gap: float,
    noise: np.ndarray | None,
) -> tuple[np.ndarray, float, float, float, np.ndarray, float]:
    """As strategies.planner.prices.relaxed_part."""
    columns, rows, places = _flags(node.columns), _integers(part.rows), _integers(places)
    weight, loads = _doubles(part.weight), _doubles(part.loads)
    added = None if noise is None else _doubles(noise)
    shares, prices, numbers = np.empty((len(rows), folded.num_columns)), np.empty(len(folded.base)), (4 * _DOUBLE)()
    _function("part")(
        *(folded.view, node.attention, columns.ctypes.data, node.whole, node.charged),
        *(len(rows), rows.ctypes.data, weight.ctypes.data, loads.ctypes.data, part.used_bytes),
        *(len(places), places.ctypes.data, scale_s, gap, None if added is None else added.ctypes.data),
        *(shares.ctypes.data, prices.ctypes.data, numbers),
    )
    joint, adapters, softness, fraction = numbers
    return prices, joint, adapters, softness, shares, fraction


def best_fraction(decision: Decision) -> None:
    """As strategies.planner.improve.best_fraction."""
    _change("best_fraction", decision)


def make_fit(decision: Decision, total: np.ndarray, adapter_byte: float) -> None:
    """As strategies.planner.improve.make_fit."""
    total = _doubles(total)
    _change("make_fit", decision, total.ctypes.data, adapter_byte)


def take_cheapest(decision: Decision, total: np.ndarray) -> None:
    """As strategies.planner.improve.take_cheapest."""
    total = _doubles(total)
    _change("take_cheapest", decision, total.ctypes.data)


def closest(decision: Decision, total: np.ndarray, number: int) -> np.ndarray:
    """As strategies.planner.rounding.closest."""
    total, rows = _doubles(total), np.empty(min(number, len(decision.columns)), np.int64)
    _function("closest")(decision.folded.view, decision.view, total.ctypes.data, number, rows.ctypes.data)
    return rows


def single_moves(decision: Decision, rows: np.ndarray, *, sharpness: float | None, rounds: int) -> None:
    """As strategies.planner.improve.single_moves."""
    rows = _integers(rows)
    _change("single_moves", decision, rows.ctypes.data, len(rows), sharpness or 0.0, rounds)


def exchanges(decision: Decision, rows: np.ndarray, *, sharpness: float | None, rounds: int) -> None:
    """As strategies.planner.improve.exchanges."""
    rows = _integers(rows)
    _change("exchanges", decision, rows.ctypes.data, len(rows), sharpness or 0.0, rounds)


def walk(decision: Decision, rows: np.ndarray, barred: np.ndarray, *, sharpness: float | None, byte_s: float) -> None:
    """As strategies.planner.improve.walk."""
    rows, barred = _integers(rows), _integers(barred)
    steps = len(barred)
    _change("walk", decision, rows.ctypes.data, len(rows), sharpness or 0.0, barred.ctypes.data, steps, byte_s)


def pressing(decision: Decision, *, sharpness: float, number: int) -> np.ndarray:
    """As strategies.planner.rounding.pressing."""
    rows = np.empty(min(number, len(decision.columns)), np.int64)
    _function("pressing")(decision.folded.view, _seen(decision), sharpness, number, rows.ctypes.data)
    return rows


def near(decision: Decision, node: Node, relaxed: Shares, total: np.ndarray, *, byte_s: float, enough_s: float) -> None:
    """As strategies.planner.rounding.near."""
    folded, prices = decision.folded, relaxed.prices
    places, total, open_ = _doubles(prices.places), _doubles(total), _flags(node.columns)
    shares, by_home = _doubles(relaxed.shares), _doubles(folded.by_home)
    of_all = shares.ctypes.data if len(shares) == len(folded.rows) else None
    _change(
        *("round", decision, places.ctypes.data, total.ctypes.data, prices.adapter_byte, relaxed.fraction),
        *(open_.ctypes.data, of_all, prices.softness, by_home.ctypes.data, byte_s, enough_s - folded.serial_s),
    )


def interior_point(problem: Relaxation, gap: float, max_steps: int) -> tuple[np.ndarray, np.ndarray, float, int]:
    """As strategies.planner.relaxation.interior_point."""
    arrays = problem.rows_work, problem.cost, problem.allowed, problem.home, problem.phase_of, problem.limit
    shares, prices, softness = np.empty(problem.cost.shape), np.empty(len(problem.limit)), _DOUBLE()
    given = (array.ctypes.data for array in arrays)
    found = shares.ctypes.data, prices.ctypes.data, softness
    steps = _function("relaxation")(*problem.rows_work.shape, *given, gap, max_steps, *found)
    return shares, prices, softness.value, steps
