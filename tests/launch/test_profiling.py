"""Traces of steps: which steps are in them, when they begin and end, and what stands in the way."""

from __future__ import annotations

import pathlib
import types

import pytest

from launch.flags import StartError
from launch.profiling import ProfileConfig, StepProfiler
from plora_jax.engine.annotations import STEP, annotate
from plora_jax.engine.plan import StepPlan

PLANS = [StepPlan((number,)) for number in range(8)]  # pyright: ignore[reportArgumentType]


class Steps:
    """Steps that do nothing but say that they are steps."""

    def __init__(self, directory: pathlib.Path, **options: object) -> None:
        self.taken: list[StepPlan] = []
        self.done: list[pathlib.Path] = []
        self.profiler = StepProfiler(directory, take=self.taken.append, on_done=self.done.append, **options)

    def run(self) -> list[int]:
        for plan in PLANS:
            with annotate(STEP):
                self.profiler(plan)
        return [plan.rows[0] for plan in self.taken]  # pyright: ignore[reportReturnType]


def steps_in(directory: pathlib.Path) -> int:
    from launch.benchmarks.trace_events import find_trace, read_threads

    return sum(event.name == STEP for events in read_threads(find_trace(directory)) for event in events)


def test_trace_begins_inside_the_first_wanted_step_and_holds_so_many_whole_ones(tmp_path):
    steps = Steps(tmp_path / "a" / "b", steps=3, wanted=lambda plan: plan.rows[0] >= 2)
    assert steps.run() == [3, 4, 5]
    assert steps.done == [tmp_path / "a" / "b"]
    assert steps_in(steps.done[0]) == 3


def test_trace_that_begins_ahead_holds_the_first_step_and_ends_before_one_that_is_not_wanted(tmp_path):
    steps = Steps(tmp_path, steps=20, wanted=lambda plan: plan.rows[0] < 4)
    steps.profiler.start()
    assert steps.run() == [0, 1, 2, 3]
    assert steps_in(tmp_path) == 4
    steps.profiler.close()
    assert len(steps.done) == 1


def test_executor_that_is_watched_is_left_alone_once_the_trace_is_written(tmp_path):
    steps, executor = Steps(tmp_path, steps=2), types.SimpleNamespace(on_step=None)
    steps.profiler.watch(executor)  # pyright: ignore[reportArgumentType]
    told = 0
    while executor.on_step is not None:
        executor.on_step(PLANS[told])
        told += 1
    assert told == 4, "one in which the trace begins, two in it, one before which it ends"
    assert steps.done == [tmp_path]


def test_close_writes_what_there_is(tmp_path):
    steps = Steps(tmp_path, steps=20)
    assert steps.run() == list(range(1, 8))
    assert steps.done == []
    steps.profiler.close()
    assert steps_in(tmp_path) == 7


def test_second_trace_at_once_is_left_out_with_a_warning(tmp_path, caplog):
    first, second = Steps(tmp_path / "1", steps=3), Steps(tmp_path / "2", steps=3)
    first.profiler.start()
    second.profiler.start()
    first.profiler.close()
    assert f"no trace is written to {tmp_path / '2'}: " in caplog.text
    assert second.run() == []


def test_flags_and_directories_that_cannot_be_are_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    problems = ProfileConfig(profile_dir=str(file), profile_steps=0).problems()
    assert problems == [
        "--profile_steps must be at least 1, got 0",
        f"--profile_dir {str(file)!r} is not a directory: name one, or one that is to be made",
    ]
    with pytest.raises(StartError, match=r"--profile_dir '.*/file/x' cannot be made: "):
        StepProfiler(str(file / "x"), steps=1)
