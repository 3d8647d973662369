"""How many tokens a step adapters have lately: what a planner expects of the next steps.

An exponential average whose weight halves every `half_life_steps`. A step costs as much as it has adapters: the others
decay when they are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class AdapterLoad:
    """Tokens a step by adapter; rows are numbers that the caller gives out, small and reused.

    Args:
        half_life_steps: steps after which an observation counts half; above 0.

    Raises:
        ValueError: the half-life is not above 0.
    """

    def __init__(self, half_life_steps: float) -> None:
        if not half_life_steps > 0:
            raise ValueError(f"half_life_steps {half_life_steps!r} must be above 0")
        self._keep = 0.5 ** (1.0 / half_life_steps)
        self._steps = 0
        self._mean = np.zeros(0)
        self._seen = np.zeros(0, np.int64)

    def observe(self, tokens: Mapping[int, int]) -> None:
        """One step: tokens by row; rows that are left out had none.

        Cost: in proportion to the rows given.
        """
        self._steps += 1
        if not tokens:
            return
        rows = np.fromiter(tokens.keys(), np.int64, len(tokens))
        self._grow(int(rows.max()) + 1)
        counts = np.fromiter(tokens.values(), float, len(tokens))
        self._mean[rows] = self._decayed(rows) + (1 - self._keep) * counts
        self._seen[rows] = self._steps

    def tokens_per_step(self, num_rows: int) -> np.ndarray:
        """[num_rows] float64, expected tokens a step; 0 for rows never seen."""
        out = np.zeros(num_rows)
        known = np.arange(min(num_rows, len(self._mean)))
        out[: len(known)] = self._decayed(known)
        return out

    def last_step(self, num_rows: int) -> np.ndarray:
        """[num_rows] int64, number of the step that had tokens for it last; 0 for rows never seen."""
        out = np.zeros(num_rows, np.int64)
        out[: min(num_rows, len(self._seen))] = self._seen[:num_rows]
        return out

    def forget(self, row: int) -> None:
        """The row belongs to another adapter from here on."""
        if row < len(self._mean):
            self._mean[row], self._seen[row] = 0.0, 0

    def _decayed(self, rows: np.ndarray) -> np.ndarray:
        return self._mean[rows] * self._keep ** (self._steps - self._seen[rows])

    def _grow(self, size: int) -> None:
        if size > len(self._mean):
            more = max(size, 2 * len(self._mean)) - len(self._mean)
            self._mean = np.concatenate([self._mean, np.zeros(more)])
            self._seen = np.concatenate([self._seen, np.zeros(more, np.int64)])
