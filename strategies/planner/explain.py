"""Why an adapter has its strategy: what every other one would do to the step if only this adapter changed.

explain(problem, plan, row, waiting=planner.waiting.get(row)).as_text()

resident: the step would take 1.2 us less; 4.5 MB on the device; does not fit: 1.1 MB are free
near_data (serves it): 0 bytes on the device
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from strategies.planner.joint import Waiting
from strategies.planner.problem import RESOURCES, Plan, PlanProblem, evaluate

_MICRO = 1e6


@dataclasses.dataclass(frozen=True)
class Option:
    """One strategy for the adapter, everything else as planned.

    Attributes:
        strategy: its name.
        serves: the plan has it.
        step_change_s: predicted step with it, less that of the plan.
        device_bytes: that it needs.
        hindrance: why it could not be chosen, or "".
    """

    strategy: str
    serves: bool
    step_change_s: float
    device_bytes: int
    hindrance: str

    def as_text(self) -> str:
        """One line."""
        size = f"{self.device_bytes:,} bytes on the device"
        if self.serves:
            return f"{self.strategy} (serves it): {size}"
        change = self.step_change_s * _MICRO
        word = "longer" if change >= 0 else "less"
        tail = f"; {self.hindrance}" if self.hindrance else ""
        return f"{self.strategy}: the step would take {abs(change):.2f} us {word}; {size}{tail}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The reasons for one adapter.

    Attributes:
        row: of the adapter.
        active: it has tokens in the coming steps.
        options: by strategy.
        phases: (phase, seconds, what it waits for), in order.
        free_bytes: device memory that nobody has.
    """

    row: int
    active: bool
    options: tuple[Option, ...]
    phases: tuple[tuple[str, float, str], ...]
    free_bytes: int

    def as_text(self) -> str:
        """Plain words, a line for each strategy and phase."""
        state = "has tokens in the coming steps" if self.active else "is idle"
        lines = [f"adapter {self.row} {state}; {self.free_bytes:,} bytes of device memory are free"]
        lines += [option.as_text() for option in self.options]
        for name, seconds, bound in self.phases:
            lines.append(f"{name} takes {seconds * _MICRO:.1f} us, bound by {_in_words(bound)}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        phases = [{"phase": name, "seconds": seconds, "bound_by": bound} for name, seconds, bound in self.phases]
        return {**dataclasses.asdict(self), "options": [dataclasses.asdict(o) for o in self.options], "phases": phases}


def _in_words(bound: str) -> str:
    names, _, device = bound.partition("@")
    parts = names.split("+")
    if set(parts) == set(RESOURCES):
        return "the machine as a whole: device, pool and link are one here"
    return " and ".join(part.replace("_", " ") for part in parts) + (f" of pool device {device}" if device else "")


def explain(problem: PlanProblem, plan: Plan, row: int, *, waiting: Waiting | None = None) -> Explanation:
    """The reasons for one adapter of a plan.

    Args:
        problem: that the plan solves.
        plan: the decision.
        row: of the adapter.
        waiting: its move that has not paid yet, from `JointPlanner.waiting`.

    Raises:
        IndexError: there is no such row.
    """
    if not 0 <= row < problem.num_adapters:
        raise IndexError(f"row {row} is not an adapter of the problem: it has {problem.num_adapters}")
    kv_bytes = plan.kv_fraction * problem.kv.device_bytes
    rooms = [problem.budget_bytes - plan.device_bytes]
    if problem.kv.adapter_budget_bytes is not None:
        rooms.append(problem.kv.adapter_budget_bytes - (plan.device_bytes - kv_bytes))
    free = max(0.0, min(rooms))
    now = int(plan.strategy[row])
    options = []
    for column, name in enumerate(problem.strategies):
        trial = plan.strategy.copy()
        trial[row] = column
        change_s = evaluate(problem, trial, plan.attention, plan.kv_fraction).step_s - plan.step_s
        hindrance = "" if column == now else _hindrance(problem, row, column, now, free, waiting)
        options.append(Option(name, column == now, change_s, int(problem.device_bytes[row, column]), hindrance))
    phases = zip(problem.phases, map(float, plan.phase_s), plan.bottleneck, strict=True)
    return Explanation(row, bool(problem.active[row]), tuple(options), tuple(phases), int(free))


def _hindrance(problem: PlanProblem, row: int, column: int, now: int, free: float, waiting: Waiting | None) -> str:
    if not problem.allowed[row, column]:
        return "not allowed for it"
    more = float(np.subtract(problem.device_bytes[row, column], problem.device_bytes[row, now]))
    if more > free:
        return f"does not fit: needs {more:,.0f} bytes more, {free:,.0f} are free"
    if waiting is not None and waiting.column == column:
        saved, cost = waiting.saved_s * _MICRO, waiting.cost_s * _MICRO
        return f"waits until it pays: {saved:.1f} us of the {cost:.1f} us that the move takes have been saved"
    return ""
