"""What a start shows: a bar for each stage in a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from plora_jax.engine.start import Progress as StartProgress

_TITLES = {"weights": "loading the base model", "programs": "compiling programs", "adapters": "loading adapters"}
_LABEL_WIDTH = 11


class StageLog(StartProgress):
    """Says how far a start is.

    Args:
        console: where; a bar needs a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name: str | None = None
        self._bar: Progress | None = None
        self._started_s = 0.0
        self._total = 0

    def say(self, label: str, text: str) -> None:
        """Prints a line."""
        self._console.print(f"{label:<{_LABEL_WIDTH}} {text}", highlight=False, markup=False, soft_wrap=True)

    def stage(self, name: str) -> None:
        self.end()
        self._name, self._started_s, self._total = name, time.monotonic(), 0
        title = _TITLES.get(name, name)
        if not self._console.is_terminal:
            self.say(name, f"{title} ...")
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._bar.add_task(title, total=None)
        self._bar.start()

    def advance(self, done: int, total: int) -> None:
        self._total = total
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def end(self, *, failed: bool = False) -> None:
        """Ends the stage that runs, if any; one that did not fail with a line of what it did and how long it took."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._name is not None and not failed:
            amount = in_bytes(self._total) if self._name == "weights" else str(self._total)
            self.say(self._name, f"{amount} in {time.monotonic() - self._started_s:.1f} s")
        self._name = None


def in_bytes(size: float) -> str:
    """A number of bytes as people read it, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
