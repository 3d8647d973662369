"""How a calibrated hardware file does on the strategies benchmark, in words and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from launch.benchmarks.strategy_predictions import Prediction, Verdict, judge
from launch.benchmarks.strategy_programs import AttentionPoint, LoraPoint
from strategies.strategy_table import LORA

_KEY_WIDTH = 26
_COLUMN = 20


class PredictedAttention(NamedTuple):
    """One point of partial attention.

    Attributes:
        point: of the grid.
        predicted_s: seconds.
        measured_s: seconds.
    """

    point: AttentionPoint
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Predicted(NamedTuple):
    """Predictions beside what was measured.

    Attributes:
        file: hardware file.
        points: of the grid, LoRA only.
        predictions: of each.
        measured: of each, seconds by program.
        attention: points of partial attention.
    """

    file: str
    points: Sequence[LoraPoint]
    predictions: Sequence[Prediction]
    measured: Sequence[Mapping[str, float]]
    attention: Sequence[PredictedAttention] = ()

    @property
    def verdict(self) -> Verdict:
        return judge(self.predictions, self.measured)

    def as_json(self) -> dict[str, Any]:
        """Plain values, seconds."""
        verdict = self.verdict
        return {
            "hardware": self.file,
            "mape": {name: mape(errors) for name, errors in verdict.errors.items()},
            "attention_mape": mape([found.error for found in self.attention]) if self.attention else None,
            "planned_mape": {name: mape(errors) for name, errors in verdict.planned_errors.items()},
            "regret": {
                budget: {"mean": float(np.mean(found)), "worst": max(found)}
                for budget, found in verdict.regrets.items()
            },
            "points": [
                {
                    **point._asdict(),
                    "predicted_s": dict(prediction.step_s),
                    "planned_s": dict(prediction.planned_s),
                    "choices": [
                        {
                            "budget": choice.budget,
                            "adapters": dict(choice.adapters),
                            "measured_s": seconds[choice.name],
                            "best_fixed_s": min(seconds[name] for name in choice.fitting),
                        }
                        for choice in prediction.choices
                    ],
                }
                for point, prediction, seconds in zip(self.points, self.predictions, self.measured, strict=True)
            ],
            "attention": [
                {**found.point._asdict(), "predicted_s": found.predicted_s, "measured_s": found.measured_s}
                for found in self.attention
            ],
        }

    def as_lines(self) -> list[str]:
        """For people."""
        verdict = self.verdict
        lines = [f"predicted by {self.file}: ms, and the error"]
        lines.append(f"{'rank  tokens each  adapters':<{_KEY_WIDTH}}" + "".join(f"{name:>{_COLUMN}}" for name in LORA))
        for index, (point, prediction) in enumerate(zip(self.points, self.predictions, strict=True)):
            cells = (
                f"{1e3 * prediction.step_s[name]:>{_COLUMN - 8}.2f}{verdict.errors[name][index]:>+8.0%}"
                for name in LORA
            )
            lines.append(_key(point) + "".join(cells))
        for label, errors in (("MAPE", verdict.errors), ("MAPE, as planned", verdict.planned_errors)):
            cells = (f"{mape(errors[name]):>{_COLUMN}.1%}" for name in LORA)
            lines.append(f"{label:<{_KEY_WIDTH}}" + "".join(cells))
        return [*lines, "", *self._of_attention(), *self._choices(verdict)]

    def _of_attention(self) -> list[str]:
        if not self.attention:
            return []
        lines = [f"{'context  sequences':<{_KEY_WIDTH}}{'partial attention':>{_COLUMN}}"]
        for found in self.attention:
            key = f"{found.point.context:>7}  {found.point.sequences:>9}"
            lines.append(f"{key:<{_KEY_WIDTH}}{1e3 * found.predicted_s:>{_COLUMN - 8}.2f}{found.error:>+8.0%}")
        errors = [found.error for found in self.attention]
        return [*lines, f"{'MAPE':<{_KEY_WIDTH}}{mape(errors):>{_COLUMN}.1%}", ""]

    def _choices(self, verdict: Verdict) -> list[str]:
        lines = ["planner's choice, and its measured time over that of the best strategy that fits"]
        budgets = list(verdict.regrets)
        lines.append(f"{'rank  tokens each  adapters':<{_KEY_WIDTH}}" + "".join(f"{budget:>40}" for budget in budgets))
        for index, (point, prediction) in enumerate(zip(self.points, self.predictions, strict=True)):
            cells = (f"{choice.name:>33}{verdict.regrets[choice.budget][index]:>7.2f}" for choice in prediction.choices)
            lines.append(_key(point) + "".join(cells))
        for label, value in (("regret, mean", np.mean), ("regret, worst", max)):
            cells = (f"{float(value(verdict.regrets[budget])):>40.3f}" for budget in budgets)
            lines.append(f"{label:<{_KEY_WIDTH}}" + "".join(cells))
        return lines


def mape(errors: Sequence[float]) -> float:
    """Mean absolute error."""
    return float(np.abs(errors).mean())


def _key(point: LoraPoint) -> str:
    text = f"{point.rank:>4}  {point.tokens_per_adapter:>11}  {point.adapters:>8}"
    return f"{text:<{_KEY_WIDTH}}"
