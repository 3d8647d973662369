"""What the engine needs of whoever plans how adapters and KV are served (`plora_jax.engine.planning`)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol

from plora_jax.engine.plan import Sequence, StepPlan


class Turn(NamedTuple):
    """What happened between two steps.

    Attributes:
        moved_pages: pages copied to the device.
        planned_s: seconds that a plan took which now holds; None where none was applied.
    """

    moved_pages: int
    planned_s: float | None


class PlanExplanation(NamedTuple):
    """The reasons for one adapter at length.

    Attributes:
        text: plain words, one line a strategy and a phase.
        values: the same as plain values.
    """

    text: str
    values: dict[str, Any]


class Reasons(Protocol):
    """Why adapters are served as they are. Any thread."""

    def short(self, adapter_id: int) -> str:
        """One line."""
        ...

    def long(self, adapter_id: int, name: str) -> PlanExplanation | None:
        """Every strategy and what it would change; None for an adapter that is not planned."""
        ...


class PlacementPlanner(Protocol):
    """Decides who is served how, between steps. The engine's thread but for `reasons`."""

    @property
    def plans_adapters(self) -> bool:
        """Whether strategies of adapters are part of the plan."""
        ...

    def between_steps(self, running: SequenceOf[Sequence]) -> Turn:
        """Acts on a plan that is ready, copies a few pages, and has another plan made if it is time."""
        ...

    def observe(self, plan: StepPlan) -> None:
        """Counts a step that is scheduled."""
        ...

    def reasons(self) -> Reasons | None:
        """Why adapters are served as they are; None while nobody has planned them."""
        ...

    def close(self) -> None:
        """Ends what runs beside the engine."""
        ...
