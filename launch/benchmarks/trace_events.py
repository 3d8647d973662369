"""Reads a profiler's trace and divides the time of steps among what ran meanwhile.

Operations run on several threads and lie inside each other, so their durations add up to more than the time that
passed. Here every moment of a step counts once: it goes to the innermost operation of each thread, in equal parts where
several threads have one; to a loop or a condition where nothing inside it runs; and to the host's part of the step
where no operation runs at all.
"""

from __future__ import annotations

import collections
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.profiler import ProfileData

_CONTROL = re.compile(r"^(while|cond|conditional|call|closed_call)\b|\.clone\b")
"""Names of operations that only contain others."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_NAMES = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")


class Event(NamedTuple):
    """Something that a thread was at; times in nanoseconds."""

    name: str
    start_ns: float
    end_ns: float


class Segment(NamedTuple):
    """A time in which a thread was at one thing and at nothing inside it."""

    start_ns: float
    end_ns: float
    name: str


def find_trace(directory: pathlib.Path) -> pathlib.Path:
    """The latest trace in a directory that the profiler wrote to."""
    return max(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)


def read_threads(path: pathlib.Path) -> list[list[Event]]:
    """Events of each thread.

    Args:
        path: an .xplane.pb file.
    """
    data = ProfileData.from_file(str(path))
    return [
        [Event(e.name, e.start_ns, e.start_ns + e.duration_ns) for e in line.events]
        for plane in data.planes
        for line in plane.lines
    ]


def innermost(events: Sequence[Event]) -> Iterator[Segment]:
    """Cuts the nested events of one thread into segments that do not overlap."""
    open_events: list[Event] = []
    at = 0.0
    for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
        while open_events and open_events[-1].end_ns <= event.start_ns:
            last = open_events.pop()
            if last.end_ns > at:
                yield Segment(at, last.end_ns, last.name)
                at = last.end_ns
        if open_events and event.start_ns > at:
            yield Segment(at, event.start_ns, open_events[-1].name)
        at = max(at, event.start_ns)
        open_events.append(event)
    while open_events:
        last = open_events.pop()
        if last.end_ns > at:
            yield Segment(at, last.end_ns, last.name)
            at = last.end_ns


def operation_names(hlo: str) -> dict[str, str]:
    """What each operation of a compiled program stands for, by its name in traces.

    Args:
        hlo: text of the program.

    Returns:
        The names around it when it was traced, outermost first, with slashes; those of the last operation inside where
        it has none itself, as the compiler's fusions; empty where nothing has any.
    """
    found: dict[str, str] = {}
    inside: dict[str, str] = {}
    calls: dict[str, str] = {}
    computation = ""
    for line in hlo.splitlines():
        if head := _COMPUTATION.match(line):
            computation = head[1]
        elif instruction := _INSTRUCTION.match(line):
            names, called = _NAMES.search(line), _CALLS.search(line)
            found[instruction[1]] = names[1] if names else ""
            if names:
                inside[computation] = names[1]
            elif called:
                calls[instruction[1]] = called[1]
    return found | {name: inside.get(computation, "") for name, computation in calls.items()}


def divide(
    segments: Iterable[Segment], window: Event, *, operations: Mapping[str, str], host: Mapping[str, str]
) -> dict[str, float]:
    """Time of a window by what it went to.

    Args:
        segments: of all threads.
        window: the step.
        operations: part of the step by name of an operation.
        host: part of the step by name of an annotation of the host.

    Returns:
        Nanoseconds by part; what belongs to none is under "".
    """
    changes: list[tuple[float, int, int, str]] = []
    for segment in segments:
        start, end = max(segment.start_ns, window.start_ns), min(segment.end_ns, window.end_ns)
        if start >= end:
            continue
        if segment.name in operations:
            rank, part = int(bool(_CONTROL.search(segment.name))), operations[segment.name]
        elif segment.name in host:
            rank, part = 2, host[segment.name]
        else:
            continue
        changes += [(start, 1, rank, part), (end, -1, rank, part)]
    changes.sort(key=lambda change: change[0])
    return _sweep(changes, window)


def _sweep(changes: Sequence[tuple[float, int, int, str]], window: Event) -> dict[str, float]:
    active: list[collections.Counter[str]] = [collections.Counter() for _ in range(3)]
    found: collections.Counter[str] = collections.Counter()
    at = window.start_ns
    for time_ns, step, rank, part in changes:
        if time_ns > at:
            _give(found, active, time_ns - at)
            at = time_ns
        active[rank][part] += step
    _give(found, active, window.end_ns - at)
    return dict(found)


def _give(found: collections.Counter[str], active: Sequence[collections.Counter[str]], amount: float) -> None:
    for parts in active:
        running = +parts
        if running:
            total = running.total()
            for part, count in running.items():
                found[part] += amount * count / total  # pyright: ignore[reportArgumentType]
            return
    found[""] += amount  # pyright: ignore[reportArgumentType]
