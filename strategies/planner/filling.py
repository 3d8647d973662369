"""Columns that are filled adapter by adapter while device memory lasts: what simple policies and first plans do."""

from __future__ import annotations

import numpy as np

from strategies.native import planner_calls
from strategies.planner.folded import Folded
from strategies.planner.implementation import either


class Filling:
    """Everyone in a column of fewest bytes at first, the cheapest of these.

    Args:
        allowed: [N, S] bool.
        device_bytes: [N, S].
        cost_s: [N, S], which of several columns of equal bytes is taken.
        budget_bytes: for all.

    Attributes:
        columns: [N].
        smallest: [N], as it was at first.
        free: bytes; negative when even the fewest do not fit.
    """

    def __init__(self, allowed: np.ndarray, device_bytes: np.ndarray, cost_s: np.ndarray, budget_bytes: float) -> None:
        self._allowed, self._bytes = allowed, device_bytes
        bytes_ = np.where(allowed, device_bytes, np.inf)
        fewest = bytes_ <= bytes_.min(axis=1, keepdims=True)
        self.smallest = np.where(fewest, cost_s, np.inf).argmin(axis=1)
        self.columns = self.smallest.copy()
        self.free = budget_bytes - float(device_bytes[np.arange(len(allowed)), self.smallest].sum())

    def copy(self) -> Filling:
        other = object.__new__(Filling)
        other.__dict__.update(self.__dict__)
        other.columns = self.columns.copy()
        return other

    def more_bytes(self, rows, columns):
        """Device memory that changes of single rows take; for any shape of both."""
        return self._bytes[rows, columns] - self._bytes[rows, self.columns[rows]]

    def give(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Gives rows columns, in order, to each if it may have it and it fits beside those before it.

        Returns:
            [M] bool, who got it.
        """
        more = self.more_bytes(rows, columns)
        open_ = np.flatnonzero(self._allowed[rows, columns])
        got = np.zeros(len(rows), bool)
        while len(open_):
            total = np.cumsum(more[open_])
            number = int((total > self.free).argmax()) if total.max() > self.free else len(open_)
            taken = open_[:number]
            got[taken] = True
            self.free -= float(total[number - 1]) if number else 0.0
            rest = open_[number + 1 :]
            open_ = rest[more[rest] <= self.free]
        self.columns[rows[got]] = columns[got]
        return got

    def give_one(self, row: int, column: int) -> bool:
        """The same for one row."""
        more = float(self.more_bytes(row, column))
        if not self._allowed[row, column] or more > self.free:
            return False
        self.free -= more
        self.columns[row] = column
        return True

    def freed_bytes(self, rows: np.ndarray) -> np.ndarray:
        """[M] device memory that rows would free in their smallest columns."""
        return self._bytes[rows, self.columns[rows]] - self._bytes[rows, self.smallest[rows]]

    def evict(self, rows: np.ndarray) -> None:
        """Puts rows back into their smallest columns."""
        self.free += float(self.freed_bytes(rows).sum())
        self.columns[rows] = self.smallest[rows]


@either(planner_calls.fillings)
def fillings(folded: Folded, current: np.ndarray, fetch: int | None) -> tuple[np.ndarray, float]:
    """Columns in which everyone is, or that are filled: active rows first, of these those who are there now.

    Args:
        folded: the problem.
        current: [M] columns that serve rows now.
        fetch: a column for active rows that do not fit; None: they stay where they take fewest bytes.

    Returns:
        columns: [1 + S, M], everyone where it takes fewest bytes; and for each column, everyone in it who fits.
        free: bytes with the fewest; negative when they do not fit.
    """
    filling = Filling(folded.allowed, folded.bytes, folded.work.sum(axis=-1) + folded.own, folded.adapter_budget_bytes)
    found, idle = [filling.columns], (~folded.active).astype(np.uint8)
    for column in range(folded.num_columns):
        full = filling.copy()
        order = np.argsort(2 * idle + (current != column), kind="stable")
        rest = order[~full.give(order, np.full(len(order), column))]
        if fetch is not None and column != fetch:
            rest = rest[folded.active[rest]]
            full.give(rest, np.full(len(rest), fetch))
        found.append(full.columns)
    return np.stack(found), filling.free
