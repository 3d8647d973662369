"""What a training run shows while it runs: a bar with loss, eval loss, tokens/s and the time that is left."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator

from rich import progress as bars
from rich.console import Console

from plora_jax.training import Progress

# tokens/s is of so many last steps, so that compilations of the first ones are soon forgotten.
_RATE_STEPS = 10


@contextlib.contextmanager
def training_progress(total_steps: int, console: Console) -> Iterator[Callable[[Progress], None]]:
    """Shows a bar while the context lasts, and a line for every evaluation.

    Args:
        total_steps: optimiser steps of the run.
        console: where to.

    Yields:
        A function to call after each step.
    """
    columns = (
        bars.TextColumn("step"),
        bars.MofNCompleteColumn(),
        bars.BarColumn(),
        bars.TextColumn("{task.fields[figures]}"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
    )
    recent: collections.deque[Progress] = collections.deque(maxlen=_RATE_STEPS)
    eval_text = ""
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total_steps, figures="compiling ...")

        def show(step: Progress) -> None:
            nonlocal eval_text
            recent.append(step)
            rate = sum(s.tokens for s in recent) / max(sum(s.seconds for s in recent), 1e-9)
            if step.eval_loss is not None:
                eval_text = f"  eval loss {step.eval_loss:.4f}"
                bar.console.print(
                    f"step {step.step}/{step.total_steps}  loss {step.loss:.4f}{eval_text}  {rate:.0f} tokens/s",
                    highlight=False,
                )
            figures = f"loss {step.loss:.4f}{eval_text}  {rate:.0f} tokens/s"
            bar.update(task, completed=step.step, figures=figures)

        yield show
