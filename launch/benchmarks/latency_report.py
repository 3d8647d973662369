"""What the latency benchmark prints and writes."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from launch.benchmarks.breakdown import Breakdown
from launch.benchmarks.latency_case import LatencyPoint
from launch.benchmarks.machine_rates import MachineRates
from launch.benchmarks.measurement import RequestRecord, RunFigures, median_run
from launch.benchmarks.report import System
from launch.console import in_bytes

_LABEL_WIDTH = 24
_WIDTH = 10


def decode_step_s(records: Sequence[RequestRecord]) -> float:
    """Seconds of a step in which every request of a run decodes: the median time between two tokens from then on.

    Args:
        records: of requests that were sent at once.
    """
    all_decode_s = max(record.piece_s[0] for record in records)
    gaps = [gap for r in records for at, gap in zip(r.piece_s, np.diff(r.piece_s), strict=False) if at >= all_decode_s]
    return float(statistics.median(gaps)) if gaps else float("nan")


class PointResult(NamedTuple):
    """One point.

    Attributes:
        point: requests and adapters.
        step_s: a decode step in each run.
        runs: figures of each run.
        breakdowns: of its steps, where asked for.
    """

    point: LatencyPoint
    step_s: Sequence[float]
    runs: Sequence[RunFigures]
    breakdowns: Sequence[Breakdown] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatencyReport:
    """A finished measurement.

    Attributes:
        case: in words.
        options: by flag.
        system: what answered.
        machine: as `describe_machine`.
        software: versions.
        rates: what the machine reached meanwhile; None without a breakdown.
        results: by point.
        compilations: programs compiled in traffic.
        command: command line that repeats it.
        measured_at: when.
    """

    case: str
    options: Mapping[str, Any]
    system: System
    machine: Mapping[str, str | int]
    software: Mapping[str, str]
    rates: MachineRates | None
    results: Sequence[PointResult]
    compilations: int
    command: str
    measured_at: datetime.datetime

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values; times in seconds."""
        return {
            "benchmark": "latency",
            "case": self.case,
            "options": dict(self.options),
            "system": dataclasses.asdict(self.system),
            "machine": dict(self.machine),
            "software": dict(self.software),
            "rates": self.rates and self.rates._asdict(),
            "points": [_point_json(result) for result in self.results],
            "compilations_in_traffic": self.compilations,
            "command": self.command,
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
        }

    def as_text(self) -> str:
        """The same for people."""
        machine = self.machine
        hardware = f"{machine['cpu']}, {machine['cores']} cores, {in_bytes(float(machine['memory_bytes']))}"
        lines = [
            _line("case", self.case),
            _line("system", self.system.name),
            _line("hardware", hardware),
            _line("software", ", ".join(f"{name} {value}" for name, value in self.software.items())),
        ]
        if self.rates:
            flops = f"{self.rates.flops_per_s / 1e9:.0f} GFLOP/s in products"
            lines.append(_line("limits", f"{self.rates.memory_bytes_per_s / 1e9:.1f} GB/s from memory, {flops}"))
        lines += ["", *_table(self.results), ""]
        for result in self.results:
            for breakdown in result.breakdowns:
                lines += [*breakdown.as_lines(), ""]
        return "\n".join(
            [*lines, _line("compilations in traffic", str(self.compilations)), _line("command", self.command)]
        )


def _table(results: Sequence[PointResult]) -> list[str]:
    names = ("requests", "adapters", "step, ms", "tokens/s", "ITL p50", "ITL p99", "TTFT p50", "TTFT p99")
    lines = ["".join(f"{name:>{_WIDTH}}" for name in names)]
    for result in results:
        step_s, middle = statistics.median(result.step_s), median_run(result.runs)
        itl = middle.itl_s or middle.ttft_s._replace(p50=float("nan"), p99=float("nan"))
        values = (step_s, itl.p50, itl.p99, middle.ttft_s.p50, middle.ttft_s.p99)
        ms = [f"{1000 * value:>{_WIDTH}.1f}" for value in values]
        rate = f"{result.point.rows / step_s:>{_WIDTH}.1f}"
        lines.append("".join(f"{count:>{_WIDTH}}" for count in result.point) + ms[0] + rate + "".join(ms[1:]))
    return [*lines, "tokens/s is that of decode steps alone; ITL and TTFT in ms"]


def _point_json(result: PointResult) -> dict[str, Any]:
    middle = median_run(result.runs)
    return {
        **result.point._asdict(),
        "step_s": statistics.median(result.step_s),
        "step_s_of_runs": list(result.step_s),
        "decode_tokens_per_s": result.point.rows / statistics.median(result.step_s),
        "itl_s": middle.itl_s and middle.itl_s._asdict(),
        "ttft_s": middle.ttft_s._asdict(),
        "breakdowns": [breakdown.as_json() for breakdown in result.breakdowns],
    }


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}} {text}"
