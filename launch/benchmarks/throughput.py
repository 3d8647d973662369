"""Measures output tokens a second, TTFT and ITL of a stated case.

  python -m launch.bench throughput --case=peers-32
      32 requests at once of 128 + 64 tokens over 32 adapters, on the default model, in this process

  python -m launch.bench throughput --adapters=4 --adapter_ranks=16 --adapter_targets=q_proj,v_proj --requests=8
      a case of your own; adapters are made in memory

  python -m launch.bench throughput --adapters=1000 --adapter_targets=q_proj,v_proj --adapter_skew=1.06 --requests=256
      --concurrency=32 --device_adapter_mb=64
      many adapters, a few of them popular, most of them only in the pool

  python -m launch.bench throughput --model=/models/llama --adapter_dirs=/adapters/sql,/adapters/law
      a model and adapters of your own

  python -m launch.bench throughput --case=peers-base --url=http://127.0.0.1:8000 --output_json=base.json
      a server that runs already, ours or another's; --served_model=a,b,c names its adapters. To tell what HTTP costs,
      serve with --noenable_lora: without adapters this case has LoRA off in this process (on with --enable_lora)

  python -m launch.bench throughput --case=peers-32 --profile_dir=/tmp/trace
      also a trace of the first steps of one more run

  python -m launch.bench throughput --trace=AzureLLMInferenceTrace_conv.csv --trace_scale=0.02 --trace_minutes=10
      arrivals and lengths of a trace, every 50th request of its first ten minutes; also with --url

Prompts are random token ids. Every answer is greedy and as long as asked for. Rates count from the first request to
the last token, prefill included. TTFT is from sending a request to the first piece of its answer, ITL between two
pieces; both as the client sees them, from the time of the trace where there is one. Figures are medians of --runs runs
after one to warm up; a trace is run once, after a few of its requests, where --runs is not given. Progress goes to
standard error, the report to standard output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags as absl_flags
from rich.console import Console

from launch import flags
from launch.benchmarks.arrivals import Arrival, Replay, read_trace, replay
from launch.benchmarks.case import PRESETS, ThroughputCase, jobs_of_replays, jobs_of_runs, prompt_ids_range
from launch.benchmarks.engine_client import EngineTarget, running_engine
from launch.benchmarks.http_client import HttpTarget
from launch.benchmarks.machine import describe_machine, describe_software
from launch.benchmarks.measurement import RunFigures, Target, measure
from launch.benchmarks.output import write_json
from launch.benchmarks.report import System, ThroughputReport
from launch.console import StageLog
from launch.flags import StartError
from launch.profiling import HOW_TO_OPEN, NO_PROFILE, ProfileConfig, StepProfiler, keep_names_in_programs
from plora_jax.engine.build import Deployment, EngineConfig
from plora_jax.engine.errors import EngineDeadError, GenerationFailedError
from plora_jax.engine.executor import JaxExecutor

# The case decides about these itself.
_NOT_FLAGS = ("seed", "enable_lora", "max_lora_rank", "device_adapter_mb", "max_waiting")


class Subject(NamedTuple):
    """What is measured.

    Attributes:
        target: answers requests.
        models: who answers, in turn.
        vocab_size: V, None where it is not known.
        system: what it is, for the report.
        max_tokens: that a sequence holds, None where it is not known.
        executor: carries out its steps, None for a server.
    """

    target: Target
    models: list[str | None]
    vocab_size: int | None
    system: System
    max_tokens: int | None
    executor: JaxExecutor | None = None


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each option of a case, and of the engine as far as the case leaves it open."""
    flags.define(ThroughputCase, flag_values=flag_values)
    flags.define(ProfileConfig, flag_values=flag_values)
    flags.define(EngineConfig, leave_out=_NOT_FLAGS, flag_values=flag_values)


def read_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> tuple[ThroughputCase, EngineConfig]:
    """The case, its preset applied under the flags that were given, and the engine.

    Raises:
        StartError: values that cannot be, or flags of the engine together with --url.
    """
    preset = PRESETS.get(flag_values["case"].value or "", {})
    open_fields = {name: value for name, value in preset.items() if flag_values[name].using_default_value}
    if flag_values["adapter_dirs"].value and "adapters" in open_fields:
        # Real adapters take the place of a preset's synthetic ones.
        open_fields["adapters"] = 0
    if flag_values["trace"].value and flag_values["runs"].using_default_value:
        open_fields["runs"] = 1
    case = flags.read(ThroughputCase, flag_values=flag_values, **open_fields)
    case.validate()
    engine = flags.read(EngineConfig, flag_values=flag_values, **{name: _default(name) for name in _NOT_FLAGS})
    if case.url is not None:
        fields = (field.name for field in dataclasses.fields(EngineConfig) if field.name not in _NOT_FLAGS)
        given = [name for name in fields if not flag_values[name].using_default_value]
        if given:
            raise StartError(f"--{given[0]} has no use with --url: the server decides it")
    else:
        try:
            engine.validate()
        except ValueError as error:
            raise StartError(str(error)) from error
    return case, engine


def _default(name: str) -> Any:
    return next(field.default for field in dataclasses.fields(EngineConfig) if field.name == name)


def run_throughput(
    case: ThroughputCase, engine: EngineConfig, *, command: str, log: StageLog, profile: ProfileConfig = NO_PROFILE
) -> ThroughputReport:
    """Measures a case.

    Args:
        case: what to measure.
        engine: where no server is named, the engine.
        command: command line that asks for this.
        log: told how far it is.
        profile: which trace is kept.

    Raises:
        StartError: the case cannot be measured.
    """
    if problems := profile.problems():
        raise StartError("; ".join(problems))
    if profile.profile_dir is not None:
        keep_names_in_programs()
    trace = read_trace(case.trace) if case.trace is not None else None
    if trace is not None:
        # Room for all that may wait; those that the context does not hold are known only once there is an engine.
        most = replay(trace, scale=case.trace_scale, minutes=case.trace_minutes, max_tokens=None)
        case = dataclasses.replace(case, requests=max(len(most.arrivals), 1))

    def say(number: int, figures: RunFigures) -> None:
        name = f"run {number}/{case.runs}" if number else "warm-up"
        text = f"{figures.output_tokens} output tokens in {figures.wall_s:.2f} s"
        log.say(name, f"{text}, {figures.output_tokens_per_s:.1f} a second")

    with _subject(case, engine, log) as subject:
        ids_range = prompt_ids_range(case, subject.vocab_size)
        sent = None
        jobs = jobs_of_runs(case, subject.models, ids_range=ids_range)
        if trace is not None:
            sent = _replayed(case, trace, subject.max_tokens)
            jobs = jobs_of_replays(case, sent.arrivals, subject.models, ids_range=ids_range)
        try:
            measured = measure(
                subject.target, lambda: next(jobs), runs=case.runs, concurrency=case.concurrency, on_run=say
            )
            if profile.profile_dir is not None and subject.executor is not None:
                _profile(subject.executor, lambda: subject.target.run(next(jobs), concurrency=None), profile, log)
        except (ValueError, EngineDeadError, GenerationFailedError) as error:
            raise StartError(f"the engine could not serve the case: {error}") from error
    return ThroughputReport(
        case=_case_in_words(case, subject.models, ids_range, sent=sent),
        options=dataclasses.asdict(case),
        system=subject.system,
        machine=describe_machine(),
        software=describe_software(),
        measurement=measured,
        command=command,
        measured_at=datetime.datetime.now(datetime.UTC),
    )


def main() -> int:
    """Measures what the flags describe, prints the report, and writes it where asked."""
    case, engine = read_flags()
    command = shlex.join(["python", "-m", "launch.bench", "throughput", *sys.argv[1:]])
    profile, log = flags.read(ProfileConfig), StageLog(Console(stderr=True))
    if case.url is not None and profile.profile_dir is not None:
        raise StartError("--profile_dir has no use with --url: start the server with it")
    report = run_throughput(case, engine, command=command, log=log, profile=profile)
    print(report.as_text())
    write_json(case.output_json, report.as_json())
    return 0


def _replayed(case: ThroughputCase, trace: Sequence[Arrival], max_tokens: int | None) -> Replay:
    sent = replay(trace, scale=case.trace_scale, minutes=case.trace_minutes, max_tokens=max_tokens)
    if not sent.arrivals:
        raise StartError(
            f"--trace {case.trace!r} leaves no request ({sent.dropped} are beyond {max_tokens} tokens): raise "
            "--trace_scale or --trace_minutes"
        )
    return sent


def _profile(executor: JaxExecutor, run: Callable[[], object], profile: ProfileConfig, log: StageLog) -> None:
    """Traces the first steps of a run."""
    profiler = StepProfiler(profile.profile_dir or "", steps=profile.profile_steps)
    profiler.watch(executor)
    run()
    executor.on_step = None
    profiler.close()
    log.say("trace", f"{profile.profile_dir}: {HOW_TO_OPEN} {profile.profile_dir}")


@contextlib.contextmanager
def _subject(case: ThroughputCase, engine: EngineConfig, log: StageLog) -> Iterator[Subject]:
    if case.url is not None:
        server = HttpTarget(case.url, api_key=os.environ.get("OPENAI_API_KEY"))
        models: list[str | None] = [*(case.model_names or [server.first_model()])]
        system = System(f"{', '.join(map(str, models))} at {server.url}")
        holds = server.max_model_len(models[0]) if case.trace is not None else None
        yield Subject(server, models, None, system, holds)
        return
    with running_engine(case, engine, log) as deployment:
        models = [status.name for status in deployment.engine.adapters()] or [None]
        yield Subject(
            EngineTarget(deployment.engine),
            models,
            deployment.model.vocab_size,
            _system(deployment),
            deployment.engine.max_model_len,
            deployment.executor,
        )


def _system(deployment: Deployment) -> System:
    chosen, count = deployment.executor.kernels, len(deployment.engine.adapters())
    lora = f"adapters loaded: {count}" if deployment.adapters else "LoRA off"
    return System(
        f"{deployment.engine.model_name}, {deployment.precision}, {lora}",
        options=dataclasses.asdict(deployment.config),
        device_bytes=deployment.device_bytes(),
        kernels={
            f"{phase} {what}": kernel.name
            for phase, kernels in chosen._asdict().items()
            for what, kernel in kernels._asdict().items()
        },
    )


def _case_in_words(
    case: ThroughputCase, models: list[str | None], ids_range: tuple[int, int], *, sent: Replay | None
) -> str:
    preset = PRESETS[case.case] if case.case else {}
    changed = any(getattr(case, name) != value for name, value in preset.items())
    name = f"{case.case}{' with changes' if changed else ''}: " if case.case else ""
    together = "all at once" if case.concurrency is None else f"{case.concurrency} at a time"
    words = f"{name}{case.requests} requests, {together}, of {case.prompt_tokens} prompt + {case.new_tokens} new tokens"
    if sent is not None:
        words = _replay_in_words(case, sent)
    words += f", greedy, ignore_eos; prompts random ids in [{ids_range[0]}, {ids_range[1]}), seed {case.seed}; "
    turn = "in turn" if case.adapter_skew is None else f"drawn by a power law of exponent {case.adapter_skew:g}"
    if case.url is not None:
        return words + f"models {turn}: {len(models)}"
    if case.adapter_dirs:
        return words + f"adapters {', '.join(str(model) for model in models)} {turn}"
    if not case.adapters:
        return words + "base model"
    ranks = ", ".join(str(rank) for rank in dict.fromkeys(case.ranks))
    what = f"{case.adapters} synthetic adapters {turn}" if case.adapters > 1 else "one synthetic adapter"
    return words + f"{what}, rank {ranks} on {case.adapter_targets}"


def _replay_in_words(case: ThroughputCase, sent: Replay) -> str:
    tokens = [sum(column) for column in list(zip(*sent.arrivals, strict=True))[1:]]
    part = "all of it" if case.trace_minutes is None else f"its first {case.trace_minutes:g} minutes"
    return (
        f"trace {pathlib.Path(case.trace or '').name}, {part}, {case.trace_scale:g} of its requests: "
        f"{len(sent.arrivals)} requests of {tokens[0]} prompt + {tokens[1]} new tokens in all, sent over "
        f"{sent.arrivals[-1].at_s:.0f} s, {sent.dropped} dropped that the context does not hold or that have no token"
    )
