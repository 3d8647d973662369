"""Figures of runs, from times that are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from launch.benchmarks.measurement import Job, RequestRecord, measure, median_run, run_figures


class ScriptedTarget:
    """Answers job i after 1 s with pieces (i + 1) tenths of a second apart, and counts as it is told."""

    def __init__(self) -> None:
        self.calls: list[int | None] = []

    def run(self, jobs: Sequence[Job], *, concurrency: int | None) -> list[RequestRecord]:
        self.calls.append(concurrency)
        start = 100.0 * len(self.calls)
        return [
            RequestRecord(len(job.prompt_ids), 3, start, [start + 1 + k * (i + 1) / 10 for k in range(3)])
            for i, job in enumerate(jobs)
        ]

    def compilations(self) -> int:
        return 10 + len(self.calls)

    def preemptions(self) -> None:
        return None


def test_measure_warms_up_once_and_takes_the_figures_from_the_records():
    target, told = ScriptedTarget(), []
    jobs = [Job([1, 2], None, 3), Job([1, 2, 3], None, 4)]
    measured = measure(target, lambda: jobs, runs=2, concurrency=7, on_run=lambda number, _: told.append(number))
    assert (target.calls, told) == ([7, 7, 7], [0, 1, 2])
    assert (measured.compilations, measured.preemptions) == (3, None)
    first = measured.runs[0]
    assert len(measured.runs) == 2
    assert (first.prompt_tokens, first.output_tokens, first.short_answers) == (5, 6, 1)
    assert first.wall_s == pytest.approx(1.4)
    assert first.output_tokens_per_s == pytest.approx(6 / 1.4)
    assert first.total_tokens_per_s == pytest.approx(11 / 1.4)
    assert first.ttft_s == pytest.approx((1.0, 1.0, 1.0))
    # Gaps 0.1, 0.1, 0.2, 0.2.
    assert first.itl_s == pytest.approx((0.15, 0.2, 0.2))
    assert first.e2e_s == pytest.approx((1.3, 1.38, 1.398))


def test_median_run_takes_each_figure_for_itself():
    runs = [
        run_figures([Job([1], None, 2)], [RequestRecord(1, 2, 0.0, [ttft, ttft + itl])])
        for ttft, itl in ((1.0, 3.0), (2.0, 1.0), (9.0, 2.0))
    ]
    middle = median_run(runs)
    assert (middle.ttft_s.p50, middle.itl_s.p50, middle.wall_s) == (2.0, 2.0, 4.0)
    assert median_run([run._replace(itl_s=None) for run in runs]).itl_s is None
