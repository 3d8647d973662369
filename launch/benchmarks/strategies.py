"""Times the LoRA strategies and the near-data functions on a grid of adapters, and counts their link bytes.

  python -m launch.bench strategies
      the default grid on the shapes of the default model: a few minutes on two cores

  python -m launch.bench strategies --ranks=16,64 --tokens_per_adapter=1 --adapters=32 --contexts=512,4096 --runs=9
      a grid of your own

  python -m launch.bench strategies --ranks=8 --tokens_per_adapter=1 --adapters=4 --contexts=128 --runs=1 --data_mb=64
      a quick look: the data fits into the cache

  python -m launch.bench strategies --hardware=machine.json
      also what a file of launch.calibrate predicts, and how good the planner's choices are

A step goes through all layers and projections. Every call works on pages that were not read for a round; the round is
four times the last-level cache where memory allows. Before the programs of a point all pages are read once from end to
end by all cores: rates of near-data functions are given as shares of that read. A timed call follows one of the same
program on other pages, as a step follows a step. Each of --runs runs goes over the whole grid, after one to warm up;
figures are medians over them. Link bytes are those of the traced program. Progress goes to standard error.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import shlex
import sys
import time
from collections.abc import Sequence

import jax
from absl import flags as absl_flags
from rich.console import Console

from launch import flags
from launch.benchmarks.case import split_names
from launch.benchmarks.cold_pages import ColdPages, cold_size
from launch.benchmarks.machine import describe_machine, describe_software
from launch.benchmarks.mixed_program import mixed_program
from launch.benchmarks.output import output_problems, write_json
from launch.benchmarks.prediction_report import Predicted, PredictedAttention
from launch.benchmarks.program_timing import measure
from launch.benchmarks.strategy_predictions import Prediction, predict, predict_attention
from launch.benchmarks.strategy_programs import (
    AttentionPoint,
    LoraPoint,
    Model,
    attention_program,
    lora_programs,
    model_of,
)
from launch.benchmarks.strategy_report import PointResult, StrategiesReport
from launch.console import StageLog
from launch.flags import StartError
from memory_pool.hardware import parse_hardware
from memory_pool.probe import probe
from plora_jax.checkpoints import load_config
from plora_jax.config import ModelConfig
from plora_jax.engine.build import EngineConfig
from plora_jax.engine.machine import shape_of_model
from strategies.cost import ModelShape
from strategies.kernel_tables import KernelSet, choose_kernels

_DTYPES = ("bfloat16", "float16", "float32")
_PHASES = ("decode", "prefill")
_GRID = ("ranks", "tokens_per_adapter", "adapters", "contexts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategiesCase:
    """The grid and how it is measured.

    Attributes:
        model: base model whose shapes are used, as for `serve`; its weights are not.
        ranks: ranks of adapters, comma separated.
        tokens_per_adapter: tokens of each adapter in the step, comma separated.
        adapters: distinct adapters in the step, comma separated.
        contexts: tokens of context of partial attention, comma separated.
        sequences: sequences of partial attention, each with one query.
        phase: whose kernels are measured: decode or prefill.
        dtype: of adapters, keys and values: bfloat16, float16 or float32.
        runs: measured runs, after one to warm up; the figures are medians over them.
        data_mb: data to cycle through, MB of 2^20 bytes, in the pool and as much on the device; None for four times
            the last-level cache.
        hardware: file of launch.calibrate whose predictions are held against what is measured; None for none.
        output_json: file to write all figures to.
    """

    model: str = EngineConfig.model
    ranks: str = "8,16,64"
    tokens_per_adapter: str = "1,4"
    adapters: str = "8,32"
    contexts: str = "512,2048"
    sequences: int = 32
    phase: str = "decode"
    dtype: str = "bfloat16"
    runs: int = 5
    data_mb: int | None = None
    hardware: str | None = None
    output_json: str | None = None

    def numbers(self, name: str) -> list[int]:
        """The values of an axis of the grid."""
        return [int(entry) for entry in split_names([getattr(self, name)])]

    @property
    def lora_points(self) -> list[LoraPoint]:
        ranks, tokens, adapters = (self.numbers(name) for name in ("ranks", "tokens_per_adapter", "adapters"))
        return [LoraPoint(r, t, a) for r in ranks for t in tokens for a in adapters]

    @property
    def attention_points(self) -> list[AttentionPoint]:
        return [AttentionPoint(context, self.sequences) for context in self.numbers("contexts")]

    def validate(self) -> None:
        """Raises StartError naming every field that cannot be, its value and what is allowed."""
        problems = []
        for name in _GRID:
            entries = split_names([getattr(self, name)])
            if not entries or not all(entry.isdecimal() and int(entry) for entry in entries):
                problems.append(
                    f"--{name} {getattr(self, name)!r} must be whole numbers above 0 with commas, such as 8,16"
                )
        for name in ("sequences", "runs", "data_mb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"--{name} must be at least 1, got {value}")
        for name, allowed in (("phase", _PHASES), ("dtype", _DTYPES)):
            if getattr(self, name) not in allowed:
                problems.append(f"--{name} {getattr(self, name)!r} is unknown; choose {', '.join(allowed)}")
        problems += output_problems(self.output_json)
        if problems:
            raise StartError("; ".join(problems))


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each option."""
    flags.define(StrategiesCase, flag_values=flag_values)


def run_strategies(case: StrategiesCase, *, command: str, log: StageLog) -> StrategiesReport:
    """Measures the grid.

    Args:
        case: what to measure.
        command: command line that asks for this.
        log: told how far it is.

    Raises:
        StartError: the case cannot be measured here.
    """
    case.validate()
    backend = probe()
    log.say("backend", backend.as_text())
    if not backend.near_data:
        raise StartError(f"near-data functions do not work here: {backend.problem}; set JAX_PLATFORMS=cpu")
    config = _config(case)
    model = model_of(config, jax.numpy.dtype(case.dtype))
    shape = shape_of_model(config, name=case.model, item_bytes=model.layout.dtype.itemsize)
    predictions = _predictions(case, shape)
    size = cold_size(None if case.data_mb is None else case.data_mb * 2**20)
    log.say("data", f"filling {size.num_bytes / 1e6:.0f} MB of pages in the pool and on the device")
    cold = ColdPages(model.layout, num_bytes=size.num_bytes)
    kernels = getattr(choose_kernels(layout=model.layout), case.phase)
    results = _measure_grid(case, model, cold, kernels, predictions=predictions, log=log)
    return StrategiesReport(
        case=_in_words(case, model),
        options=dataclasses.asdict(case),
        machine=describe_machine(),
        software=describe_software(),
        backend=backend.as_text(),
        kernels={name: kernel.name for name, kernel in kernels._asdict().items()},
        cold=size._replace(num_bytes=cold.num_bytes),
        results=results,
        predicted=_predicted(case, shape, predictions, results),
        command=command,
        measured_at=datetime.datetime.now(datetime.UTC),
    )


def main() -> int:
    """Measures what the flags describe, prints the report, and writes it where asked."""
    case = flags.read(StrategiesCase)
    command = shlex.join(["python", "-m", "launch.bench", "strategies", *sys.argv[1:]])
    report = run_strategies(case, command=command, log=StageLog(Console(stderr=True)))
    print(report.as_text())
    write_json(case.output_json, report.as_json())
    return 0


def _config(case: StrategiesCase) -> ModelConfig:
    try:
        return load_config(case.model)
    except (OSError, ValueError) as error:
        raise StartError(str(error)) from error


def _predictions(case: StrategiesCase, shape: ModelShape) -> list[Prediction]:
    """Of each LoRA point; none without a hardware file."""
    if case.hardware is None:
        return []
    try:
        hardware = parse_hardware(case.hardware)
        return [predict(point, shape, hardware) for point in case.lora_points]
    except ValueError as error:
        raise StartError(f"--hardware {case.hardware!r}: {error}") from error


def _measure_grid(
    case: StrategiesCase,
    model: Model,
    cold: ColdPages,
    kernels: KernelSet,
    *,
    predictions: Sequence[Prediction],
    log: StageLog,
) -> list[PointResult]:
    points = [*case.lora_points, *case.attention_points]
    groups = []
    for number, (point, prediction) in enumerate(itertools.zip_longest(points, predictions), 1):
        started = time.monotonic()
        if isinstance(point, AttentionPoint):
            groups.append([attention_program(point, model, cold, kernels)])
        else:
            groups.append(list(lora_programs(point, model, cold, kernels)))
            mixes = {choice.name: choice.adapters for choice in prediction.choices} if prediction else {}
            groups[-1] += [
                mixed_program(name, adapters, point, model=model, cold=cold, kernels=kernels)
                for name, adapters in mixes.items()
                if len(adapters) > 1
            ]
        words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in point._asdict().items())
        log.say(f"{number}/{len(points)}", f"{words}: compiled in {time.monotonic() - started:.1f} s")

    def tell(run: int, seconds: float) -> None:
        log.say(f"run {run}/{case.runs}" if run else "warm-up", f"{seconds:.1f} s")

    timings = measure(groups, cold, runs=case.runs, tell=tell)
    return [PointResult(point, found) for point, found in zip(points, timings, strict=True)]


def _predicted(
    case: StrategiesCase, shape: ModelShape, predictions: Sequence[Prediction], results: Sequence[PointResult]
) -> Predicted | None:
    if case.hardware is None:
        return None
    hardware = parse_hardware(case.hardware)
    measured = [{timing.program: timing.median_s for timing in result.timings} for result in results]
    attention = [
        PredictedAttention(point, predict_attention(point, shape, hardware), *seconds.values())
        for point, seconds in zip(case.attention_points, measured[len(predictions) :], strict=True)
    ]
    return Predicted(case.hardware, case.lora_points, predictions, measured[: len(predictions)], attention)


def _in_words(case: StrategiesCase, model: Model) -> str:
    layout = model.layout
    return (
        f"{len(case.lora_points)} points of rank x tokens x adapters on {len(model.targets)} projections and "
        f"{len(case.attention_points)} of context with {case.sequences} sequences, {layout.num_layers} layers of "
        f"{case.model}, {case.dtype}, kernels of {case.phase}"
    )
