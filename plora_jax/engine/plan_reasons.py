"""Why adapters are served as they are, in words."""

from __future__ import annotations

from typing import Any

import numpy as np

from plora_jax.engine.placement import PlanExplanation
from plora_jax.engine.plan_worker import Decision
from strategies.planner import explain

_MICRO = 1e6


class PlanReasons:
    """The reasons of one decision. Any thread."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision
        self._rows = {int(adapter_id): row for row, adapter_id in enumerate(decision.snapshot.ids) if adapter_id}

    def short(self, adapter_id: int) -> str:
        """One line."""
        decision, row = self._decision, self._rows.get(adapter_id)
        if row is None:
            return "loaded after the last plan"
        strategies = decision.problem.strategies
        chosen, tokens = strategies[int(decision.plan.strategy[row])], float(decision.tokens[row])
        if decision.snapshot.pinned[row]:
            return f"pinned: {chosen} is the best that fits for it"
        waiting = decision.waiting.get(row)
        if waiting is not None:
            saved, cost = waiting.saved_s * _MICRO, waiting.cost_s * _MICRO
            return (
                f"{strategies[waiting.column]} would be better and waits until the move pays: {saved:.1f} us of "
                f"{cost:.1f} us have been saved"
            )
        if decision.problem.active[row]:
            return f"{chosen} is best for a step of {decision.plan.step_s * 1e3:.2f} ms with {tokens:.0f} of its tokens"
        if tokens:
            return f"idle, {tokens:.3f} tokens a step are expected: {chosen} is best for them"
        return "idle, nothing is expected: no device memory is set aside for it"

    def long(self, adapter_id: int, name: str) -> PlanExplanation | None:
        """Every strategy with what it would change, and what phases wait for; None for one that is not planned."""
        decision, row = self._decision, self._rows.get(adapter_id)
        if row is None:
            return None
        found = explain(decision.problem, decision.plan, row, waiting=decision.waiting.get(row))
        lines = found.as_text().splitlines()
        plan = decision.plan
        head = [
            f"adapter {name!r}: {self.short(adapter_id)}",
            f"it {lines[0].partition(' ')[2].partition(' ')[2]}; a step takes {plan.step_s * 1e3:.3f} ms",
        ]
        kv = f"KV of running sequences: {100 * plan.kv_fraction:.0f} % on the device, {plan.attention} for the rest"
        values = {key: value for key, value in found.as_json().items() if key != "row"}
        values |= {"adapter": name, "reason": self.short(adapter_id), "step_s": plan.step_s}
        values |= {"attention": plan.attention, "kv_fraction": plan.kv_fraction}
        return PlanExplanation("\n".join([*head, *lines[1:], kv]), _plain(values))


def _plain(value: Any) -> Any:
    """Without numpy's types, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
