"""Rows whose strategy needs no decision where a plan starts from an earlier one: prices change slowly.

Idle rows that have nothing on the device, which nobody else can use, keep their columns where any other one is dearer
by far at the earlier prices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strategies.native import planner_calls
from strategies.planner.folded import layout_of
from strategies.planner.implementation import either
from strategies.planner.problem import STRIPED, PlanProblem

_SURE = 0.02
"""Of the cost of an idle adapter's strategy: another one that is this much dearer is not looked at."""


class Settled(NamedTuple):
    """Rows that need no decision [M], their columns [M] and the costs of all of their columns [M, S]."""

    rows: np.ndarray
    columns: np.ndarray
    costs: np.ndarray


def settled(problem: PlanProblem, strategy: np.ndarray, places: np.ndarray, byte: float) -> Settled:
    """Idle rows whose columns are known.

    Args:
        problem: what is decided.
        strategy: [N] columns of the earlier plan.
        places: its prices of a second of load on all places.
        byte: seconds a byte of an adapter.
    """
    rows = problem.loaded[~problem.active[problem.loaded]]
    return Settled(*settled_rows(problem, rows, strategy, prices_by_home(problem, places), byte=byte, sure=1 + _SURE))


@either(planner_calls.settled)
def settled_rows(
    problem: PlanProblem, rows: np.ndarray, strategy: np.ndarray, prices: np.ndarray, *, byte: float, sure: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of `Settled`, of `rows` [M] those for which others cost more than `sure` times; prices by home."""
    costs = costs_of_loads(problem, rows, prices)
    costs += problem.serial_s.take(rows, axis=0) @ np.ones(problem.serial_s.shape[-1])
    costs += problem.move_s.take(rows, axis=0)
    costs += byte * problem.device_bytes.take(rows, axis=0)
    costs[~problem.allowed.take(rows, axis=0)] = np.inf
    at, here = np.arange(len(rows)), strategy.take(rows)
    others = costs.T.copy()
    others[here, at] = np.inf
    found = others.min(axis=0, initial=np.inf) > sure * costs[at, here]
    found &= problem.device_bytes[rows, here] <= 0
    return rows[found], here[found], costs[found]


def prices_by_home(problem: PlanProblem, places: np.ndarray) -> np.ndarray:
    """[H, F * R] prices of a second of load of each resource, for rows of each home (the last: striped)."""
    layout = layout_of(problem)
    return layout.device @ places + (layout.here * places) @ layout.pool.T


def costs_of_loads(problem: PlanProblem, rows: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """[M, S] seconds of what rows load in each column, at prices by home."""
    s, f, r = problem.load_s.shape[1:]
    load = problem.load_s.reshape(-1, s, f * r).take(rows, axis=0)
    home = problem.home.take(rows)
    of_homes = (load.reshape(-1, f * r) @ prices.T).reshape(len(rows), s, len(prices))
    return of_homes[np.arange(len(rows)), :, np.where(home == STRIPED, len(prices) - 1, home)]
