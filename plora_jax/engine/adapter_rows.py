"""Adapters as rows of arrays: what plan problems are made of, kept as adapters come and go.

Rows are small numbers that are used again. Arrays are replaced and never changed, so that a thread that plans can go on
with those it was given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memory_pool.adapter_pool import AdapterFigures, AdapterPool
from strategies.cost import LORA_COLUMNS, AdapterFeatures, ModelShape, adapter_features
from strategies.planner import NOWHERE

NOBODY = 0
"""Identity in a row that no adapter has."""


class AdapterRows:
    """The rows of all adapters of a pool; the engine's thread.

    Args:
        pool: where adapters are; None where nobody plans for them: there are no rows then.
        shape: of one shard of the base model.
        names: projections in the order of the pool's ranks.
        page_bytes: of one shard.

    Attributes:
        ids: [N] identities, NOBODY in free rows.
        features: of N adapters; zeros in free rows.
        home: [N] pool device, or STRIPED.
        current: [N] column that serves each or is on its way; NOWHERE in free rows.
        pinned: [N] bool.
    """

    def __init__(self, pool: AdapterPool | None, shape: ModelShape, *, names: Sequence[str], page_bytes: int) -> None:
        self._pool, self._shape, self._page_bytes = pool, shape, page_bytes
        self._columns = [names.index(name) if name in names else None for name in shape.names]
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self.ids = np.zeros(0, np.int64)
        self.features = adapter_features(shape, np.zeros((0, len(shape.names)), int))
        self.home = np.zeros(0, np.int64)
        self.current = np.zeros(0, np.int64)
        self.pinned = np.zeros(0, bool)

    def row(self, adapter_id: int) -> int | None:
        """The row of an adapter; None for one that is not known, as the base model."""
        return self._rows.get(adapter_id)

    def update(self) -> list[int]:
        """Follows the pool.

        Returns:
            Rows whose adapter is gone; they may belong to another already.
        """
        if self._pool is None or not (changed := self._pool.take_changes()):
            return []
        gone, come, moved = [], {}, {}
        for adapter_id in sorted(changed):
            figures = self._pool.figures(adapter_id)
            if figures is None:
                if (row := self._rows.pop(adapter_id, None)) is not None:
                    gone.append(row)
            elif adapter_id in self._rows:
                moved[self._rows[adapter_id]] = figures
            else:
                come[adapter_id] = figures
        self._clear(gone)
        self._add(come)
        if moved:
            self.current = self.current.copy()
            self.current[list(moved)] = [LORA_COLUMNS.index(figures.strategy) for figures in moved.values()]
        return gone

    def _clear(self, rows: list[int]) -> None:
        if rows:
            self._free += rows
            nothing = adapter_features(self._shape, np.zeros((len(rows), len(self._shape.names)), int))
            self._set(rows, nothing, ids=NOBODY, home=0, current=NOWHERE, pinned=False)

    def _add(self, come: dict[int, AdapterFigures]) -> None:
        if not come:
            return
        fresh = range(len(self.ids), len(self.ids) + max(0, len(come) - len(self._free)))
        rows = [*self._free[: len(come)], *fresh]
        self._free = self._free[len(come) :]
        self._rows |= dict(zip(come, rows, strict=True))
        all_ = list(come.values())
        ranks = np.stack([figures.ranks for figures in all_])
        ranks = np.stack([np.zeros(len(ranks), int) if j is None else ranks[:, j] for j in self._columns], axis=1)
        a, b = np.array([figures.pages for figures in all_], float).T * self._page_bytes
        features = adapter_features(self._shape, ranks)._replace(stored_a_bytes=a, stored_b_bytes=b)
        self._set(
            rows,
            features,
            ids=list(come),
            home=[figures.home for figures in all_],
            current=[LORA_COLUMNS.index(figures.strategy) for figures in all_],
            pinned=[figures.pinned for figures in all_],
        )

    def _set(self, rows: list[int], features: AdapterFeatures, **values: object) -> None:
        size = max(len(self.ids), max(rows) + 1)
        pairs = zip(self.features, features, strict=True)
        self.features = AdapterFeatures(*(_with(old, rows, new, size=size) for old, new in pairs))
        for name, value in values.items():
            setattr(self, name, _with(getattr(self, name), rows, value, size=size))


def _with(old: np.ndarray, rows: list[int], new: object, *, size: int) -> np.ndarray:
    """A copy of `size` rows in which some are others."""
    array = np.zeros((size, *old.shape[1:]), old.dtype)
    array[: len(old)] = old
    array[rows] = new
    return array
