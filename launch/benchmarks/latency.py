"""Measures a decode step, ITL and TTFT by batch size and adapters, and says where the time of a step goes.

  python -m launch.bench latency
      1, 8 and 32 requests at once over 0, 1 and 32 adapters, on the default model, in this process

  python -m launch.bench latency --batches=32 --adapters=0,32 --breakdown
      also a table for decode and prefill steps: every part above 5 % of the step with its distance to the limit

  python -m launch.bench latency --batches=1 --adapters=0 --profile_dir=/tmp/trace
      also traces of decode steps, a folder for each batch and number of adapters

A step is timed as the time between two tokens while all requests of a batch decode; ITL and TTFT are over the whole
run, as clients see them. Figures are medians of --runs runs after one to warm up; traces are taken in others. The limit
of a part is the time to read or write once what it must (weights as they are kept, KV, true ranks of the adapters) at
the memory's rate, or to compute it at the rate of a large product, whichever is longer; both rates are measured by this
process. Every moment of a step belongs to one part; where no operation runs it is the host's. The first breakdown
compiles the programs once more, with the names of their parts. Progress goes to standard error.
"""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import sys

import numpy as np
from absl import flags as absl_flags
from rich.console import Console

from launch import flags
from launch.benchmarks.engine_client import EngineTarget, running_engine
from launch.benchmarks.latency_case import LatencyCase, LatencyPoint
from launch.benchmarks.latency_report import LatencyReport, PointResult, decode_step_s
from launch.benchmarks.latency_traces import jobs_of_point, traced
from launch.benchmarks.machine import describe_machine, describe_software
from launch.benchmarks.machine_rates import measure_rates
from launch.benchmarks.measurement import run_figures
from launch.benchmarks.output import write_json
from launch.benchmarks.report import System
from launch.console import StageLog
from launch.flags import StartError
from launch.profiling import ProfileConfig, keep_names_in_programs, make_directory
from plora_jax.engine.build import Deployment, EngineConfig
from plora_jax.engine.compile import counter
from plora_jax.engine.errors import EngineDeadError, GenerationFailedError

# The case decides about these itself.
_NOT_FLAGS = ("seed", "enable_lora", "max_lora_rank", "device_adapter_mb", "max_waiting")


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each option of the case, of traces, and of the engine as far as the case leaves it open."""
    flags.define(LatencyCase, flag_values=flag_values)
    flags.define(ProfileConfig, flag_values=flag_values)
    flags.define(EngineConfig, leave_out=_NOT_FLAGS, flag_values=flag_values)


def main() -> int:
    """Measures what the flags describe, prints the report, and writes it where asked."""
    case, profile, engine = flags.read(LatencyCase), flags.read(ProfileConfig), flags.read(EngineConfig)
    command = shlex.join(["python", "-m", "launch.bench", "latency", *sys.argv[1:]])
    report = run_latency(case, engine, profile=profile, command=command, log=StageLog(Console(stderr=True)))
    print(report.as_text())
    write_json(case.output_json, report.as_json())
    return 0


def run_latency(
    case: LatencyCase, engine: EngineConfig, *, profile: ProfileConfig, command: str, log: StageLog
) -> LatencyReport:
    """Measures a case.

    Args:
        case: what to measure.
        engine: where it is measured; rows and device memory are raised to what the case needs.
        profile: which traces are kept.
        command: command line that asks for this.
        log: told how far it is.

    Raises:
        StartError: the case cannot be measured.
    """
    case.validate()
    if problems := profile.problems():
        raise StartError("; ".join(problems))
    if profile.profile_dir is not None:
        make_directory(profile.profile_dir)
    traces = case.breakdown or profile.profile_dir is not None
    if traces:
        keep_names_in_programs()
    rows = max(point.rows for point in case.points)
    engine = dataclasses.replace(engine, max_num_seqs=max(engine.max_num_seqs, rows))
    with running_engine(case.requests(), engine, log) as deployment:
        rates = measure_rates(np.dtype(deployment.dtype)) if case.breakdown else None
        before = counter.count
        try:
            results = [_measure(case, point, deployment, log=log) for point in case.points]
            compilations = counter.count - before
            if traces:
                results = [
                    traced(case, result, deployment, profile=profile, rates=rates, log=log) for result in results
                ]
        except (ValueError, EngineDeadError, GenerationFailedError) as error:
            raise StartError(f"the engine could not serve the case: {error}") from error
        system = System(
            f"{deployment.engine.model_name}, {deployment.precision}", dataclasses.asdict(deployment.config)
        )
    return LatencyReport(
        case=f"prompts of {case.prompt_tokens} random tokens, {case.new_tokens} new tokens, greedy; synthetic adapters "
        f"of rank {case.adapter_ranks} on {case.adapter_targets}",
        options=dataclasses.asdict(case),
        system=system,
        machine=describe_machine(),
        software=describe_software(),
        rates=rates,
        results=results,
        compilations=compilations,
        command=command,
        measured_at=datetime.datetime.now(datetime.UTC),
    )


def _measure(case: LatencyCase, point: LatencyPoint, deployment: Deployment, *, log: StageLog) -> PointResult:
    target, jobs = EngineTarget(deployment.engine), jobs_of_point(case, point, deployment)
    steps_s, runs = [], []
    for number in range(case.runs + 1):
        batch = next(jobs)
        records = target.run(batch, concurrency=None)
        if number:
            steps_s.append(decode_step_s(records))
            runs.append(run_figures(batch, records))
    words = f"{1000 * float(np.median(steps_s)):.1f} ms a decode step"
    log.say("measured", f"{point.rows} requests, {point.adapters} adapters: {words}")
    return PointResult(point, steps_s, runs)
