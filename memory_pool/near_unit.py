"""Whether near-data functions can be relied on.

Whoever finds that they cannot says so here, a fault injection as well; those who dispatch them look before each step.
"""

from __future__ import annotations

import threading


class NearDataUnit:
    """The compute near the data, as far as its health goes. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._failures = 0

    @property
    def failure(self) -> str | None:
        """Why nothing may run near the data any more; None while it may."""
        return self._failure

    @property
    def failures(self) -> int:
        """How often a failure was reported."""
        return self._failures

    def fail(self, reason: str) -> None:
        """Reports a failure; it lasts until the process ends.

        Args:
            reason: for the log.
        """
        with self._lock:
            self._failure, self._failures = reason, self._failures + 1
