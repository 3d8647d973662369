"""Measures the time from a new process to its first token, phase by phase, with a cold and with a warm cache.

  python -m launch.bench startup
      the default model and its adapters; one start that compiles, then --runs that read the cache

  python -m launch.bench startup --model=/models/llama --cold_runs=0 --compilation_cache_dir=~/.cache/plora_jax/programs
      restarts alone, of a model of your own, with the cache that it serves from

Every start is a process of its own that does what `launch.serve` does but for listening. Without
--compilation_cache_dir the cache is a new directory for each cold start, and the last of them stays for the warm ones.
The native kernels are taken as they are built; files of the model may be in the system's cache of files. Figures are
medians. Progress goes to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags
from rich.console import Console

from launch import flags
from launch.benchmarks.machine import describe_machine, describe_software
from launch.benchmarks.output import output_problems, write_json
from launch.benchmarks.startup_probe import REFUSED
from launch.console import StageLog, in_bytes
from launch.flags import StartError
from plora_jax.engine.build import EngineConfig

PHASES = ("interpreter", "imports", "weights", "programs", "adapters", "ready", "first token")
_LABEL_WIDTH = 24
_WIDTH = 12
_NOT_FLAGS = ("compilation_cache_dir",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartupCase:
    """What is measured.

    Attributes:
        runs: starts with a warm cache, after one that does not count.
        cold_runs: starts with an empty cache, before those; 0 for none.
        compilation_cache_dir: cache of compiled programs for the warm starts; None for a temporary directory.
        timeout_s: seconds a start may take.
        output_json: file to write all figures to.
    """

    runs: int = 5
    cold_runs: int = 1
    compilation_cache_dir: str | None = None
    timeout_s: float = 900.0
    output_json: str | None = None

    def validate(self) -> None:
        """Raises StartError naming every field that cannot be, its value and what is allowed."""
        least = {"runs": 1, "cold_runs": 0, "timeout_s": 1}
        problems = [
            f"--{name} must be at least {bound}, got {value}"
            for name, bound in least.items()
            if (value := getattr(self, name)) < bound
        ]
        problems += output_problems(self.output_json)
        if problems:
            raise StartError("; ".join(problems))


Start = Mapping[str, float]
"""Seconds from the start of a process to the end of each phase."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartupReport:
    """A finished measurement.

    Attributes:
        model: as it was named.
        starts: of each kind, "cold" and "warm".
        options: by flag.
        machine: as `describe_machine`.
        software: versions.
        command: command line that repeats it.
        measured_at: when.
    """

    model: str
    starts: Mapping[str, Sequence[Start]]
    options: Mapping[str, Any]
    machine: Mapping[str, str | int]
    software: Mapping[str, str]
    command: str
    measured_at: datetime.datetime

    def phases(self, kind: str) -> dict[str, float]:
        """Median seconds of each phase of a kind of start, and of the whole."""
        found = {}
        for phase in PHASES:
            spans = [_span(start, phase) for start in self.starts[kind] if phase in start]
            if spans:
                found[phase] = statistics.median(spans)
        return found | {"whole": statistics.median(start["first token"] for start in self.starts[kind])}

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "benchmark": "startup",
            "model": self.model,
            "median": {kind: self.phases(kind) for kind in self.starts},
            "starts": {kind: [dict(start) for start in starts] for kind, starts in self.starts.items()},
            "options": dict(self.options),
            "machine": dict(self.machine),
            "software": dict(self.software),
            "command": self.command,
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
        }

    def as_text(self) -> str:
        """The same for people."""
        machine, kinds = self.machine, list(self.starts)
        of_kind = {kind: self.phases(kind) for kind in kinds}
        counts = "".join(f"{f'{kind} ({len(self.starts[kind])})':>{_WIDTH}}" for kind in kinds)
        lines = [
            _line("model", self.model),
            _line(
                "hardware", f"{machine['cpu']}, {machine['cores']} cores, {in_bytes(float(machine['memory_bytes']))}"
            ),
            _line("software", ", ".join(f"{name} {value}" for name, value in self.software.items())),
            "",
            _line("seconds, median", counts),
        ]
        for phase in (*PHASES, "whole"):
            values = [of_kind[kind].get(phase) for kind in kinds]
            if any(value is not None for value in values):
                lines.append(_line(f"  {phase}", "".join(f"{_seconds(value):>{_WIDTH}}" for value in values)))
        return "\n".join([*lines, "", _line("command", self.command)])


def _span(start: Start, phase: str) -> float:
    """Seconds of one phase: from the end of the last one before it that there was."""
    before = [start[name] for name in PHASES[: PHASES.index(phase)] if name in start]
    return start[phase] - max(before, default=0.0)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}} {text}"


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each option of the case and of the engine."""
    flags.define(StartupCase, flag_values=flag_values)
    flags.define(EngineConfig, leave_out=_NOT_FLAGS, flag_values=flag_values)


def main() -> int:
    """Measures what the flags describe, prints the report, and writes it where asked."""
    case = flags.read(StartupCase)
    engine = flags.read(EngineConfig)
    command = shlex.join(["python", "-m", "launch.bench", "startup", *sys.argv[1:]])
    report = run_startup(case, engine, command=command, log=StageLog(Console(stderr=True)))
    print(report.as_text())
    write_json(case.output_json, report.as_json())
    return 0


def run_startup(case: StartupCase, engine: EngineConfig, *, command: str, log: StageLog) -> StartupReport:
    """Starts again and again.

    Args:
        case: how often.
        engine: what is started; the case names its cache.
        command: command line that asks for this.
        log: told how far it is.

    Raises:
        StartError: the case cannot be, or a start failed.
    """
    case.validate()
    try:
        engine.validate()
    except ValueError as error:
        raise StartError(str(error)) from error
    starts: dict[str, list[Start]] = {}
    with contextlib.ExitStack() as stack:
        cache = case.compilation_cache_dir or stack.enter_context(tempfile.TemporaryDirectory())
        for number in range(case.cold_runs):
            # The last one fills the cache of the warm starts.
            last = number == case.cold_runs - 1 and case.compilation_cache_dir is None
            with _fresh_directory(cache if last else None) as directory:
                starts.setdefault("cold", []).append(_start(engine, directory, case, log=log, words="cold"))
        for number in range(case.runs + 1):
            taken = _start(engine, cache, case, log=log, words=f"warm {number}/{case.runs}" if number else "warm-up")
            if number:
                starts.setdefault("warm", []).append(taken)
    return StartupReport(
        model=engine.model,
        starts=starts,
        options=dataclasses.asdict(case) | {"engine": dataclasses.asdict(engine)},
        machine=describe_machine(),
        software=describe_software(),
        command=command,
        measured_at=datetime.datetime.now(datetime.UTC),
    )


@contextlib.contextmanager
def _fresh_directory(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def _start(engine: EngineConfig, cache: str, case: StartupCase, *, log: StageLog, words: str) -> Start:
    options = dataclasses.asdict(
        dataclasses.replace(engine, compilation_cache_dir=str(pathlib.Path(cache).expanduser()))
    )
    command = [sys.executable, "-m", "launch.benchmarks.startup_probe"]
    # From here on: making the process is part of a start.
    command += [repr(time.monotonic()), json.dumps(options)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=case.timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise StartError(f"a start took more than {case.timeout_s:g} s: raise --timeout_s") from error
    if done.returncode:
        if (last := done.stderr.strip().rpartition("\n")[2]).startswith(REFUSED):
            raise StartError(last.removeprefix(REFUSED))
        raise StartError(f"a start failed: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    log.say(words, f"{found['first token']:.2f} s to the first token")
    return found
