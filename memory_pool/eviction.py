"""Who leaves the device when another needs the room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders what may be evicted. Keys are opaque."""

    def touch(self, key: int) -> None:
        """`key` was used now."""
        ...

    def forget(self, key: int) -> None:
        """`key` is gone."""
        ...

    def order(self, candidates: Iterable[int]) -> list[int]:
        """The candidates, first to leave first. Does not mutate."""
        ...


class LeastRecentlyUsed:
    """Evicts what was used longest ago."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._ticks = 0

    def touch(self, key: int) -> None:
        self._ticks += 1
        self._used[key] = self._ticks

    def forget(self, key: int) -> None:
        self._used.pop(key, None)

    def order(self, candidates: Iterable[int]) -> list[int]:
        return sorted(candidates, key=lambda key: self._used.get(key, 0))
