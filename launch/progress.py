"""A progress bar for work that is counted in bytes, as loading a model is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextlib.contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar on standard error while the context lasts.

    Args:
        title: what is being done.

    Yields:
        A function to call with bytes done and bytes in total.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
