"""Engines of one process that take turns: one makes some steps while the others wait, then the next.

A machine that others use is 10 % faster or slower from minute to minute. Engines that alternate every second see the
same machine, so that a small difference between them is theirs.
"""

from __future__ import annotations

import collections
import threading


class Turns:
    """Whose turn it is; any thread.

    Args:
        engines: how many take part, known as 0, 1, ...
        steps: of one turn.
    """

    def __init__(self, engines: int, *, steps: int) -> None:
        self._order, self._steps = collections.deque(range(engines)), steps
        self._made = 0
        self._changed = threading.Condition()

    def take(self, engine: int) -> int:
        """Returns when an engine may make a step; at once after it has left. Called once for each step, before it.

        Returns:
            How many steps of its turn come before this one.
        """
        with self._changed:
            if self._is_on(engine) and self._made >= self._steps and len(self._order) > 1:
                self._order.rotate(-1)
                self._begin()
            self._changed.wait_for(lambda: self._is_on(engine) or engine not in self._order)
            before = self._made
            self._made += self._is_on(engine)
            return before

    def leave(self, engine: int) -> None:
        """Others no longer wait for an engine, which must have made its last step."""
        with self._changed:
            was_on = self._is_on(engine)
            self._order.remove(engine)
            if was_on:
                self._begin()

    def _is_on(self, engine: int) -> bool:
        return bool(self._order) and self._order[0] == engine

    def _begin(self) -> None:
        self._made = 0
        self._changed.notify_all()
