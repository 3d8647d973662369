"""Parts of a start that go on side by side, and what is said of them meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Progress:
    """Told how far the start is; the base class says nothing. From any thread, one call at a time."""

    def stage(self, name: str) -> None:
        """A stage begins: "weights", "programs" or "adapters"."""

    def advance(self, done: int, total: int) -> None:
        """Done so far in this stage, in bytes or programs."""


class StagesInTurn:
    """Tells of stages that go on side by side as though each began when those before it are done. Any thread.

    Args:
        progress: told.
        names: of the stages, in the order they are told of; the first begins.
    """

    def __init__(self, progress: Progress, *names: str) -> None:
        self._progress, self._left = progress, list(names)
        self._reached: dict[str, tuple[int, int]] = {}
        self._ended: set[str] = set()
        self._lock = threading.Lock()
        progress.stage(names[0])

    def advance(self, name: str, done: int, total: int) -> None:
        """Done so far in a stage."""
        with self._lock:
            self._reached[name] = done, total
            if self._left and self._left[0] == name:
                self._progress.advance(done, total)

    def end(self, name: str) -> None:
        """A stage is done."""
        with self._lock:
            self._ended.add(name)
            while self._left and self._left[0] in self._ended:
                del self._left[0]
                if self._left:
                    self._progress.stage(self._left[0])
                    if reached := self._reached.get(self._left[0]):
                        self._progress.advance(*reached)


class AbandonedError(Exception):
    """Work has no use any more."""


class Beside(Generic[T]):
    """Work in a thread of its own beside the block of a `with`, which waits for it and abandons it where it fails.

    Args:
        work: given a function to call now and then, which raises AbandonedError where the work has no use any more.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T]) -> None:
        self._abandoned = threading.Event()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="start")
        self._running = self._threads.submit(work, self._go_on)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandoned.set()
        self._threads.shutdown()

    def check(self) -> None:
        """Raises what the work has failed with, if it has."""
        if self._running.done():
            self._running.result()

    def result(self) -> T:
        """Waits for the work; returns what it did, or raises what it failed with."""
        return self._running.result()

    def _go_on(self) -> None:
        if self._abandoned.is_set():
            raise AbandonedError
