"""A decision while it is improved: its loads, and what further moves would be worth.

A move gives a row (an adapter) another column (strategy). P is not moved: it is the most that the adapters' bytes leave
room for, up to the most that is wanted. So a move that takes memory pays for the KV that it drives out, and one that
frees memory gains by the KV that comes in. `Decision.ladder` evaluates prefixes of a list of moves, exactly and all at
once, so an improvement is: price, sort by gain, take the best prefix.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from strategies.native import planner_calls
from strategies.native.planner_calls import DecisionView
from strategies.planner.folded import Folded
from strategies.planner.implementation import either


class Moves(NamedTuple):
    """Rows and their next columns, in order: [M] each."""

    rows: np.ndarray
    columns: np.ndarray


class Decision:
    """Columns of all live adapters, and the sums that follow from them.

    Args:
        folded: the problem.
        columns: [M].
        attention: index of the attention strategy.
        fraction: the most P to have, where there is room.
    """

    def __init__(self, folded: Folded, columns: np.ndarray, *, attention: int, fraction: float) -> None:
        self.folded = folded
        self.columns = columns.astype(np.int64)
        self.attention = attention
        self.wanted = fraction
        self.loads, self.own, self.bytes = folded.base.copy(), 0.0, 0.0
        self.count = np.zeros(folded.num_columns, np.int64)
        self._add_up()

    @either(planner_calls.add_up)
    def _add_up(self) -> None:
        folded, at = self.folded, (self.folded.rows, self.columns)
        self.loads += folded.work[at].sum(axis=0)
        self.own, self.bytes = float(folded.own[at].sum()), float(folded.bytes[at].sum())
        self.count += np.bincount(self.columns[folded.active], minlength=folded.num_columns)

    @functools.cached_property
    def view(self) -> DecisionView:
        """What native functions see of it: its arrays are changed in place, never replaced."""
        return planner_calls.view_of_decision(self)

    def copy(self) -> Decision:
        other = object.__new__(Decision)
        other.__dict__.update(self.__dict__)
        other.columns, other.loads, other.count = self.columns.copy(), self.loads.copy(), self.count.copy()
        other.__dict__.pop("view", None)
        return other

    def take(self, other: Decision) -> None:
        """Becomes what `other` is; `other` is not used after it."""
        self.__dict__.pop("view", None)
        self.__dict__.update(other.__dict__)

    @property
    def fraction(self) -> float:
        """P."""
        return float(self.folded.fraction(self.bytes, self.wanted))

    def adapter_loads(self) -> np.ndarray:
        """[K], with the base and fixed charges, without KV."""
        return self.loads + (self.count > 0) @ self.folded.fixed if self.folded.has_fixed else self.loads

    def all_loads(self) -> np.ndarray:
        """[K], with fixed charges and KV."""
        fraction = self.fraction
        folded = self.folded
        return self.adapter_loads() + fraction * folded.kv_device + (1 - fraction) * folded.kv_pool[self.attention]

    def kv_own(self, fraction):
        """Seconds of KV that are no load: the merge and copies; for any shape of fractions."""
        kv = self.folded.problem.kv
        merge = np.where(fraction < 1, kv.pool_serial_s[self.attention], 0.0)
        return merge + kv.move_s * np.maximum(0.0, fraction - kv.current_fraction)

    def overshoot(self, adapter_bytes):
        """Bytes beyond what adapters can have beside the least P; for any shape."""
        return np.maximum(adapter_bytes - self.folded.adapter_budget_bytes - self.folded.slack_bytes, 0.0)

    @either(planner_calls.value)
    def value(self) -> float:
        """The objective, as `evaluate` defines it (but for what decides ties)."""
        folded = self.folded
        total = folded.longest(self.all_loads()) + self.own + folded.serial_s
        return float(total + (self.count > 0) @ folded.fixed_serial + self.kv_own(self.fraction))

    @property
    def fits(self) -> bool:
        return bool(self.overshoot(self.bytes) <= 0)

    def rate(self, sharpness: float | None) -> float | None:
        """A sharpness, which is relative to the step, by second."""
        return None if sharpness is None else sharpness / max(float(self.folded.longest(self.all_loads())), 1e-30)

    def prices(self, sharpness: float) -> np.ndarray:
        """[K], what a second more of load costs; sums to 1 a phase. Soft where loads are near the largest."""
        folded, loads = self.folded, self.all_loads()
        largest = np.maximum.reduceat(loads, folded.starts)
        weights = np.exp(sharpness / max(float(largest.sum()), 1e-30) * (loads - largest[folded.phase_of]))
        return weights / np.add.reduceat(weights, folded.starts)[folded.phase_of]

    def after(self, loads: np.ndarray, adapter_bytes: np.ndarray, rate: float | None) -> np.ndarray:
        """[...] seconds of the longest places and of KV, whether it fits or not.

        Args:
            loads: [..., K] of adapters, base and fixed charges; overwritten.
            adapter_bytes: [...].
            rate: as of `Folded.soft_longest`; None: the longest alone count.
        """
        folded = self.folded
        fraction, here = folded.fraction(adapter_bytes, self.wanted), folded.kv_places
        in_pool, on_device = folded.kv_pool[self.attention, here], folded.kv_device[here]
        loads[..., here] += in_pool + fraction[..., None] * (on_device - in_pool)
        longest = folded.longest(loads) if rate is None else folded.soft_longest(loads, rate)
        return longest + self.kv_own(fraction)

    def ladder(self, moves: Moves, *, sharpness: float | None, byte_price: float) -> tuple[float, int]:
        """The best prefix: its value, and how many moves. With no moves the value is that of standing still."""
        folded = self.folded
        steps = _rungs(len(moves.rows))
        loads, own, used_bytes, counts = self._steps(moves, steps)
        loads += self.loads
        if folded.has_fixed:
            used = counts > 0
            loads += used @ folded.fixed
            own = own + used @ folded.fixed_serial
        values = self.after(loads, used_bytes, self.rate(sharpness)) + own
        over = self.overshoot(used_bytes)
        values += np.where(over > 0, np.inf, 0.0) if byte_price == np.inf else byte_price * over
        best = int(values.argmin())
        return float(values[best] + self.own + folded.serial_s), int(steps[best])

    def take_best(self, moves: Moves, *, sharpness: float | None, byte_price: float) -> None:
        """Applies the best prefix of some moves; arguments as of `ladder`."""
        self.apply(moves, self.ladder(moves, sharpness=sharpness, byte_price=byte_price)[1])

    def _steps(self, moves: Moves, steps: np.ndarray):
        """Changes after each number of moves in `steps`: loads, own seconds; bytes and counts in all."""
        folded, s = self.folded, self.folded.num_columns
        rows, columns = moves.rows, moves.columns
        before = self.columns[rows]
        change = np.zeros((len(rows) + 1, folded.work.shape[-1] + 2 + s))
        k = folded.work.shape[-1]
        np.subtract(folded.work[rows, columns], folded.work[rows, before], out=change[1:, :k])
        change[1:, k] = folded.own[rows, columns] - folded.own[rows, before]
        change[1:, k + 1] = folded.bytes[rows, columns] - folded.bytes[rows, before]
        acting, at = folded.active[rows].astype(float), np.arange(1, len(rows) + 1)
        change[at, k + 2 + columns] += acting
        change[at, k + 2 + before] -= acting
        total = change.cumsum(axis=0)[steps] if len(rows) <= len(steps) * 8 else _sums(change, steps)
        return total[:, :k], total[:, k], self.bytes + total[:, k + 1], self.count + np.rint(total[:, k + 2 :])

    def apply(self, moves: Moves, number: int) -> None:
        """Takes the first `number` of the moves."""
        if number == 0:
            return
        folded, rows, columns = self.folded, moves.rows[:number], moves.columns[:number]
        before, acting = self.columns[rows], folded.active[rows]
        self.loads += (folded.work[rows, columns] - folded.work[rows, before]).sum(axis=0)
        self.own += float((folded.own[rows, columns] - folded.own[rows, before]).sum())
        self.bytes += float((folded.bytes[rows, columns] - folded.bytes[rows, before]).sum())
        s = folded.num_columns
        self.count += np.bincount(columns[acting], minlength=s) - np.bincount(before[acting], minlength=s)
        self.columns[rows] = columns


def _sums(change: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Running sums of `change` [M + 1, X] after each number of moves in `steps`; the first row is 0."""
    return np.add.reduceat(change, np.concatenate([[0], steps[:-1] + 1]), axis=0).cumsum(axis=0)


@functools.lru_cache(maxsize=4096)
def _rungs(total: int) -> np.ndarray:
    """Prefix lengths to try: all short ones, then ever longer steps, and the whole."""
    few = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16])
    return np.unique(np.concatenate([few[few <= total], total * np.arange(1, 17) // 16]))
