"""What the planning benchmark prints and writes."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from launch.console import in_bytes

_LABEL_WIDTH = 24
_WIDTH = 17


class Choice(NamedTuple):
    """One problem, solved.

    Attributes:
        active: adapters that run.
        with_work: those, and adapters that are expected.
        full_s: a full search.
        incremental_s: from the answer to the problem before.
        decision_s: all that the engine's planner did.
        full_over_bound: relative, of the objective.
        incremental_over_full: relative to the better of both.
    """

    active: int
    with_work: int
    full_s: float
    incremental_s: float
    decision_s: float
    full_over_bound: float
    incremental_over_full: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanningReport:
    """A finished measurement.

    Attributes:
        case: in words.
        options: by flag.
        choices: by hardware.
        machine: where plans were made, as `describe_machine`.
        software: versions.
        command: command line that repeats it.
        measured_at: when.
    """

    case: str
    options: Mapping[str, Any]
    choices: Mapping[str, Sequence[Choice]]
    machine: Mapping[str, str | int]
    software: Mapping[str, str]
    command: str
    measured_at: datetime.datetime

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "benchmark": "planning",
            "case": self.case,
            "options": dict(self.options),
            "machine": dict(self.machine),
            "software": dict(self.software),
            "choices": {name: [choice._asdict() for choice in found] for name, found in self.choices.items()},
            "command": self.command,
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
        }

    def as_text(self) -> str:
        """The same for people."""
        machine = self.machine
        size = in_bytes(float(machine["memory_bytes"]))
        heads = ("adapters active", "with work", "full, ms", "incremental, ms", "decision, ms")
        return "\n".join(
            [
                _line("case", self.case),
                _line("hardware", f"{machine['cpu']}, {machine['cores']} cores, {size}"),
                _line("software", ", ".join(f"{name} {value}" for name, value in self.software.items())),
                "",
                _line("plans for", "".join(f"{head:>{_WIDTH}}" for head in heads)),
                *(_line(name, _row(choices)) for name, choices in self.choices.items()),
                "median and 90th percentile of each",
                "",
                *(_line(f"plans for {name}", _quality(choices)) for name, choices in self.choices.items()),
                _line("command", self.command),
            ]
        )


def _row(choices: Sequence[Choice]) -> str:
    cells = [_both([getattr(choice, name) for choice in choices], "{:.0f}") for name in ("active", "with_work")]
    times = ("full_s", "incremental_s", "decision_s")
    cells += [_both([1000 * getattr(choice, name) for choice in choices], "{:.2f}") for name in times]
    return "".join(f"{cell:>{_WIDTH}}" for cell in cells)


def _both(values: Sequence[float], form: str) -> str:
    return ", ".join(form.format(value) for value in np.percentile(values, [50, 90]))


def _quality(choices: Sequence[Choice]) -> str:
    full = [choice.full_over_bound for choice in choices]
    moved = [choice.incremental_over_full for choice in choices]
    return (
        f"full {np.mean(full):.2%} over bound on average, {np.max(full):.2%} at worst; "
        f"incremental {np.mean(moved):.2%} over full, {np.max(moved):.2%} at worst"
    )


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}} {text}"
