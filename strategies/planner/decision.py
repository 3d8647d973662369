"""A decision while it is improved: its loads, and what many further moves in a row would be worth.

A move gives a row (an adapter) another column (strategy). `Decision.ladder` evaluates prefixes of a list of moves,
exactly and all at once, so an improvement is: price, sort by gain, take the best prefix.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from strategies.planner.folded import Folded

_ROUNDING_BYTES = 1e-5
"""Running sums of bytes may be off by this."""


class Moves(NamedTuple):
    """Rows and their next columns, in order: [M] each."""

    rows: np.ndarray
    columns: np.ndarray


class Decision:
    """Columns of all live adapters, P, and the sums that follow from them."""

    def __init__(self, folded: Folded, columns: np.ndarray, *, attention: int, fraction: float) -> None:
        self.folded = folded
        rows = folded.rows
        self.columns = columns.copy()
        self.attention = attention
        self.fraction = fraction
        self.loads = folded.base + folded.work[rows, columns].sum(axis=0)
        self.own = float(folded.own[rows, columns].sum())
        self.bytes = float(folded.bytes[rows, columns].sum())
        self.count = np.bincount(columns[folded.active], minlength=folded.num_columns)

    def copy(self) -> Decision:
        other = object.__new__(Decision)
        other.__dict__.update(self.__dict__)
        other.columns, other.loads, other.count = self.columns.copy(), self.loads.copy(), self.count.copy()
        return other

    def take(self, other: Decision) -> None:
        """Becomes what `other` is; `other` is not used after it."""
        self.__dict__.update(other.__dict__)

    def all_loads(self) -> np.ndarray:
        """[K], with fixed charges and KV."""
        loads = self.loads + self.kv_loads(self.fraction)
        if self.folded.has_fixed:
            loads += (self.count > 0) @ self.folded.fixed
        return loads

    def kv_loads(self, fraction: float) -> np.ndarray:
        """[K], of attention when P is `fraction`."""
        return fraction * self.folded.kv_device + (1 - fraction) * self.folded.kv_pool[self.attention]

    def kv_own(self, fraction):
        """Seconds of KV that are no load: the merge and copies; for any shape of fractions."""
        kv = self.folded.problem.kv
        merge = np.where(fraction < 1, kv.pool_serial_s[self.attention], 0.0)
        return merge + kv.move_s * np.maximum(0.0, fraction - kv.current_fraction)

    def overshoot(self, adapter_bytes):
        """Bytes beyond the limits; for any shape."""
        folded = self.folded
        over = adapter_bytes + (self.fraction * folded.problem.kv.device_bytes - folded.budget_bytes)
        if folded.adapter_limit_bytes is not None:
            over = np.maximum(over, adapter_bytes - folded.adapter_limit_bytes)
        return np.maximum(over - _ROUNDING_BYTES - 1e-10 * folded.problem.budget_bytes, 0.0)

    def value(self) -> float:
        """The objective, as `evaluate` defines it (but for what decides ties)."""
        folded = self.folded
        total = folded.longest(self.all_loads()) + self.own + folded.serial_s
        return float(total + (self.count > 0) @ folded.fixed_serial + self.kv_own(self.fraction))

    @property
    def fits(self) -> bool:
        return bool(self.overshoot(self.bytes) <= 0)

    def rate(self, sharpness: float) -> float:
        """A sharpness, which is relative to the step, by second."""
        return sharpness / max(float(self.folded.longest(self.all_loads())), 1e-30)

    def prices(self, sharpness: float) -> np.ndarray:
        """[K], what a second more of load costs; sums to 1 a phase. Soft where loads are near the largest."""
        folded, loads = self.folded, self.all_loads()
        largest = np.maximum.reduceat(loads, folded.starts)
        weights = np.exp(sharpness / max(float(largest.sum()), 1e-30) * (loads - largest[folded.phase_of]))
        return weights / np.add.reduceat(weights, folded.starts)[folded.phase_of]

    def ladder(self, moves: Moves, *, sharpness: float | None, byte_price: float) -> tuple[float, int]:
        """The best prefix: its value, and how many moves. With no moves the value is that of standing still."""
        folded = self.folded
        steps = _rungs(len(moves.rows))
        work, own, used_bytes, counts = self._steps(moves, steps)
        loads = self.loads + self.kv_loads(self.fraction) + work
        if folded.has_fixed:
            used = counts > 0
            loads += used @ folded.fixed
            own = own + used @ folded.fixed_serial
        if sharpness is None:
            values = folded.longest(loads)
        else:
            values = folded.soft_longest(loads, sharpness / max(float(folded.longest(loads[0])), 1e-30))
        over = self.overshoot(used_bytes)
        values = values + own + (np.where(over > 0, np.inf, 0.0) if byte_price == np.inf else byte_price * over)
        best = int(values.argmin())
        return float(values[best] + self.own + folded.serial_s + self.kv_own(self.fraction)), int(steps[best])

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
        self.count = self.count + np.bincount(columns[acting], minlength=s) - np.bincount(before[acting], minlength=s)
        self.columns[rows] = columns


def _sums(change: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Running sums of `change` [M + 1, X] after each number of moves in `steps`; the first row is 0."""
    return np.add.reduceat(change, np.concatenate([[0], steps[:-1] + 1]), axis=0).cumsum(axis=0)


@functools.lru_cache(maxsize=4096)
def _rungs(total: int) -> np.ndarray:
    """Prefix lengths to try: all short ones, then ever longer steps, and the whole."""
    few = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16])
    return np.unique(np.concatenate([few[few <= total], total * np.arange(1, 17) // 16]))
