"""What the first-use benchmark prints and writes."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.console import in_bytes

MOST_OVER_RESIDENT = 2.0
"""TTFT of an unseen adapter, without the reading of its file, over that of a resident one: what is wanted at most."""

_LABEL_WIDTH = 24


class FirstUse(NamedTuple):
    """One adapter; seconds.

    Attributes:
        read_s: a read of its file.
        load_s: reading, checking, and copying it into the pool.
        ttft_s: of the request that follows.
        resident_s: TTFT of the next request.
    """

    read_s: float
    load_s: float
    ttft_s: float
    resident_s: float

    @property
    def unseen_s(self) -> float:
        """From asking for the adapter to its first token."""
        return self.load_s + self.ttft_s

    @property
    def over_resident(self) -> float:
        """Without the read of the file, as a multiple of the TTFT of a resident adapter."""
        return (self.unseen_s - self.read_s) / self.resident_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstUseReport:
    """A finished measurement.

    Attributes:
        case: in words.
        options: by flag.
        machine: as `describe_machine`.
        software: versions.
        file_bytes: of one adapter's file.
        measured: by adapter.
        command: command line that repeats it.
        measured_at: when.
    """

    case: str
    options: Mapping[str, Any]
    machine: Mapping[str, str | int]
    software: Mapping[str, str]
    file_bytes: int
    measured: Sequence[FirstUse]
    command: str
    measured_at: datetime.datetime

    @property
    def medians(self) -> dict[str, float]:
        """Of every figure for itself: seconds, and the ratio."""
        names = (*FirstUse._fields, "unseen_s", "over_resident")
        return {name: statistics.median(getattr(found, name) for found in self.measured) for name in names}

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "benchmark": "first_use",
            "case": self.case,
            "options": dict(self.options),
            "machine": dict(self.machine),
            "software": dict(self.software),
            "file_bytes": self.file_bytes,
            "medians": self.medians,
            "measured": [found._asdict() for found in self.measured],
            "command": self.command,
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
        }

    def as_text(self) -> str:
        """The same for people."""
        ms = {name.removesuffix("_s"): 1000 * value for name, value in self.medians.items()}
        ratio, machine = self.medians["over_resident"], self.machine
        hardware = f"{machine['cpu']}, {machine['cores']} cores, {in_bytes(float(machine['memory_bytes']))}"
        met = "met" if ratio < MOST_OVER_RESIDENT else "NOT met"
        rows = {
            "case": self.case,
            "hardware": hardware,
            "software": ", ".join(f"{name} {value}" for name, value in self.software.items()),
            "resident, TTFT": f"{ms['resident']:.1f} ms",
            "unseen, TTFT": f"{ms['unseen']:.1f} ms: {ms['load']:.1f} to load, {ms['ttft']:.1f} for the request",
            "read of the file": f"{ms['read']:.1f} ms, {in_bytes(self.file_bytes)}",
            "unseen without the read": f"{ratio:.2f} x resident, {met} (under {MOST_OVER_RESIDENT:g} wanted)",
            "command": self.command,
        }
        return "\n".join(f"{label:<{_LABEL_WIDTH}} {text}" for label, text in rows.items())
