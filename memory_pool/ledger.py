"""Bytes that crossed the link, by what moved, why, and which way.

The ledger only adds up what it is told; the callers declare closed formulas of what they move. Moved bytes include
padding, useful bytes do not.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

Direction = Literal["to_device", "to_pool"]


class Crossing(NamedTuple):
    """What a count is kept by.

    Attributes:
        object: "adapter" (weights), "activation" (inputs, products, queries and partial results), "kv" (pages) or
            "control" (indices, page tables and flags).
        strategy: LoRA or attention strategy on whose behalf the bytes moved.
        direction: "to_device" or "to_pool".
        phase: part of the step ("prefill", "decode", ...), or "load" between steps.
    """

    object: str
    strategy: str
    direction: Direction
    phase: str


class LinkBytes(NamedTuple):
    """Bytes of a crossing.

    Attributes:
        moved: with padding, all shards together.
        useful: without padding.
    """

    moved: int
    useful: int


class Ledger:
    """Running totals; may be read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: defaultdict[Crossing, LinkBytes] = defaultdict(lambda: LinkBytes(0, 0))

    def add(self, crossing: Crossing, *, moved_bytes: int, useful_bytes: int) -> None:
        """Counts one crossing; `useful_bytes` is at most `moved_bytes`."""
        assert 0 <= useful_bytes <= moved_bytes, (crossing, moved_bytes, useful_bytes)
        with self._lock:
            old = self._totals[crossing]
            self._totals[crossing] = LinkBytes(old.moved + moved_bytes, old.useful + useful_bytes)

    def add_all(self, crossings: Iterable[tuple[Crossing, LinkBytes]]) -> None:
        """Counts several."""
        for crossing, size in crossings:
            self.add(crossing, moved_bytes=size.moved, useful_bytes=size.useful)

    def totals(self) -> dict[Crossing, LinkBytes]:
        with self._lock:
            return dict(self._totals)
