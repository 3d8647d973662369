"""What a benchmark prints and writes: the case in words, the machine, the figures, and the command to repeat it."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from launch.benchmarks.measurement import Measurement, Percentiles, RunFigures, median_run
from launch.console import in_bytes

_LABEL_WIDTH = 24
_COLUMN_WIDTH = 10


@dataclasses.dataclass(frozen=True)
class System:
    """What answered.

    Attributes:
        name: model, dtype and adapters; of a server, its models and its address.
        options: every option of the engine, by flag.
        device_bytes: device memory by what it holds.
        kernels: implementations by phase and operation.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    device_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputReport:
    """One finished measurement.

    Attributes:
        case: the case in words.
        options: every option of the case, by flag.
        system: what answered.
        machine: where it ran, as `describe_machine`.
        software: versions; for a server elsewhere those of the client.
        measurement: the runs.
        command: command line that repeats it.
        measured_at: when.
    """

    case: str
    options: Mapping[str, Any]
    system: System
    machine: Mapping[str, str | int]
    software: Mapping[str, str]
    measurement: Measurement
    command: str
    measured_at: datetime.datetime

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values; times in seconds."""
        measured = self.measurement
        return {
            "benchmark": "throughput",
            "case": self.case,
            "options": dict(self.options),
            "system": dataclasses.asdict(self.system),
            "machine": dict(self.machine),
            "software": dict(self.software),
            "median": _as_dict(median_run(measured.runs)),
            "runs": [_as_dict(run) for run in measured.runs],
            "compilations_in_traffic": measured.compilations,
            "preemptions": measured.preemptions,
            "command": self.command,
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
        }

    def as_text(self) -> str:
        """The same for people: one line an entry, and a table of the latencies."""
        machine, runs = self.machine, self.measurement.runs
        lines = [_line("case", self.case)]
        lines.append(_line("system", self.system.name))
        if self.system.device_bytes:
            sizes = {what: in_bytes(size) for what, size in self.system.device_bytes.items()}
            lines += [_line("device memory", _in_words(sizes)), _line("kernels", _in_words(self.system.kernels))]
        hardware = f"{machine['cpu']}, {machine['cores']} cores, {in_bytes(float(machine['memory_bytes']))}"
        lines += [
            _line("hardware", hardware),
            _line("software", _in_words(self.software)),
            "",
            *_rates(runs),
            "",
            *_latencies(median_run(runs)),
            "",
            _line("compilations in traffic", _compilations(self.measurement.compilations)),
        ]
        if self.measurement.preemptions is not None:
            lines.append(_line("preemptions", str(self.measurement.preemptions)))
        short = sum(run.short_answers for run in runs)
        if short:
            lines.append(_line("note", f"{short} answers ended before the tokens asked for: ignore_eos has no effect"))
        return "\n".join([*lines, _line("command", self.command)])


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}} {text}"


def _in_words(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _rates(runs: Sequence[RunFigures]) -> list[str]:
    """Median and every run of what a whole run gives."""
    middle = median_run(runs)
    rows = {
        "output tokens/s": ([run.output_tokens_per_s for run in runs], middle.output_tokens_per_s, 1),
        "total tokens/s": ([run.total_tokens_per_s for run in runs], middle.total_tokens_per_s, 1),
        "run, s": ([run.wall_s for run in runs], middle.wall_s, 2),
    }
    head = _line("whole run", f"{'median':>{_COLUMN_WIDTH}}   runs")
    return [head] + [
        _line(label, f"{median:>{_COLUMN_WIDTH}.{digits}f}   {' '.join(f'{value:.{digits}f}' for value in values)}")
        for label, (values, median, digits) in rows.items()
    ]


def _latencies(middle: RunFigures) -> list[str]:
    rows = {"TTFT": middle.ttft_s, "ITL": middle.itl_s, "end to end": middle.e2e_s}
    head = _line("latency, ms", "".join(f"{name:>{_COLUMN_WIDTH}}" for name in Percentiles._fields))
    return [head] + [
        _line(label, "".join(f"{1000 * value:>{_COLUMN_WIDTH}.1f}" for value in values) if values else "-")
        for label, values in rows.items()
    ]


def _compilations(count: int | None) -> str:
    if count is None:
        return "not known"
    return "0" if count == 0 else f"{count}, and must be 0: the figures hold time of the compiler"


def _as_dict(run: RunFigures) -> dict[str, Any]:
    return {name: value._asdict() if isinstance(value, Percentiles) else value for name, value in run._asdict().items()}
