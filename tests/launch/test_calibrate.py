"""python -m launch.calibrate: the file, the report and the plot of a tiny model, and what stops it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from launch.calibrate import Calibrating, run_calibration
from launch.console import StageLog
from launch.flags import StartError
from memory_pool.calibration import COEFFICIENTS
from memory_pool.hardware import HardwareSpec, parse_hardware
from plora_jax.engine.machine import calibration_path
from tests.launch.small_engine import LLAMA, ROOT

TINY = ("--dtype=float32", "--points=tiny", "--runs=2", "--data_mb=4", f"--model={LLAMA}")


def calibrate_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.calibrate", *arguments]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)


@dataclasses.dataclass(frozen=True)
class Done:
    """One real calibration that several tests look at."""

    path: Path
    out: str
    progress: str

    @property
    def hardware(self) -> HardwareSpec:
        return parse_hardware(str(self.path))


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Done:
    path = tmp_path_factory.mktemp("calibrate") / "machine.json"
    found = calibrate_command(*TINY, f"--output={path}")
    assert found.returncode == 0, found.stderr
    return Done(path, found.stdout, found.stderr)


def test_calibrate_writes_a_file_that_describes_hardware(done):
    hardware = done.hardware
    assert hardware.shared == {"cores", "memory"}
    assert hardware.num_pool_devices == 1
    assert hardware.device.memory_bytes_per_s == hardware.pool_device.dram_bytes_per_s > 1e8
    assert hardware.device.flops_per_s == hardware.pool_device.near_flops_per_s > 1e6
    assert 0 < hardware.link.latency_s < 1
    assert hardware.link.to_device_bytes_per_s > 1e6
    assert not hardware.link.full_duplex
    assert json.loads(json.dumps(hardware.to_json())) == json.loads(done.path.read_text())


def test_calibrate_fits_every_function_that_takes_time(done):
    calibration = done.hardware.calibration
    assert calibration is not None
    costs = {name: calibration.coefficient(name) for name in COEFFICIENTS}
    assert all(seconds >= 0 for seconds in costs.values())
    functions = ("device_delta", "near_delta", "near_shrink", "device_attention", "near_attention", "matmul")
    terms = ("call_s", "piece_s", "byte_s", "flop_s", "operand_byte_s")
    # Functions this small drown in what else the machine does, and the cost of one may be fitted as nothing.
    cost_something = [name for name in functions if any(costs[f"{name}.{term}"] for term in terms)]
    assert len(cost_something) >= len(functions) // 2, costs
    assert re.search(
        r"^\d+ cores of .*, \d{4}-\d\d-\d\d, \d+ programs, mean error of the fit \d+\.\d%$", calibration.source
    )


def test_calibrate_times_steps_of_the_base_model(done):
    ((name, points),) = done.hardware.calibration.base_steps.items()
    assert name == "llama"
    assert [rows for rows, _ in points] == [8, 16]
    assert all(seconds > 0 for _, seconds in points)


def test_calibrate_reports_the_fit_of_each_function(done):
    for pattern in (
        r"^memory read +[\d.]+ GB/s by all cores, device and pool \(median; [\d.]+ to [\d.]+\)$",
        r"^product +8 rows, 64 x 16: \d+ GFLOP/s$",
        r"^link to_pool +4 KiB [\d.]+, 64 KiB [\d.]+ GB/s$",
        r"^link to_device +4 KiB [\d.]+, 64 KiB [\d.]+ GB/s$",
        r"^base step +llama: 8 rows [\d.]+, 16 rows [\d.]+ ms$",
        r"^cost of +us a call +ns a piece +ps a byte ",
        r"^near_shrink +(?:[\d.]+ +|- +)+[\d.-]+$",
        r"^fit of +points +MAPE +worst: fitted, measured$",
        r"^fetch +2 +[\d.]+% +[+-]\d+%, [\d.]+, [\d.]+ ms at rank \d+, ",
        *(
            rf"^{kind} +{points} +[\d.]+%"
            for kind, points in (
                ("resident", 3),
                ("near_data", 3),
                ("split", 3),
                ("shrink", 3),
                ("expand", 3),
                ("delta", 3),
                ("attention device", 2),
                ("attention near", 2),
                ("attention local", 1),
                ("attention distributed", 1),
                ("matmul", 2),
                ("empty lanes", 2),
            )
        ),
        r"^all +30 +[\d.]+%$",
        rf"^wrote {re.escape(str(done.path))}",
    ):
        assert re.search(pattern, done.out, re.MULTILINE), f"{pattern} is not in\n{done.out}"


def test_calibrate_shows_how_far_it_is(done):
    for pattern in (r"^1/9 +rank 4, 1 tokens each, 3 adapters: compiled in ", r"^warm-up ", r"^run 2/2 +[\d.]+ s$"):
        assert re.search(pattern, done.progress, re.MULTILINE), done.progress


def test_calibrate_draws_the_fit_beside_the_file(done):
    pytest.importorskip("matplotlib")
    plot = done.path.with_suffix(".png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert f"and {plot}" in done.out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"runs": 0}, "--runs must be at least 1, got 0"),
        ({"data_mb": 0}, "--data_mb must be at least 1, got 0"),
        ({"dtype": "int8"}, "--dtype 'int8' is unknown; choose bfloat16, float16, float32"),
        ({"points": "all"}, "--points 'all' is unknown; choose usual, tiny"),
        ({"output": "/nowhere/x.json"}, "--output '/nowhere/x.json' is in a directory that does not exist: make it"),
        ({"output": "/tmp"}, "--output '/tmp' is a directory: name a file in it, such as hardware.json"),
        ({"model": "/nowhere"}, "/nowhere does not exist"),
    ],
)
def test_calibration_that_cannot_be_is_refused(changes, says):
    with pytest.raises(StartError) as caught:
        run_calibration(Calibrating(**changes), log=StageLog(Console(quiet=True)))
    assert says in str(caught.value)


def test_default_file_is_that_of_the_host(monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "here")
    monkeypatch.setenv("HOME", "/home/me")
    assert calibration_path() == Calibrating().path == Path("/home/me/.cache/plora_jax/hardware-here.json")
