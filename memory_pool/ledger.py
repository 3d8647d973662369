"""Bytes that crossed the link, by what moved, why, and which way.

The ledger only adds up what it is told; the callers declare closed formulas of what they move. Moved bytes include
padding, useful bytes do not.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Literal, NamedTuple

Direction = Literal["to_device", "to_pool"]


class Crossing(NamedTuple):
    """What a count is kept by.

    Attributes:
        object: "adapter", "kv", "control", ...
        strategy: LoRA or attention strategy on whose behalf the bytes moved.
        direction: "to_device" or "to_pool".
        phase: "load", "prefill" or "decode".
    """

    object: str
    strategy: str
    direction: Direction
    phase: str


class LinkBytes(NamedTuple):
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

    def totals(self) -> dict[Crossing, LinkBytes]:
        with self._lock:
            return dict(self._totals)
