"""What the strategies benchmark prints and writes."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.benchmarks.cold_pages import ColdSize
from launch.benchmarks.prediction_report import Predicted
from launch.benchmarks.strategy_programs import AttentionPoint, LoraPoint
from launch.console import in_bytes
from memory_pool.auditing import LinkTraffic
from strategies.strategy_table import LORA

_LABEL_WIDTH = 24
_NEAR_LORA = {"shrink": "shrink", "expand": "expand", "delta": "shrink+expand"}
_KEY_WIDTH = 26


class Timing(NamedTuple):
    """Runs of one program on one point of the grid.

    Attributes:
        program: strategy or near-data function.
        data_bytes: of adapters, keys and values that a call reads, each once.
        runs_s: seconds of each call.
        stream_bytes_per_s: of the streaming read just before each call.
        moved: bytes over the link in a call; None for near-data functions alone.
        useful: the same without padding.
    """

    program: str
    data_bytes: int
    runs_s: tuple[float, ...]
    stream_bytes_per_s: tuple[float, ...]
    moved: LinkTraffic | None
    useful: LinkTraffic | None

    @property
    def median_s(self) -> float:
        return statistics.median(self.runs_s)

    @property
    def bytes_per_s(self) -> float:
        """Rate at which data is read, median over the runs."""
        return self.data_bytes / self.median_s

    @property
    def share(self) -> float:
        """Rate over that of the streaming read beside it, median over the runs."""
        pairs = zip(self.runs_s, self.stream_bytes_per_s, strict=True)
        return statistics.median(self.data_bytes / seconds / stream for seconds, stream in pairs)

    def as_json(self) -> dict[str, Any]:
        found = {"program": self.program, "median_s": self.median_s, "runs_s": list(self.runs_s)}
        found |= {"data_bytes": self.data_bytes, "data_bytes_per_s": self.bytes_per_s}
        found |= {"share_of_memory_read": self.share}
        if self.moved is not None and self.useful is not None:
            ways = ("to_device", "to_pool")
            link = {"moved": self.moved, "useful": self.useful}
            found["link_bytes"] = {name: {way: getattr(t, way) for way in ways} for name, t in link.items()}
        return found


class PointResult(NamedTuple):
    """A point of the grid with the timings of its programs."""

    point: LoraPoint | AttentionPoint
    timings: tuple[Timing, ...]

    def of(self, program: str) -> Timing:
        return next(timing for timing in self.timings if timing.program == program)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategiesReport:
    """One finished measurement.

    Attributes:
        case: the case in words.
        options: every option, by flag.
        machine: where it ran, as `describe_machine`.
        software: versions.
        backend: the probe's line.
        kernels: implementations by operation.
        cold: bytes that were cycled through.
        results: points of the grid.
        command: command line that repeats it.
        measured_at: when.
        predicted: what a calibrated hardware file says; None without one.
    """

    case: str
    options: Mapping[str, Any]
    machine: Mapping[str, str | int]
    software: Mapping[str, str]
    backend: str
    kernels: Mapping[str, str]
    cold: ColdSize
    results: Sequence[PointResult]
    command: str
    measured_at: datetime.datetime
    predicted: Predicted | None = None

    @property
    def streams(self) -> list[float]:
        """Bytes per second of every streaming read."""
        return [rate for result in self.results for rate in result.timings[0].stream_bytes_per_s]

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values in seconds and bytes."""
        predicted = {} if self.predicted is None else {"predicted": self.predicted.as_json()}
        return {
            "benchmark": "strategies",
            "case": self.case,
            "options": dict(self.options),
            "machine": dict(self.machine),
            "software": dict(self.software),
            "backend": self.backend,
            "kernels": dict(self.kernels),
            "cycled_bytes": self.cold.num_bytes,
            "last_level_cache_bytes": self.cold.cache_bytes,
            "note": self.cold.note,
            "memory_read_bytes_per_s": {"median": statistics.median(self.streams), "runs": self.streams},
            "points": [
                {**r.point._asdict(), "programs": [timing.as_json() for timing in r.timings]} for r in self.results
            ],
            **predicted,
            "command": self.command,
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
        }

    def as_text(self) -> str:
        """The same for people."""
        machine, streams = self.machine, self.streams
        hardware = f"{machine['cpu']}, {machine['cores']} cores, {in_bytes(float(machine['memory_bytes']))}"
        reads = f"{_gb(statistics.median(streams))} GB/s (median; {_gb(min(streams))} to {_gb(max(streams))})"
        lines = [
            _line("case", self.case),
            _line("hardware", hardware),
            _line("software", ", ".join(f"{name} {value}" for name, value in self.software.items())),
            _line("backend", self.backend),
            _line("kernels", ", ".join(f"{name} {value}" for name, value in self.kernels.items())),
            _line("cold data", self._cold()),
            _line("memory read", reads),
            "",
            *_strategy_table([r for r in self.results if isinstance(r.point, LoraPoint)]),
            "",
            *_near_table(self.results),
            "",
            *([] if self.predicted is None else [*self.predicted.as_lines(), ""]),
            _line("command", self.command),
        ]
        return "\n".join(lines)

    def _cold(self) -> str:
        cache = "not known" if self.cold.cache_bytes is None else in_bytes(self.cold.cache_bytes)
        words = f"{in_bytes(self.cold.num_bytes)} of pages in turn; last-level cache {cache}"
        words += f"; {self.cold.note}" if self.cold.note else ""
        return words + ". A virtual machine may be told of a cache that it shares with others"


def _strategy_table(results: Sequence[PointResult]) -> list[str]:
    """Time and link bytes of one step's adapters by each strategy."""
    head = ["all layers, one step: ms, and MB over the link (moved)"]
    columns = "".join(f"{name:>20}" for name in LORA)
    head.append(f"{'rank  tokens each  adapters':<{_KEY_WIDTH}}{columns}")
    return head + [_key(r.point) + "".join(_time_and_link(r.of(name)) for name in LORA) for r in results]


def _near_table(results: Sequence[PointResult]) -> list[str]:
    """Near-data functions as a share of the memory's rate."""
    lora = [r for r in results if isinstance(r.point, LoraPoint)]
    attention = [r for r in results if isinstance(r.point, AttentionPoint)]
    lines = ["near-data functions: GB/s of data, and its share of the streaming read beside it"]
    columns = "".join(f"{label:>20}" for label in _NEAR_LORA.values())
    lines.append(f"{'rank  tokens each  adapters':<{_KEY_WIDTH}}{columns}")
    lines += [_key(r.point) + "".join(_rate(r.of(name)) for name in _NEAR_LORA) for r in lora]
    lines.append(f"{'context  sequences':<{_KEY_WIDTH}}{'partial attention':>20}")
    return lines + [_key(r.point) + _rate(r.timings[0]) for r in attention]


def _key(point: LoraPoint | AttentionPoint) -> str:
    if isinstance(point, LoraPoint):
        text = f"{point.rank:>4}  {point.tokens_per_adapter:>11}  {point.adapters:>8}"
    else:
        text = f"{point.context:>7}  {point.sequences:>9}"
    return f"{text:<{_KEY_WIDTH}}"


def _time_and_link(timing: Timing) -> str:
    moved = timing.moved.to_device + timing.moved.to_pool if timing.moved else 0
    return f"{1000 * timing.median_s:>11.2f}{moved / 1e6:>9.2f}"


def _rate(timing: Timing) -> str:
    return f"{_gb(timing.bytes_per_s):>13}{timing.share:>7.0%}"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f}"


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}} {text}"
