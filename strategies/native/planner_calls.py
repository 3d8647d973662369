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
    from strategies.planner.decision import Decision, Moves
    from strategies.planner.folded import Folded
    from strategies.planner.prices import Shares
    from strategies.planner.relaxation import Relaxation

_INT, _DOUBLE, _ARRAY = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class FoldedView(ctypes.Structure):
    """`Folded` of planner_decision.h; `arrays` are those that it points to, which it keeps alive."""

    arrays: list[np.ndarray]
    _fields_ = (
        *((name, _INT) for name in ("rows", "columns", "places", "phases", "kv_first", "kv_end")),
        *((name, _ARRAY) for name in ("work", "own", "bytes", "active", "fixed", "fixed_serial", "starts")),
        *((name, _ARRAY) for name in ("kv_device", "kv_pool", "kv_serial")),
        ("attentions", _INT),
        *((name, _DOUBLE) for name in ("budget", "adapter_budget", "slack", "kv_bytes", "kv_move_s")),
        *((name, _DOUBLE) for name in ("current_fraction", "min_fraction", "most_fraction")),
    )


class DecisionView(ctypes.Structure):
    """`Decision` of planner_decision.h."""

    _fields_ = (
        *((name, _ARRAY) for name in ("columns", "loads", "count")),
        ("attention", _INT),
        *((name, _DOUBLE) for name in ("wanted", "own", "bytes")),
    )


_VIEWS = (ctypes.POINTER(FoldedView), ctypes.POINTER(DecisionView))
_ARGUMENTS = {
    "relaxation": (_INT, _INT, _INT, *6 * (_ARRAY,), _DOUBLE, _INT, _ARRAY, _ARRAY, ctypes.POINTER(_DOUBLE)),
    "extremes": (*4 * (_INT,), *6 * (_ARRAY,)),
    "work": (*4 * (_INT,), *3 * (_ARRAY,), _INT, _ARRAY, _ARRAY),
    "least_sums": (_INT, _INT, _INT, *4 * (_ARRAY,)),
    "sums": _VIEWS,
    "value": _VIEWS,
    "best_fraction": (*_VIEWS, _DOUBLE),
    "take_best": (*_VIEWS, _ARRAY, _ARRAY, _INT, _DOUBLE, _DOUBLE),
    "single_moves": (*_VIEWS, _ARRAY, _INT, _DOUBLE, _INT),
    "exchanges": (*_VIEWS, _ARRAY, _INT, _DOUBLE, _INT),
    "walk": (*_VIEWS, _ARRAY, _INT, _DOUBLE, _ARRAY, _INT, _DOUBLE),
    "level": (*_VIEWS, _ARRAY, _ARRAY, *4 * (_DOUBLE,)),
}
_RESULTS = {"relaxation": _INT, "value": _DOUBLE}


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


def view_of(folded: Folded) -> FoldedView:
    """What native functions see of a problem."""
    kv = folded.problem.kv
    charged = ("fixed", "fixed_serial") if folded.has_fixed else ()
    arrays = {
        name: _doubles(getattr(folded, name)) for name in ("work", "own", "bytes", "kv_device", "kv_pool", *charged)
    }
    arrays["kv_serial"] = _doubles(kv.pool_serial_s)
    arrays["active"], arrays["starts"] = _flags(folded.active), _integers(folded.starts)
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
        slack=folded.slack_bytes,
        kv_bytes=kv.device_bytes,
        kv_move_s=kv.move_s,
        current_fraction=kv.current_fraction,
        min_fraction=kv.min_fraction,
        most_fraction=folded.most_kv,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
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


def _change(name: str, decision: Decision, *arguments: float) -> None:
    """Calls a function that changes a decision."""
    view = _seen(decision)
    _function(name)(decision.folded.view, view, *arguments)
    decision.attention, decision.wanted = view.attention, view.wanted
    decision.own, decision.bytes = view.own, view.bytes


def extremes(
    load: np.ndarray, rows: np.ndarray, home: np.ndarray, homes: int, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As strategies.planner.folded.extremes."""
    sums = np.zeros((2, homes, load.shape[-1]))
    load, rows, home, allowed = _doubles(load), _integers(rows), _integers(home), _flags(allowed)
    given = (array.ctypes.data for array in (load, rows, home, allowed, sums[0], sums[1]))
    _function("extremes")(len(rows), *load.shape[1:], homes, *given)
    return sums[0], sums[1]


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


def add_up(decision: Decision, /) -> None:
    """As Decision._add_up."""
    _change("sums", decision)


def value(decision: Decision, /) -> float:
    """As Decision.value."""
    return decision.folded.serial_s + _function("value")(decision.folded.view, _seen(decision))


def best_fraction(decision: Decision, most: float) -> None:
    """As strategies.planner.improve.fraction_up_to."""
    _change("best_fraction", decision, most)


def take_best(decision: Decision, /, moves: Moves, *, sharpness: float | None, byte_price: float) -> None:
    """As Decision.take_best."""
    rows, columns = _integers(moves.rows), _integers(moves.columns)
    _change("take_best", decision, rows.ctypes.data, columns.ctypes.data, len(rows), sharpness or 0.0, byte_price)


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


def level(decision: Decision, relaxed: Shares, total: np.ndarray, *, sharpness: float, byte_s: float) -> None:
    """As strategies.planner.rounding.level."""
    prices, total = _doubles(relaxed.prices.places), _doubles(total)
    byte, fraction = relaxed.prices.adapter_byte, relaxed.fraction
    _change("level", decision, prices.ctypes.data, total.ctypes.data, byte, fraction, sharpness, byte_s)


def interior_point(problem: Relaxation, gap: float, max_steps: int) -> tuple[np.ndarray, np.ndarray, float, int]:
    """As strategies.planner.relaxation.interior_point."""
    arrays = problem.rows_work, problem.cost, problem.allowed, problem.home, problem.phase_of, problem.limit
    shares, prices, softness = np.empty(problem.cost.shape), np.empty(len(problem.limit)), _DOUBLE()
    given = (array.ctypes.data for array in arrays)
    found = shares.ctypes.data, prices.ctypes.data, softness
    steps = _function("relaxation")(*problem.rows_work.shape, *given, gap, max_steps, *found)
    return shares, prices, softness.value, steps
