"""What the comparison prints and writes."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.benchmarks.peers.case import PeerCase
from launch.benchmarks.peers.systems import OURS, PeerResult
from launch.console import in_bytes

_LABEL_WIDTH = 24
_WIDTH = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeersReport:
    """A finished comparison.

    Attributes:
        case: in words.
        options: by flag.
        machine: as `describe_machine`.
        systems: that were asked for.
        cases: that were measured.
        results: by system and case, where it was measured.
        notes: by system, and by system and case in words: why there is no figure.
        command: command line that repeats it.
        measured_at: when.
    """

    case: str
    options: Mapping[str, Any]
    machine: Mapping[str, str | int]
    systems: Sequence[str]
    cases: Sequence[PeerCase]
    results: Mapping[tuple[str, PeerCase], PeerResult]
    notes: Mapping[str, str]
    command: str
    measured_at: datetime.datetime

    @property
    def ours(self) -> Sequence[str]:
        """The rows of this engine that were asked for."""
        return [system for system in self.systems if system in OURS]

    def ratio(self, ours: str, system: str, case: PeerCase) -> float | None:
        """The figure of one of `ours` over a system's; None where one of them is missing."""
        mine, theirs = self.results.get((ours, case)), self.results.get((system, case))
        return mine.median / theirs.median if mine and theirs else None

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "benchmark": "peers",
            "case": self.case,
            "options": dict(self.options),
            "machine": dict(self.machine),
            "results": [
                {
                    "system": system,
                    **case._asdict(),
                    "version": result.version,
                    "output_tokens_per_s": result.median,
                    "runs": list(result.tokens_per_s),
                    "ours_over_it": {ours: self.ratio(ours, system, case) for ours in self.ours},
                }
                for (system, case), result in self.results.items()
            ],
            "notes": dict(self.notes),
            "command": self.command,
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
        }

    def as_text(self) -> str:
        """The same for people."""
        machine = self.machine
        lines = [
            _line("case", self.case),
            _line(
                "hardware", f"{machine['cpu']}, {machine['cores']} cores, {in_bytes(float(machine['memory_bytes']))}"
            ),
        ]
        versions = {system: result.version for (system, _), result in self.results.items()}
        lines += [_line(system, version) for system, version in versions.items()]
        lines += ["", *self._table("output tokens/s", self._rate), ""]
        for ours in self.ours:
            lines += [*self._table(f"{ours} over", functools.partial(self._times, ours)), ""]
        lines += [_line(f"no figure: {what}", why) for what, why in self.notes.items()]
        return "\n".join([*lines, _line("command", self.command)])

    def _table(self, title: str, text: Callable[[str, PeerCase], str]) -> list[str]:
        lines = [_line(title, "".join(f"{system:>{_WIDTH}}" for system in self.systems))]
        for case in self.cases:
            lines.append(
                _line(f"  {case.words}", "".join(f"{text(system, case):>{_WIDTH}}" for system in self.systems))
            )
        return lines

    def _rate(self, system: str, case: PeerCase) -> str:
        result = self.results.get((system, case))
        return "-" if result is None else f"{result.median:.1f}"

    def _times(self, ours: str, system: str, case: PeerCase) -> str:
        ratio = self.ratio(ours, system, case)
        return "-" if ratio is None else f"{ratio:.2f}"


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}} {text}"
