"""Measures this machine and writes its hardware file, which the cost model and the planner go by.

  python -m launch.calibrate
      the shapes of the default model; less than two minutes on two cores; nothing else should run

  python -m launch.calibrate --output=machine.json --model=Qwen3-0.6B --runs=9

Measures memory, matrix products, the link in each direction, and every LoRA and attention strategy with the near-data
functions that they are made of, on cold pages; fits the seconds of a call, a byte and a FLOP of each function to them;
times the base model; prints the fit against what was measured, and draws it beside the file. Check a file on other
points with python -m launch.bench strategies --hardware=FILE. Progress goes to standard error.
"""

from __future__ import annotations

import dataclasses
import pathlib
import platform

import jax
from rich.console import Console

from launch import flags
from launch.benchmarks.calibration import Calibrated, calibrate
from launch.benchmarks.calibration_points import TINY, USUAL
from launch.benchmarks.calibration_programs import Bench
from launch.benchmarks.calibration_report import report_text, save_plot
from launch.benchmarks.cold_pages import ColdPages, cold_size
from launch.benchmarks.strategy_programs import model_of
from launch.console import StageLog
from launch.flags import StartError
from memory_pool.hardware import save_hardware
from memory_pool.probe import probe
from plora_jax.checkpoints import LoadedModel, WeightsError, load_config, load_model
from plora_jax.engine.build import EngineConfig, default_model_name
from plora_jax.engine.machine import calibration_path, shape_of_model
from plora_jax.model import pack_params
from plora_jax.parallel import TensorParallel
from strategies.kernel_tables import choose_kernels

DTYPES = ("bfloat16", "float16", "float32")
DESIGNS = {"usual": USUAL, "tiny": TINY}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrating:
    """What to measure.

    Attributes:
        output: hardware file to write; None for hardware-HOST.json in ~/.cache/plora_jax.
        model: base model whose shapes are used, as for `serve`.
        dtype: of adapters, keys and values: bfloat16, float16 or float32.
        base_steps: also time steps of the base model, for which its weights are read.
        points: how many points are measured: usual, or tiny to try the command out.
        runs: measured rounds, after one to warm up; figures are medians over them.
        data_mb: data to cycle through, MB of 2^20 bytes, in the pool and as much on the device; None for four times
            the last-level cache.
    """

    output: str | None = None
    model: str = EngineConfig.model
    dtype: str = "bfloat16"
    base_steps: bool = True
    points: str = "usual"
    runs: int = 4
    data_mb: int | None = None

    @property
    def path(self) -> pathlib.Path:
        """Of the file."""
        return calibration_path() if self.output is None else pathlib.Path(self.output).expanduser()

    def validate(self) -> None:
        """Raises StartError naming every field that cannot be, its value and what is allowed."""
        problems = [
            f"--{name} must be at least 1, got {value}"
            for name in ("runs", "data_mb")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        for name, allowed in (("dtype", DTYPES), ("points", tuple(DESIGNS))):
            if getattr(self, name) not in allowed:
                problems.append(f"--{name} {getattr(self, name)!r} is unknown; choose {', '.join(allowed)}")
        if self.output is not None and not self.path.parent.is_dir():
            problems.append(f"--output {self.output!r} is in a directory that does not exist: make it first")
        if self.output is not None and self.path.is_dir():
            problems.append(f"--output {self.output!r} is a directory: name a file in it, such as hardware.json")
        if problems:
            raise StartError("; ".join(problems))


def run_calibration(options: Calibrating, *, log: StageLog) -> Calibrated:
    """Measures this machine.

    Args:
        options: what to measure.
        log: told how far it is.

    Raises:
        StartError: the options cannot be, or this machine cannot be measured.
    """
    options.validate()
    backend = probe()
    log.say("backend", backend.as_text())
    if not backend.near_data:
        raise StartError(f"near-data functions do not work here: {backend.problem}; set JAX_PLATFORMS=cpu")
    try:
        config = load_config(options.model)
    except (OSError, ValueError) as error:
        raise StartError(str(error)) from error
    model = model_of(config, jax.numpy.dtype(options.dtype))
    base = _base_model(options, log) if options.base_steps else None
    name = options.model if base is None else default_model_name(base.source)
    shape = shape_of_model(config, name=name, item_bytes=model.layout.dtype.itemsize)
    size = cold_size(None if options.data_mb is None else options.data_mb * 2**20)
    log.say("data", f"filling {size.num_bytes / 1e6:.0f} MB of pages in the pool and on the device")
    cold = ColdPages(model.layout, num_bytes=size.num_bytes)
    bench = Bench(model, shape, cold, choose_kernels(layout=model.layout).decode, base)
    return calibrate(bench, DESIGNS[options.points], name=platform.node() or "local", runs=options.runs, log=log)


def _base_model(options: Calibrating, log: StageLog) -> LoadedModel:
    """In the dtype of the calibration where weights can have it, and packed as for a step."""
    dtype = "auto" if options.dtype == "float16" else options.dtype
    log.stage("weights")
    try:
        loaded = load_model(options.model, dtype=dtype, progress=log.advance)
    except (OSError, WeightsError) as error:
        raise StartError(f"{error}; --nobase_steps goes without the weights") from error
    log.end()
    return dataclasses.replace(loaded, params=pack_params(loaded.params, TensorParallel(loaded.config)))


def main() -> None:
    """Measures what the flags describe, prints the report, writes the file and the plot."""
    options = flags.read(Calibrating)
    found = run_calibration(options, log=StageLog(Console(stderr=True)))
    print(report_text(found))
    path = options.path
    plot = path.with_suffix(".png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_hardware(found.hardware, path)
        save_plot(found, plot)
    except OSError as error:
        raise StartError(f"--output {str(path)!r} cannot be written: {error}") from error
    except ImportError:
        print(f"wrote {path}; no plot, since matplotlib is not installed: pip install matplotlib")
    else:
        print(f"wrote {path} and {plot}")


if __name__ == "__main__":
    flags.define(Calibrating)
    flags.run(main)
