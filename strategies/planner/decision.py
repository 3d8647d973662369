"""A decision while it is improved: its loads, and what many further moves in a row would be worth.

A move gives a row (an adapter) another column (strategy). `Decision.ladder` evaluates prefixes of a list of moves,
exactly and all at once, so an improvement is: price, sort by gain, take the best prefix.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strategies.planner.folded import Folded

_ROUNDING_BYTES = 1e-5
"""Running sums of bytes may be off by this."""


class Moves(NamedTuple):
    """Rows and their next columns, in order; and P, which changes after the first `kv_at` of them.

    Attributes:
        rows: [M].
        columns: [M].
        fraction: P after the change.
        kv_at: moves before it.
    """

    rows: np.ndarray
    columns: np.ndarray
    fraction: float
    kv_at: int


class Decision:
    """Columns of all adapters, P, and the sums that follow from them."""

    def __init__(self, folded: Folded, columns: np.ndarray, *, attention: int, fraction: float) -> None:
        self.folded = folded
        problem = folded.problem
        self.columns = columns.copy()
        self.attention = attention
        self.fraction = fraction
        self.loads = folded.base + folded.places(folded.sums(columns))
        self.own = float(folded.own[folded.rows, columns].sum())
        self.bytes = float(problem.device_bytes[folded.rows, columns].sum())
        self.count = np.bincount(columns[problem.active], minlength=folded.num_columns)

    def copy(self) -> Decision:
        other = object.__new__(Decision)
        other.__dict__.update(self.__dict__)
        other.columns, other.loads, other.count = self.columns.copy(), self.loads.copy(), self.count.copy()
        return other

    def take(self, other: Decision) -> None:
        """Becomes what `other` is; `other` is not used after it."""
        self.__dict__.update(other.__dict__)

    def all_loads(self) -> np.ndarray:
        """[F, Q], with fixed charges and KV."""
        folded = self.folded
        loads = self.loads + self.folded.fixed[self.count > 0].sum(axis=0)
        loads[folded.problem.kv.phase] += self.kv_loads(self.fraction)
        return loads

    def kv_loads(self, fraction: float) -> np.ndarray:
        """[Q], of attention in its phase when P is `fraction`."""
        return fraction * self.folded.kv_device + (1 - fraction) * self.folded.kv_pool[self.attention]

    def kv_own(self, fraction):
        """Seconds of KV that are no load: the merge and copies; for any shape of fractions."""
        kv = self.folded.problem.kv
        merge = np.where(fraction < 1, kv.pool_serial_s[self.attention], 0.0)
        return merge + kv.move_s * np.maximum(0.0, fraction - kv.current_fraction)

    def overshoot(self, adapter_bytes, fraction):
        """Bytes beyond the limits; for any shape of both."""
        problem, kv = self.folded.problem, self.folded.problem.kv
        kv_bytes = fraction * kv.device_bytes
        over = adapter_bytes + kv_bytes - problem.budget_bytes
        if kv.adapter_budget_bytes is not None:
            over = np.maximum(over, adapter_bytes - kv.adapter_budget_bytes)
        return np.maximum(over - _ROUNDING_BYTES - 1e-10 * problem.budget_bytes, 0.0)

    def value(self) -> float:
        """The objective, as `evaluate` defines it (but for what decides ties)."""
        folded = self.folded
        total = self.all_loads().max(axis=1).sum() + self.own + folded.serial_s
        return float(total + folded.fixed_serial[self.count > 0].sum() + self.kv_own(self.fraction))

    @property
    def fits(self) -> bool:
        return bool(self.overshoot(self.bytes, self.fraction) <= 0)

    def prices(self, sharpness: float) -> np.ndarray:
        """[F, Q], what a second more of load costs; sums to 1 a phase. Soft where loads are near the largest."""
        loads = self.all_loads()
        largest = loads.max(axis=1, keepdims=True)
        weights = np.exp(sharpness / max(float(largest.sum()), 1e-30) * (loads - largest))
        return weights / weights.sum(axis=1, keepdims=True)

    def ladder(self, moves: Moves, *, sharpness: float | None, byte_price: float) -> tuple[float, int, float]:
        """The best prefix: its value, how many moves, P. With no moves the value is that of standing still."""
        folded, problem = self.folded, self.folded.problem
        total = len(moves.rows)
        steps = _rungs(total, moves.kv_at)
        sums, own, used_bytes, counts = self._steps(moves, steps)
        after = steps >= moves.kv_at
        fractions = np.where(after, moves.fraction, self.fraction)
        if moves.fraction != self.fraction:
            middle = np.linspace(self.fraction, moves.fraction, 9)[1:-1]
            where = int(np.searchsorted(steps, moves.kv_at))
            pick = np.concatenate([np.arange(len(steps)), np.full(len(middle), where)])
            sums, own, used_bytes, counts, steps = (x[pick] for x in (sums, own, used_bytes, counts, steps))
            fractions = np.concatenate([fractions, middle])
        used = counts > 0
        loads = self.loads + folded.places(sums)
        if folded.has_fixed:
            loads += (used @ folded.fixed.reshape(len(folded.fixed), -1)).reshape(loads.shape)
        phase, kv_pool = problem.kv.phase, folded.kv_pool[self.attention]
        loads[:, phase] += kv_pool + fractions[:, None] * (folded.kv_device - kv_pool)
        longest = loads.max(axis=-1)
        values = longest.sum(axis=1)
        if sharpness is not None:
            rate = sharpness / max(float(longest[0].sum()), 1e-30)
            values = values + np.log(np.exp(rate * (loads - longest[..., None])).sum(axis=-1)).sum(axis=1) / rate
        values = values + own + used @ folded.fixed_serial + self.kv_own(fractions)
        over = self.overshoot(used_bytes, fractions)
        values = values + (np.where(over > 0, np.inf, 0.0) if byte_price == np.inf else byte_price * over)
        best = int(values.argmin())
        return float(values[best] + self.own + folded.serial_s), int(steps[best]), float(fractions[best])

    def _steps(self, moves: Moves, steps: np.ndarray):
        """Changes after each number of moves in `steps`: sums by home, own seconds; bytes and counts in all."""
        folded, problem = self.folded, self.folded.problem
        rows, columns = moves.rows, moves.columns
        before = self.columns[rows]
        num_steps, num_homes, s = len(steps), folded.num_homes, folded.num_columns
        at = np.searchsorted(steps, np.arange(len(rows)), side="right")  # first step that has the move
        flat = folded.load.reshape(-1, folded.load.shape[-1])
        change = flat[rows * s + columns] - flat[rows * s + before]
        sums = np.zeros((num_steps * num_homes, change.shape[-1]))
        key = at * num_homes + folded.home[rows]
        order = key.argsort(kind="stable")
        sorted_key = key[order]
        starts = np.flatnonzero(np.diff(sorted_key, prepend=-1))
        if len(rows):
            sums[sorted_key[starts]] = np.add.reduceat(change[order], starts, axis=0)
        sums = sums.reshape(num_steps, num_homes, -1).cumsum(axis=0)
        own = np.bincount(at, folded.own[rows, columns] - folded.own[rows, before], num_steps).cumsum()
        more = np.bincount(at, problem.device_bytes[rows, columns] - problem.device_bytes[rows, before], num_steps)
        acting = problem.active[rows]
        size = num_steps * s
        counts = np.bincount((at * s + columns)[acting], minlength=size) - np.bincount(
            (at * s + before)[acting], minlength=size
        )
        counts = self.count + counts.reshape(num_steps, s).cumsum(axis=0)
        shape = (num_steps, num_homes, folded.num_phases, -1)
        return sums.reshape(shape), own, self.bytes + more.cumsum(), counts

    def apply(self, moves: Moves, number: int, fraction: float) -> None:
        """Takes the first `number` of the moves, and P."""
        if number:
            steps = np.array([number])
            prefix = Moves(moves.rows[:number], moves.columns[:number], fraction, 0)
            sums, own, used_bytes, counts = self._steps(prefix, steps)
            self.loads += self.folded.places(sums[0])
            self.own += float(own[0])
            self.bytes = float(used_bytes[0])
            self.count = counts[0]
            self.columns[prefix.rows] = prefix.columns
        self.fraction = fraction


def _rungs(total: int, kv_at: int) -> np.ndarray:
    """Prefix lengths to try: all short ones, then ever longer steps, the whole, and where P changes."""
    few = [0, 1, 2, 3, 4, 6, 8, 12, 16]
    rungs = {k for k in few if k <= total} | {total * k // 16 for k in range(1, 17)} | {min(kv_at, total)}
    return np.array(sorted(rungs))
