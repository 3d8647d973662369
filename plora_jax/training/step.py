"""The jitted part of training: gradients of one batch, one optimiser step, the loss of held-out batches.

The base parameters are an argument of every program and never a constant of it; the state is donated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from plora_jax.config import ModelConfig
from plora_jax.model import LoraWeights, forward_full
from plora_jax.training.batches import Batch
from plora_jax.training.config import TrainConfig
from plora_jax.training.lora import LoraParams, init_lora


class Forward(Protocol):
    """The model as a function: base parameters, tokens [B, T] and an adapter to logits [B, T, V] float32."""

    def __call__(self, params: Any, tokens_BT: jax.Array, lora: LoraWeights) -> jax.Array: ...


@struct.dataclass
class TrainState:
    """Everything that a step changes.

    Attributes:
        step: optimiser steps done, int32.
        lora: trained values, float32.
        optimizer: state of optax.
    """

    step: jax.Array
    lora: LoraParams
    optimizer: optax.OptState


@struct.dataclass
class Gradients:
    """Sums over the batches of one optimiser step.

    Attributes:
        sums: gradient of the summed loss, shaped as the trained values.
        loss: summed loss, nats.
        count: learned tokens.
    """

    sums: LoraParams
    loss: jax.Array
    count: jax.Array


class StepResult(NamedTuple):
    """Loss per learned token in nats, and the gradients' global norm before clipping."""

    loss: float
    grad_norm: float


def model_forward(model: ModelConfig) -> Forward:
    """The base model's own dense forward pass."""

    def forward(params: Any, tokens_BT: jax.Array, lora: LoraWeights) -> jax.Array:
        return forward_full(params, model, tokens_BT, lora=lora)

    return forward


def learning_rate(config: TrainConfig, total_steps: int) -> optax.Schedule:
    """The learning rate by optimiser step."""
    warmup = min(round(config.warmup_fraction * total_steps), total_steps - 1)
    peak, rest = config.learning_rate, total_steps - warmup
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[config.schedule]()
    if not warmup:
        return after
    # The first step is not wasted on a learning rate of 0.
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, after], [warmup])


class Trainer:
    """Programs of one run; holds no weights and no state.

    Args:
        model: configuration of the base model.
        config: of the run.
        total_steps: optimiser steps that the learning rate is planned for.
        forward: the model as a function; its own dense forward pass by default.
    """

    def __init__(
        self, model: ModelConfig, config: TrainConfig, *, total_steps: int, forward: Forward | None = None
    ) -> None:
        self._model, self._config = model, config
        self._forward = forward or model_forward(model)
        adamw = optax.adamw(learning_rate(config, total_steps), weight_decay=config.weight_decay)
        clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
        self._optimizer = optax.chain(clip, adamw)
        self._accumulate = jax.jit(self._accumulate_fn, donate_argnames=("gradients",))
        self._apply = jax.jit(self._apply_fn, donate_argnames=("state",))
        self._evaluate = jax.jit(self._loss_sum)

    def init(self) -> TrainState:
        """The state before the first step."""
        lora = init_lora(self._model, self._config)
        return TrainState(step=jnp.zeros((), jnp.int32), lora=lora, optimizer=self._optimizer.init(lora))

    def step(self, params: Any, state: TrainState, batches: Iterable[Batch]) -> tuple[TrainState, StepResult]:
        """One optimiser step on the mean loss over all learned tokens of the batches.

        Donates: state.
        """
        sums = jax.tree.map(jnp.zeros_like, state.lora)
        gradients = Gradients(sums=sums, loss=jnp.zeros((), jnp.float32), count=jnp.zeros((), jnp.float32))
        for batch in batches:
            gradients = self._accumulate(
                params, state.lora, gradients=gradients, tokens_BT=batch.tokens_BT, learned_BT=batch.learned_BT
            )
        state, loss, norm = self._apply(state=state, gradients=gradients)
        return state, StepResult(float(loss), float(norm))

    def evaluate(self, params: Any, lora: LoraParams, batches: Iterable[Batch]) -> float:
        """Mean loss per learned token over all batches, nats."""
        loss = count = 0.0
        for batch in batches:
            loss += float(self._evaluate(lora, params, batch.tokens_BT, batch.learned_BT))
            count += int(np.sum(batch.learned_BT))
        return loss / max(count, 1)

    def _loss_sum(self, lora: LoraParams, params: Any, tokens_BT: jax.Array, learned_BT: jax.Array) -> jax.Array:
        weights = LoraWeights(a=lora["a"], b=lora["b"], scale=self._config.scale)
        logits_BTV = self._forward(params, tokens_BT, weights).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits_BTV[:, :-1], tokens_BT[:, 1:])
        return jnp.sum(jnp.where(learned_BT[:, 1:], losses, 0.0))

    def _accumulate_fn(
        self, params: Any, lora: LoraParams, gradients: Gradients, tokens_BT: jax.Array, learned_BT: jax.Array
    ) -> Gradients:
        loss, grads = jax.value_and_grad(self._loss_sum)(lora, params, tokens_BT, learned_BT)
        return Gradients(
            sums=jax.tree.map(jnp.add, gradients.sums, grads),
            loss=gradients.loss + loss,
            count=gradients.count + jnp.sum(learned_BT).astype(jnp.float32),
        )

    def _apply_fn(self, state: TrainState, gradients: Gradients) -> tuple[TrainState, jax.Array, jax.Array]:
        count = jnp.maximum(gradients.count, 1.0)
        mean = jax.tree.map(lambda total: total / count, gradients.sums)
        updates, optimizer = self._optimizer.update(mean, state.optimizer, state.lora)
        lora = jax.tree.map(jnp.add, state.lora, updates)
        return (
            TrainState(step=state.step + 1, lora=lora, optimizer=optimizer),
            gradients.loss / count,
            optax.tree.norm(mean),
        )
