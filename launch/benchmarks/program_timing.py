"""Times compiled programs in their stride: round after round over all of them, on cold pages, beside a streaming read.

A timed call follows one of the same program on other pages, as a step follows a step. Every round goes over all groups
of programs, so a disturbance of seconds spoils one run of some programs and not all runs of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from launch.benchmarks.cold_pages import ColdPages
from launch.benchmarks.strategy_programs import Program
from launch.benchmarks.strategy_report import Timing


def measure(
    groups: Sequence[Sequence[Program]], cold: ColdPages, *, runs: int, tell: Callable[[int, float], None]
) -> list[tuple[Timing, ...]]:
    """Times programs in turn, each group after a streaming read of all pages.

    Args:
        groups: each program runs twice a round, of which the second counts.
        cold: their pages.
        runs: measured rounds, after one to warm up.
        tell: told the number of a round, from 0 which warms up, and its seconds.

    Returns:
        The timings of each group.
    """
    times: list[list[list[float]]] = [[] for _ in groups]
    streams: list[list[float]] = [[] for _ in groups]
    for number in range(runs + 1):
        started = time.monotonic()
        for group, runs_s, rates in zip(groups, times, streams, strict=True):
            rates.append(cold.num_bytes / cold.stream_s())
            runs_s.append([_steady_s(program) for program in group])
        tell(number, time.monotonic() - started)
    return [
        tuple(
            Timing(program.name, program.data_bytes, column, tuple(rates[1:]), program.moved, program.useful)
            for program, column in zip(group, zip(*runs_s[1:], strict=True), strict=True)
        )
        for group, runs_s, rates in zip(groups, times, streams, strict=True)
    ]


def _steady_s(program: Program) -> float:
    """Seconds of a call that follows one of the same program, as a step follows a step."""
    _call_s(program)
    return _call_s(program)


def _call_s(program: Program) -> float:
    arguments = program.arguments()
    started = time.perf_counter()
    result = program.call(*arguments)
    result.block_until_ready()
    seconds = time.perf_counter() - started
    assert np.isfinite(np.asarray(result)).all(), program.name
    return seconds
