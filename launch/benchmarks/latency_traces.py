"""Traces of a latency point's steps: kept where asked for, and divided into parts."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence

from launch.benchmarks.breakdown import Breakdown, TracedSteps, break_down
from launch.benchmarks.case import jobs_of_runs, prompt_ids_range
from launch.benchmarks.engine_client import EngineTarget
from launch.benchmarks.latency_case import LatencyCase, LatencyPoint
from launch.benchmarks.latency_report import PointResult
from launch.benchmarks.machine_rates import MachineRates
from launch.benchmarks.measurement import Job
from launch.benchmarks.step_work import PlannedStep, StepModel, planned_step
from launch.console import StageLog
from launch.profiling import HOW_TO_OPEN, ProfileConfig, StepProfiler
from memory_pool.adapter_streams import AdapterFacts
from plora_jax.engine.build import Deployment
from plora_jax.engine.plan import StepPlan


def jobs_of_point(case: LatencyCase, point: LatencyPoint, deployment: Deployment) -> Iterator[list[Job]]:
    """The requests of a point, run after run, over the first adapters of the engine."""
    requests = case.requests(point)
    models = [status.name for status in deployment.engine.adapters()][: point.adapters] or [None]
    return jobs_of_runs(requests, models, ids_range=prompt_ids_range(requests, deployment.model.vocab_size))


def traced(
    case: LatencyCase,
    result: PointResult,
    deployment: Deployment,
    *,
    profile: ProfileConfig,
    rates: MachineRates | None,
    log: StageLog,
) -> PointResult:
    """Traces decode steps and, for a breakdown, prefill steps of a point, in runs of their own."""
    point = result.point
    with _directory(profile.profile_dir, point) as directory:
        kinds: dict[str, Callable[[StepPlan], bool]] = {
            "decode": lambda plan: len(plan.rows) == point.rows and all(row.decode for row in plan.rows)
        }
        if rates is not None:
            kinds["prefill"] = lambda plan: not all(row.decode for row in plan.rows)
        found: list[Breakdown] = []
        for kind, wanted in kinds.items():
            jobs = next(jobs_of_point(case, point, deployment))
            # Decode begins to be traced inside its first step.
            steps, ahead = profile.profile_steps, kind == "prefill"
            recorded = _trace(deployment, jobs, directory / kind, steps=steps, wanted=wanted, ahead=ahead)
            if rates is not None:
                found += _divide(deployment, recorded, point, kind=kind, rates=rates)
    if profile.profile_dir is not None:
        log.say("trace", f"{directory}: {HOW_TO_OPEN} {directory}")
    return result._replace(breakdowns=found)


@contextlib.contextmanager
def _directory(profile_dir: str | None, point: LatencyPoint) -> Iterator[pathlib.Path]:
    if profile_dir is not None:
        yield pathlib.Path(profile_dir).expanduser() / f"{point.rows}-requests-{point.adapters}-adapters"
        return
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def _trace(
    deployment: Deployment,
    jobs: Sequence[Job],
    directory: pathlib.Path,
    *,
    steps: int,
    wanted: Callable[[StepPlan], bool],
    ahead: bool,
) -> TracedSteps:
    """Runs jobs and traces some of their steps.

    Args:
        deployment: a started engine.
        jobs: to run.
        directory: where the trace goes.
        steps: at most so many.
        wanted: which.
        ahead: begin before the jobs are sent, as their first step counts.
    """
    taken: list[PlannedStep] = []
    adapters, executor = deployment.adapters, deployment.executor

    def facts_of(adapter: int) -> AdapterFacts:
        assert adapters is not None, adapter
        return adapters.placed(adapter).facts

    profiler = StepProfiler(
        directory, steps=steps, wanted=wanted, take=lambda plan: taken.append(planned_step(plan, facts_of))
    )
    if ahead:
        profiler.start()
    profiler.watch(executor)
    try:
        EngineTarget(deployment.engine).run(jobs, concurrency=None)
    finally:
        # All jobs are answered: nothing steps any more.
        executor.on_step = None
        profiler.close()
    return TracedSteps(directory, taken, {bucket: p.run.as_text() for bucket, p in executor.programs.items()})


def _divide(
    deployment: Deployment, recorded: TracedSteps, point: LatencyPoint, *, kind: str, rates: MachineRates
) -> list[Breakdown]:
    """The breakdown of steps of one kind; none where the trace has no whole step."""
    layout = deployment.memory.layout
    model = StepModel(
        deployment.model,
        deployment.executor.weight_bytes(),
        item=layout.dtype.itemsize,
        adapter_item=layout.adapter_dtype.itemsize,
        kv_item=layout.kv_item_bytes,
    )
    title = f"{kind} step, {point.rows} requests, {point.adapters} adapters"
    made = break_down(recorded, model, rates, title=title, middle_half=kind == "decode")
    return [] if made is None else [made]
