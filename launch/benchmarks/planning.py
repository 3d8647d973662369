"""Measures how long plans take: a full search, and one from where the last plan stood, over many adapters.

  python -m launch.bench planning
      1000 adapters of the default model behind an H100's link, in the paper's machine, and on a CPU

  python -m launch.bench planning --hardware=auto --traffic=drifting
      plans for this machine, as calibrated, while the popular adapters change

Nothing is served: streams of requests come and go as the traffic says, a token a step, and what a plan asks for is
there at once. Every --plan_interval_steps the engine's planner decides, and the problem it had is solved twice more to
be timed: in full, and from the answer to the problem before it. "decision" is all that the engine's planner does,
making the problem included, with searches as it spaces them. "with work" are adapters that run, or are expected to.
"over bound" is how far the plan is from what no plan can undercut. Figures are medians and 90th percentiles over all
choices; the fastest of --repeats counts of each. Progress goes to standard error.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from absl import flags as absl_flags
from rich.console import Console

from launch import flags
from launch.benchmarks.case import split_names
from launch.benchmarks.machine import describe_machine, describe_software
from launch.benchmarks.output import output_problems, write_json
from launch.benchmarks.planning_report import Choice, PlanningReport
from launch.benchmarks.policies_traffic import KINDS, make_traffic
from launch.console import StageLog
from launch.flags import StartError
from memory_pool.hardware import HardwareSpec, parse_hardware
from plora_jax.checkpoints import load_config
from plora_jax.config import ModelConfig
from plora_jax.engine.build import EngineConfig
from plora_jax.engine.machine import find_hardware, shape_of_model
from plora_jax.engine.plan_worker import PlanWorker, Snapshot, make_policy
from strategies.cost import LORA_COLUMNS, AdapterFeatures, adapter_features, cost_model, decoding
from strategies.planner import Duals, Plan, PlanProblem, optimize

_MB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanningCase:
    """What is planned, and under which traffic.

    Attributes:
        model: the base model, as --model of the server; its weights are not read.
        hardware: machines that plans are for, comma separated: presets, files, or auto for this one.
        traffic: uniform, skewed or drifting.
        adapters: how many are in the pool.
        adapter_ranks: their ranks, in turn; comma separated.
        adapter_targets: their projections, comma separated.
        device_adapter_mb: device memory for adapters, MB of 2^20 bytes.
        device_kv_mb: device memory for KV, MB of 2^20 bytes.
        streams: that run at once; each begins its next request when one has ended.
        prompt_tokens: KV that a stream has when it begins.
        new_tokens: tokens of an answer on average; each is drawn between half of it and one and a half.
        skew: exponent of the power law of skewed and drifting traffic.
        drift_requests: requests after which other adapters are the popular ones, in drifting traffic.
        plan_interval_steps: steps between two choices.
        warmup_choices: which are not measured: loads are not known yet.
        choices: that are measured.
        repeats: of each solution; the fastest counts.
        seed: of the traffic.
        output_json: file to write all figures to.
    """

    model: str = EngineConfig.model
    hardware: str = "h100,paper,cpu"
    traffic: str = "skewed"
    adapters: int = 1000
    adapter_ranks: str = "8,16,24,32,48,64"
    adapter_targets: str = "q_proj,v_proj"
    device_adapter_mb: int = 64
    device_kv_mb: int = 512
    streams: int = 32
    prompt_tokens: int = 128
    new_tokens: int = 64
    skew: float = 1.06
    drift_requests: int = 256
    plan_interval_steps: int = 16
    warmup_choices: int = 60
    choices: int = 100
    repeats: int = 3
    seed: int = 0
    output_json: str | None = None

    @property
    def ranks(self) -> list[int]:
        """Of all adapters."""
        cycle = [int(entry) for entry in split_names([self.adapter_ranks])]
        return [cycle[index % len(cycle)] for index in range(self.adapters)]

    def validate(self) -> None:
        """Raises StartError naming every field that cannot be, its value and what is allowed."""
        least = {"adapters": 1, "device_adapter_mb": 0, "device_kv_mb": 1, "streams": 1, "prompt_tokens": 1}
        least |= {"new_tokens": 1, "drift_requests": 1, "plan_interval_steps": 1, "warmup_choices": 1, "choices": 1}
        least |= {"repeats": 1, "skew": 0}
        problems = [
            f"--{name} must be at least {bound}, got {value}"
            for name, bound in least.items()
            if (value := getattr(self, name)) < bound
        ]
        if self.traffic not in KINDS:
            problems.append(f"--traffic {self.traffic!r} is unknown: choose from {', '.join(KINDS)}")
        entries = split_names([self.adapter_ranks])
        if not entries or not all(entry.isdecimal() and int(entry) > 0 for entry in entries):
            problems.append(
                f"--adapter_ranks {self.adapter_ranks!r} must be whole numbers above 0 with commas, such as 8,16"
            )
        for name in ("hardware", "adapter_targets"):
            if not split_names([getattr(self, name)]):
                problems.append(f"--{name} is empty: name at least one")
        problems += output_problems(self.output_json)
        if problems:
            raise StartError("; ".join(problems))


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each option of the case."""
    flags.define(PlanningCase, flag_values=flag_values)


def main() -> int:
    """Measures what the flags describe, prints the report, and writes it where asked."""
    case = flags.read(PlanningCase)
    command = shlex.join(["python", "-m", "launch.bench", "planning", *sys.argv[1:]])
    report = run_planning(case, command=command, log=StageLog(Console(stderr=True)))
    print(report.as_text())
    write_json(case.output_json, report.as_json())
    return 0


def run_planning(case: PlanningCase, *, command: str, log: StageLog) -> PlanningReport:
    """Plans for every machine of the case.

    Args:
        case: what is planned.
        command: command line that asks for this.
        log: told how far it is.

    Raises:
        StartError: the case cannot be measured.
    """
    case.validate()
    measured: dict[str, list[Choice]] = {}
    try:
        model = load_config(case.model)
        for name in split_names([case.hardware]):
            hardware = _this_machine() if name == "auto" else parse_hardware(name)
            log.stage(f"plans for {hardware.name}")
            found = measured.setdefault(hardware.name, [])
            for choice in _choices(case, model, hardware):
                found.append(choice)
                log.advance(len(found), case.choices)
    except (ValueError, OSError) as error:
        raise StartError(str(error)) from error
    finally:
        log.end()
    return PlanningReport(
        case=f"{model.num_layers} layers of width {model.hidden_size}; {case.adapters} adapters of rank "
        f"{case.adapter_ranks} on {case.adapter_targets}, {case.device_adapter_mb} MB of the device for them; "
        f"{case.streams} streams of {case.traffic} traffic, a choice every {case.plan_interval_steps} steps",
        options=dataclasses.asdict(case),
        choices=measured,
        machine=describe_machine(),
        software=describe_software(),
        command=command,
        measured_at=datetime.datetime.now(datetime.UTC),
    )


def _this_machine() -> HardwareSpec:
    device = jax.local_devices()[0]
    return find_hardware("auto", None, platform=device.platform, device_kind=device.device_kind, pool_devices=1)


def _choices(case: PlanningCase, model: ModelConfig, hardware: HardwareSpec) -> Iterator[Choice]:
    """Times the choices after those of the warm-up."""
    shape = shape_of_model(model, name="default", item_bytes=2)
    targets = split_names([case.adapter_targets])
    if unknown := [name for name in targets if name not in shape.names]:
        raise StartError(f"--adapter_targets {unknown[0]!r} is unknown: choose from {', '.join(shape.names)}")
    ranks = np.outer(case.ranks, [name in targets for name in shape.names])
    features = adapter_features(shape, ranks)
    mode = "ideal" if hardware.calibration is None else "calibrated"
    worker = PlanWorker(
        cost_model(shape, hardware, mode),
        make_policy("joint", interval_steps=case.plan_interval_steps),
        adapter_bytes=case.device_adapter_mb * _MB,
        kv_bytes=case.device_kv_mb * _MB,
    )
    streams = _Streams(case)
    current = np.full(case.adapters, LORA_COLUMNS.index("near_data"))
    duals: Duals | None = None
    for number in range(case.warmup_choices + case.choices):
        home = np.arange(case.adapters) % hardware.num_pool_devices
        decision = worker.decide(_snapshot(streams, features, current, home=home, rows=case.streams))
        problem = decision.problem
        if number < case.warmup_choices:
            duals = optimize(problem, duals)[1]
        else:
            full = _timed(lambda problem=problem: optimize(problem), case.repeats)
            moved = _timed(lambda problem=problem, duals=duals: optimize(problem, duals), case.repeats)
            duals = moved.duals
            yield _choice(problem, full, moved, decision.seconds)
        current = decision.plan.strategy.astype(int)
        streams.run(case.plan_interval_steps)


class _Solved(NamedTuple):
    seconds: float
    plan: Plan
    duals: Duals


def _timed(solve: Callable[[], tuple[Plan, Duals]], repeats: int) -> _Solved:
    """The fastest of several; all have the same answer."""
    solved = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        plan, duals = solve()
        solved.append(_Solved(time.perf_counter() - begun_s, plan, duals))
    return min(solved, key=lambda one: one.seconds)


def _choice(problem: PlanProblem, full: _Solved, moved: _Solved, decision_s: float) -> Choice:
    best_s = min(full.plan.objective_s, moved.plan.objective_s)
    return Choice(
        active=int(problem.active.sum()),
        with_work=len(problem.loaded),
        full_s=full.seconds,
        incremental_s=moved.seconds,
        decision_s=decision_s,
        full_over_bound=full.plan.objective_s / full.duals.bound_s - 1,
        incremental_over_full=moved.plan.objective_s / best_s - 1,
    )


class _Streams:
    """Requests that come and go, a token a step.

    Attributes:
        events: tokens of each step by adapter, since they were taken last.
    """

    def __init__(self, case: PlanningCase) -> None:
        self._case = case
        steps = (case.warmup_choices + case.choices) * case.plan_interval_steps
        self._traffic = make_traffic(
            case.traffic,
            seed=case.seed,
            requests=case.streams * (2 + 2 * steps // case.new_tokens),
            adapters=case.adapters,
            skew=case.skew,
            drift_requests=case.drift_requests,
            prompt_tokens=1,
            new_tokens=case.new_tokens,
            ids_range=(0, 1),
        )
        self._next, self.events = 0, []
        # As though all had begun at times of their own.
        self._running = [self._begin(passed=(stream + 0.5) / case.streams) for stream in range(case.streams)]

    def _begin(self, *, passed: float = 0.0) -> list[int]:
        """(adapter, tokens left, tokens made) of the next request."""
        adapter, tokens = int(self._traffic.adapters[self._next]), int(self._traffic.new_tokens[self._next])
        self._next += 1
        made = int(tokens * passed)
        return [adapter, tokens - made, made]

    def counts(self) -> dict[int, int]:
        """Streams by adapter."""
        return dict(collections.Counter(adapter for adapter, _, _ in self._running))

    def contexts(self) -> np.ndarray:
        """[streams] tokens whose KV is kept."""
        return np.array([self._case.prompt_tokens + made for _, _, made in self._running])

    def run(self, steps: int) -> None:
        """So many steps."""
        for _ in range(steps):
            self.events.append(self.counts())
            self._running = [
                [adapter, left - 1, made + 1] if left > 1 else self._begin() for adapter, left, made in self._running
            ]


def _snapshot(
    streams: _Streams, features: AdapterFeatures, current: np.ndarray, *, home: np.ndarray, rows: int
) -> Snapshot:
    count = len(current)
    events, streams.events = streams.events, []
    return Snapshot(
        ids=np.arange(1, count + 1),
        features=features,
        home=home,
        current=current,
        pinned=np.zeros(count, bool),
        running=streams.counts(),
        kv=decoding(streams.contexts()),
        rows=rows,
        near_data=True,
        events=events,
    )
