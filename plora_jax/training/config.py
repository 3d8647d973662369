"""What a training run is, as numbers; two runs with equal configurations and data give equal adapters."""

from __future__ import annotations

import dataclasses

SCHEDULES = ("cosine", "linear", "constant")


class TrainingError(ValueError):
    """A training run that cannot start or go on; the message says what to change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of one LoRA fine-tuning run; names follow PEFT and Hugging Face where they have one.

    Attributes:
        rank: R of every adapted projection.
        alpha: the adapter's effect is scaled by alpha / rank, or alpha / sqrt(rank) with `rslora`.
        rslora: rank-stabilised scale.
        targets: projections that get an adapter, in every layer.
        learning_rate: at the schedule's peak.
        schedule: "cosine" or "linear" (both down to 0), or "constant"; after the warm-up.
        warmup_fraction: part of the steps in which the learning rate rises from 0.
        weight_decay: decoupled, of AdamW.
        max_grad_norm: gradients are scaled down to this global norm; 0 for never.
        epochs: passes over the training examples.
        steps: optimiser steps; 0 to let `epochs` decide.
        batch_size: examples in one forward and backward pass.
        accumulation: batches whose gradients make one optimiser step.
        max_length: tokens of an example that are kept.
        seed: of the adapter's first values and of the order of the examples.
        eval_every: optimiser steps between evaluations; 0 for once an epoch.
        save_every: optimiser steps between checkpoints; 0 for once an epoch.
        keep: checkpoints that are kept, the newest ones.
    """

    rank: int = 16
    alpha: float = 32.0
    rslora: bool = False
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    learning_rate: float = 5e-4
    schedule: str = "cosine"
    warmup_fraction: float = 0.05
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    epochs: int = 3
    steps: int = 0
    batch_size: int = 8
    accumulation: int = 1
    max_length: int = 512
    seed: int = 0
    eval_every: int = 0
    save_every: int = 0
    keep: int = 2

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def validate(self, projections: tuple[str, ...]) -> None:
        """Checks every field against its range.

        Args:
            projections: what the model lets an adapter target.

        Raises:
            TrainingError: listing all fields at fault, with value and what is allowed.
        """
        problems: list[str] = []

        def need(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                problems.append(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        for name in ("rank", "batch_size", "accumulation", "keep"):
            need(getattr(self, name) >= 1, name, "at least 1")
        for name in ("steps", "eval_every", "save_every", "weight_decay", "max_grad_norm"):
            need(getattr(self, name) >= 0, name, "at least 0")
        need(self.steps > 0 or self.epochs >= 1, "epochs", "at least 1 where steps is 0")
        need(self.alpha > 0, "alpha", "above 0")
        need(self.learning_rate > 0, "learning_rate", "above 0")
        need(0 <= self.warmup_fraction < 1, "warmup_fraction", "at least 0 and below 1")
        need(self.schedule in SCHEDULES, "schedule", f"one of {', '.join(SCHEDULES)}")
        need(self.max_length >= 2, "max_length", "at least 2 tokens")
        known = (
            bool(self.targets) and len(set(self.targets)) == len(self.targets) and set(self.targets) <= set(projections)
        )
        need(known, "targets", f"a choice without repeats from {', '.join(projections)}")
        if problems:
            raise TrainingError("; ".join(problems) + ".")
