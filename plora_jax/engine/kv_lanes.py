"""The page tables of a step's attention, for both sides of the link.

Pages of a sequence that are on the device are read there. The others are streamed to a scratch on the device (`local`)
or attended near the data (`distributed`); the strategy may differ from sequence to sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np

from plora_jax.engine.plan import Sequence
from strategies.kv_traffic import KvUse
from strategies.lanes import ABSENT, SCRATCH_PAGES, AttentionLane, KvControl, KvLanes


class KvShape(NamedTuple):
    """Sizes of one phase.

    Attributes:
        groups: N.
        queries: Q, queries of a group.
        sequences: most sequences of the phase.
        table_pages: M.
        page_tokens: of a page.
        pool_devices: D.
        device_pages: pages of one pool device.
    """

    groups: int
    queries: int
    sequences: int
    table_pages: int
    page_tokens: int
    pool_devices: int
    device_pages: int


class KvMissing(NamedTuple):
    """The fields of `KvLanes` about pages that are not on the device."""

    slots: Any
    rounds: Any
    near_groups: Any


class PhaseKv(NamedTuple):
    """The attention of one phase: device side in two parts, pool side, and what it does with the link."""

    lane: AttentionLane
    missing: KvMissing
    control: KvControl
    use: KvUse


def join(lane: AttentionLane, missing: KvMissing) -> KvLanes:
    """The device side from its parts."""
    return KvLanes(lane, *missing)


@functools.lru_cache(maxsize=64)
def _nowhere(shape: KvShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots, pages by pool device and stream where all pages are on the device; read-only."""
    slots = np.full((shape.groups, shape.table_pages), ABSENT, np.int32)
    near = np.full((shape.pool_devices, *slots.shape), ABSENT, np.int32)
    stream = np.zeros(KvPacker.stream_pages(shape), np.int32)
    for array in (slots, near, stream):
        array.flags.writeable = False
    return slots, near, stream


class KvPacker:
    """Fills the tables of one phase, sequence by sequence.

    Args:
        shape: sizes.
        strategy_of: "local" or "distributed" for the pages of a sequence that are not on the device.
    """

    def __init__(self, shape: KvShape, strategy_of: Callable[[Sequence], str]) -> None:
        self._shape, self._strategy_of = shape, strategy_of
        n, m = shape.groups, shape.table_pages
        self._tables = np.full((n, m), ABSENT, np.int32)
        # Most steps have no page elsewhere, and need no tables of their own for them.
        self._slots, self._near, self._empty_stream = _nowhere(shape)
        self._positions = np.full((n, shape.queries), -1, np.int32)
        self._stream: list[np.ndarray] = []
        self._streamed = 0
        self._near_groups = 0
        self._near_queries = np.zeros(shape.pool_devices, np.int64)

    @staticmethod
    def stream_pages(shape: KvShape) -> int:
        """Room of the stream: every page of every sequence, whole rounds."""
        return -(-shape.sequences * shape.table_pages // SCRATCH_PAGES) * SCRATCH_PAGES

    def place(self, sequence: Sequence, positions: np.ndarray, *, group: int, groups: int) -> None:
        """Puts a sequence's queries into some groups.

        Args:
            sequence: whose KV handle has device pages for all tokens that are written.
            positions: [count] int32 of the queries.
            group: first of its groups.
            groups: how many.
        """
        assert sequence.kv is not None, sequence.seq_id
        here = slice(group, group + groups)
        device = sequence.kv.device_table()
        self._tables[here, : len(device)] = device
        self._positions[here].reshape(-1)[: len(positions)] = positions
        self._place_missing(sequence, len(positions), here)

    def place_each(self, sequences: SequenceOf[Sequence], positions: np.ndarray) -> np.ndarray:
        """Puts one query of each sequence into the first groups.

        Args:
            sequences: as for `place`.
            positions: [count] int32 of the queries.

        Returns:
            [count] int32, the device page that each query is written to.
        """
        count = len(sequences)
        for group, sequence in enumerate(sequences):
            assert sequence.kv is not None, sequence.seq_id
            device = sequence.kv.device_table()
            self._tables[group, : len(device)] = device
            self._place_missing(sequence, 1, slice(group, group + 1))
        self._positions[:count, 0] = positions
        return self._tables[np.arange(count), positions // self._shape.page_tokens]

    def _place_missing(self, sequence: Sequence, queries: int, here: slice) -> None:
        """The pages of a sequence that are not on the device, for the groups that hold its queries."""
        assert sequence.kv is not None, sequence.seq_id
        if not sequence.kv.num_absent:
            return
        if not self._slots.flags.writeable:
            self._slots, self._near = self._slots.copy(), self._near.copy()
        pool = sequence.kv.pool_table()
        missing = np.flatnonzero(pool != ABSENT)
        if self._strategy_of(sequence) == "local":
            self._slots[here, missing] = self._streamed + np.arange(missing.size, dtype=np.int32)
            self._stream.append(pool[missing])
            self._streamed += missing.size
            return
        owners = pool[missing] // self._shape.device_pages
        self._near_groups += here.stop - here.start
        for d in range(self._shape.pool_devices):
            on_device = missing[owners == d]
            self._near[d][here, on_device] = pool[on_device]
            self._near_queries[d] += queries if on_device.size else 0

    def finish(self) -> PhaseKv:
        """The tables of everything placed, as numpy arrays."""
        used = self._positions[self._positions >= 0]
        first = np.int32(used.min()) if used.size else np.int32(0)
        end = np.int32(used.max() + 1) if used.size else np.int32(0)
        rounds = -(-self._streamed // SCRATCH_PAGES)
        stream = self._empty_stream
        if self._stream:
            stream = stream.copy()
            stream[: self._streamed] = np.concatenate(self._stream)
        near = tuple(self._near_queries.tolist())
        return PhaseKv(
            AttentionLane(self._tables, self._positions, first, end),
            KvMissing(self._slots, np.int32(rounds), np.int32(self._near_groups)),
            KvControl(stream, self._near, self._positions, first, end),
            KvUse(rounds, self._streamed, near),
        )
