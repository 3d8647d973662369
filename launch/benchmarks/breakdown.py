"""Where a step's time goes, part by part, and how far each part is from what the machine allows."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.benchmarks.machine_rates import MachineRates
from launch.benchmarks.step_parts import HOST, OUTSIDE, part_of
from launch.benchmarks.step_work import PlannedStep, StepModel, mean_work
from launch.benchmarks.trace_events import Event, Segment, divide, find_trace, innermost, operation_names, read_threads
from plora_jax.engine import annotations
from plora_jax.engine.buckets import Bucket, pick_bucket

SHOWN_SHARE = 0.05
"""Parts of a step from this share on have a line of their own."""

_PART_WIDTH = 32
_WIDTH = 10


class PartTime(NamedTuple):
    """One part of a step.

    Attributes:
        part: its name.
        seconds: of the mean step.
        share: of the step.
        limit_s: the least that the machine allows; None where nothing has to be read or computed.
        bound: what that limit is from, "memory" or "arithmetic".
    """

    part: str
    seconds: float
    share: float
    limit_s: float | None
    bound: str | None

    @property
    def ratio(self) -> float | None:
        """How many times its limit it takes."""
        return self.seconds / self.limit_s if self.limit_s else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breakdown:
    """A kind of step, divided.

    Attributes:
        title: which step.
        steps: in the trace.
        traced_s: of the mean step under the profiler; the parts add up to it.
        parts: the longest first.
    """

    title: str
    steps: int
    traced_s: float
    parts: Sequence[PartTime]

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        parts = [{**part._asdict(), "ratio": part.ratio} for part in self.parts]
        return {"title": self.title, "steps": self.steps, "traced_s": self.traced_s, "parts": parts}

    def as_lines(self) -> list[str]:
        """A table: the parts from 5 % on, and the others in one line."""
        head = f"{self.title}: {1000 * self.traced_s:.2f} ms under the profiler, mean of {self.steps} steps"
        columns = "".join(f"{name:>{_WIDTH}}" for name in ("ms", "share", "limit, ms", "x limit"))
        lines = [head, f"  {'part':<{_PART_WIDTH}}{columns}   bound by"]
        lines += [_line(part) for part in self.parts if part.share >= SHOWN_SHARE]
        small = [part for part in self.parts if part.share < SHOWN_SHARE]
        if small:
            seconds, share = sum(part.seconds for part in small), sum(part.share for part in small)
            lines.append(_line(PartTime(f"{len(small)} others", seconds, share, None, None)))
            lines.append("    others: " + ", ".join(f"{part.part} {1000 * part.seconds:.2f}" for part in small))
        return lines


def _line(part: PartTime) -> str:
    limit = "-" if part.limit_s is None else f"{1000 * part.limit_s:.2f}"
    ratio = "-" if part.ratio is None else f"{part.ratio:.1f}"
    text = f"  {part.part:<{_PART_WIDTH}}{1000 * part.seconds:>{_WIDTH}.2f}{part.share:>{_WIDTH}.1%}"
    return f"{text}{limit:>{_WIDTH}}{ratio:>{_WIDTH}}   {part.bound or '-'}".rstrip()


class TracedSteps(NamedTuple):
    """Steps as a trace has them, and what they were.

    Attributes:
        directory: of the trace.
        steps: in order, those that are whole in the trace.
        programs: text of the compiled program by bucket.
    """

    directory: pathlib.Path
    steps: Sequence[PlannedStep]
    programs: Mapping[Bucket, str]


def break_down(
    traced: TracedSteps, model: StepModel, rates: MachineRates, *, title: str, middle_half: bool
) -> Breakdown | None:
    """Divides traced steps.

    Args:
        traced: the steps.
        model: for the least work of each part.
        rates: of this machine.
        title: of the table.
        middle_half: leave out the quickest and the slowest quarter, as disturbed.

    Returns:
        None where the trace has no whole step.
    """
    threads = read_threads(find_trace(traced.directory))
    windows = list(zip(_windows(threads), traced.steps, strict=False))
    if middle_half and len(windows) >= 4:
        windows.sort(key=lambda pair: _length(pair[0]))
        windows = windows[len(windows) // 4 : -(len(windows) // 4)]
    if not windows:
        return None
    found = _divided(threads, windows, traced.programs)
    steps = [step for _, step in windows]
    total_s = statistics.fmean(_length(window) for window, _ in windows) / 1e9
    work = mean_work(steps, model)
    parts = []
    for part, ns in found.most_common():
        seconds = ns / 1e9 / len(windows)
        least = work.get(part)
        limit = rates.seconds(*least) if least and any(least) else (None, None)
        parts.append(PartTime(part, seconds, seconds / total_s, *limit))
    return Breakdown(title=title, steps=len(windows), traced_s=total_s, parts=parts)


def _divided(
    threads: Sequence[Sequence[Event]], windows: Sequence[tuple[Event, PlannedStep]], programs: Mapping[Bucket, str]
) -> collections.Counter[str]:
    """Nanoseconds of all windows together, by part."""
    segments: list[Segment] = sorted(segment for events in threads for segment in innermost(events))
    parts: dict[Bucket, dict[str, str]] = {}
    found: collections.Counter[str] = collections.Counter()
    for window, step in windows:
        bucket = pick_bucket(list(programs), step.plan)
        if bucket not in parts:
            parts[bucket] = {name: part_of(name, names) for name, names in operation_names(programs[bucket]).items()}
        for part, ns in divide(segments, window, operations=parts[bucket], host=HOST).items():
            found[part or OUTSIDE] += ns  # pyright: ignore[reportArgumentType]
    return found


def _windows(threads: Sequence[Sequence[Event]]) -> list[Event]:
    """Steps that carried a plan out, in order."""
    steps = sorted((e for events in threads for e in events if e.name == annotations.STEP), key=lambda e: e.start_ns)
    starts = [e.start_ns for events in threads for e in events if e.name == annotations.DISPATCH]
    return [step for step in steps if any(step.start_ns <= start < step.end_ns for start in starts)]


def _length(window: Event) -> float:
    return window.end_ns - window.start_ns
