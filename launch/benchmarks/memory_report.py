"""What the memory benchmark prints and writes."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.console import in_bytes

_LABEL_WIDTH = 24
_WIDTH = 12


class MemoryPoint(NamedTuple):
    """One number of adapters.

    Attributes:
        adapters: in the pool.
        true_bytes: of A and B of all of them, in their true ranks.
        pool_bytes: of the pages that they take in the pool.
        device_bytes: of their copies on the device.
        resident_bytes: of the process, at the end of its runs.
        base_step_s: a decode step of the base model alone.
        used: adapters that the other step uses.
        used_step_s: a decode step over those; None without any.
    """

    adapters: int
    true_bytes: int
    pool_bytes: int
    device_bytes: int
    resident_bytes: int
    base_step_s: float
    used: int
    used_step_s: float | None

    def as_words(self) -> str:
        """In one line."""
        pool, resident = in_bytes(self.pool_bytes), in_bytes(self.resident_bytes)
        return f"{pool} in the pool, {resident} resident, {1000 * self.base_step_s:.1f} ms a step without them"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """A finished measurement.

    Attributes:
        case: in words.
        options: by flag.
        machine: as `describe_machine`.
        software: versions.
        points: by number of adapters, rising.
        command: command line that repeats it.
        measured_at: when.
    """

    case: str
    options: Mapping[str, Any]
    machine: Mapping[str, str | int]
    software: Mapping[str, str]
    points: Sequence[MemoryPoint]
    command: str
    measured_at: datetime.datetime

    def cost_of_one(self) -> dict[str, float]:
        """Bytes of one more adapter, from the first to the last number of them; empty where there is one number."""
        first, last = self.points[0], self.points[-1]
        more = last.adapters - first.adapters
        names = ("true_bytes", "pool_bytes", "device_bytes", "resident_bytes")
        return {name: (getattr(last, name) - getattr(first, name)) / more for name in names} if more else {}

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "benchmark": "memory",
            "case": self.case,
            "options": dict(self.options),
            "machine": dict(self.machine),
            "software": dict(self.software),
            "points": [point._asdict() for point in self.points],
            "one_more_adapter": self.cost_of_one(),
            "command": self.command,
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
        }

    def as_text(self) -> str:
        """The same for people."""
        machine = self.machine
        names = ("adapters", "true", "pool", "device", "resident", "base step", "used", "their step")
        lines = [
            _line("case", self.case),
            _line(
                "hardware", f"{machine['cpu']}, {machine['cores']} cores, {in_bytes(float(machine['memory_bytes']))}"
            ),
            _line("software", ", ".join(f"{name} {value}" for name, value in self.software.items())),
            "",
            "".join(f"{name:>{_WIDTH}}" for name in names),
            *map(_row, self.points),
            "steps in ms",
            "",
        ]
        if cost := self.cost_of_one():
            words = ", ".join(f"{in_bytes(size)} {name.removesuffix('_bytes')}" for name, size in cost.items())
            words += f"; pool over true {cost['pool_bytes'] / cost['true_bytes']:.2f}"
            lines.append(_line("one more adapter", words))
        return "\n".join([*lines, _line("command", self.command)])


def _row(point: MemoryPoint) -> str:
    sizes = (point.true_bytes, point.pool_bytes, point.device_bytes, point.resident_bytes)
    used = "-" if point.used_step_s is None else f"{1000 * point.used_step_s:.1f}"
    cells = [str(point.adapters), *map(in_bytes, sizes), f"{1000 * point.base_step_s:.1f}", str(point.used), used]
    return "".join(f"{cell:>{_WIDTH}}" for cell in cells)


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}} {text}"
