"""A whole run: steps in order, evaluations and checkpoints between them, and a stop that can be resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from plora_jax.training.batches import Batch, BatchPlan
from plora_jax.training.checkpoints import RunCheckpoints
from plora_jax.training.config import TrainConfig, TrainingError
from plora_jax.training.lora import LoraParams
from plora_jax.training.step import Trainer, TrainState


class Progress(NamedTuple):
    """What a step gave.

    Attributes:
        step: optimiser steps done.
        total_steps: of the run.
        loss: per learned token, nats.
        grad_norm: before clipping.
        tokens: real tokens of the step.
        seconds: that the step took; the first of each batch shape compiles.
        eval_loss: of held-out examples after this step, where they were evaluated.
    """

    step: int
    total_steps: int
    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    eval_loss: float | None


class Result(NamedTuple):
    """How a run ended.

    Attributes:
        lora: trained values.
        step: optimiser steps done.
        finished: all steps are done; else it was stopped, and a checkpoint holds its state.
    """

    lora: LoraParams
    step: int
    finished: bool


def total_steps(config: TrainConfig, batches_per_epoch: int) -> int:
    """Optimiser steps of a run."""
    return config.steps or max(1, config.epochs * batches_per_epoch // config.accumulation)


def run(
    trainer: Trainer,
    params: Any,
    config: TrainConfig,
    *,
    plan: BatchPlan,
    held_out: list[Batch],
    checkpoints: RunCheckpoints | None,
    resume: bool = False,
    observe: Callable[[Progress], None] = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Trains to the end, or until asked to stop.

    Args:
        trainer: programs of the run.
        params: base parameters; not changed.
        config: of the run.
        plan: training batches.
        held_out: batches to evaluate on; may be empty.
        checkpoints: where to save; None for nowhere.
        resume: go on from the newest checkpoint.
        observe: called after each step.
        should_stop: asked after each step.

    Raises:
        TrainingError: a loss that is not finite, nothing to resume from, or an earlier run that would be overwritten.
    """
    state = trainer.init()
    if checkpoints is not None:
        state = _start(state, checkpoints, resume=resume)
    total, per_epoch = total_steps(config, len(plan)), max(1, len(plan) // config.accumulation)
    eval_every, save_every = config.eval_every or per_epoch, config.save_every or per_epoch
    for done in range(int(state.step) + 1, total + 1):
        state, progress = _step(trainer, params, state, _batches(plan, done, config.accumulation), total)
        last = done == total
        if held_out and (last or done % eval_every == 0):
            progress = progress._replace(eval_loss=trainer.evaluate(params, state.lora, held_out))
        observe(progress)
        stop = should_stop() and not last
        if checkpoints is not None and (last or stop or done % save_every == 0):
            checkpoints.save(state)
        if stop:
            return Result(state.lora, done, finished=False)
    return Result(state.lora, total, finished=True)


def _start(state: TrainState, checkpoints: RunCheckpoints, *, resume: bool) -> TrainState:
    if resume:
        return checkpoints.restore(state)
    if checkpoints.latest_step() is not None:
        raise TrainingError(
            f"{checkpoints.directory} holds a checkpoint of step {checkpoints.latest_step()}: go on from it with "
            "--resume, remove it, or give another output directory."
        )
    return state


def _batches(plan: BatchPlan, step: int, accumulation: int) -> list[Batch]:
    """The batches of a step, counted from 1: the step number alone is the place in the data."""
    return [plan.training_batch(position) for position in range((step - 1) * accumulation, step * accumulation)]


def _step(
    trainer: Trainer, params: Any, state: TrainState, batches: list[Batch], total: int
) -> tuple[TrainState, Progress]:
    began = time.monotonic()
    state, result = trainer.step(params, state, batches)
    step = int(state.step)
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        raise TrainingError(
            f"the loss is {result.loss} and the gradient norm {result.grad_norm} at step {step} of {total}: lower the "
            "learning rate, or check the data and the base weights; the last checkpoint is from before this step."
        )
    tokens = sum(batch.num_tokens for batch in batches)
    seconds = time.monotonic() - began
    return state, Progress(step, total, result.loss, result.grad_norm, tokens, seconds, eval_loss=None)
