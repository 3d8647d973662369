"""One step of the engine as a pure function: model, strategies and sampling, compiled once a bucket.

`step(params, pages, rows, batch) -> (pages, result)`: KV pages are donated and updated in place; base weights and
adapter rows are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memory_pool import AdapterRows
from plora_jax.config import ModelConfig
from plora_jax.engine.batch import PREFILL_BLOCK, StepBatch
from plora_jax.engine.params import MAX_LOGPROBS
from plora_jax.engine.sampling import SampledRows, sample, token_logprobs
from plora_jax.model import Decoder, LayerConstants, Params
from strategies import ATTENTION, LORA, HeadMaths, Kernels, KvPages, write_kv


class PromptLogprobs(NamedTuple):
    """Scores of prompt tokens by prefill slot: [C], [C, MAX_LOGPROBS], [C, MAX_LOGPROBS]."""

    logprobs: Any
    top_ids: Any
    top_logprobs: Any


class StepResult(NamedTuple):
    """What comes back to the host."""

    sampled: SampledRows
    prompt: PromptLogprobs


class StepStrategies(NamedTuple):
    """What a step is built from.

    Attributes:
        lora: a name in strategies.LORA.
        attention: a name in strategies.ATTENTION.
        kernels: implementations on this platform.
    """

    lora: str
    attention: str
    kernels: Kernels


class PagedContext:
    """The strategies of a packed batch, as the model's layers see them."""

    def __init__(
        self,
        config: ModelConfig,
        batch: StepBatch,
        rows: Mapping[str, AdapterRows],
        *,
        strategies: StepStrategies,
    ) -> None:
        self._config, self._batch, self._rows = config, batch, rows
        self._kernels = strategies.kernels
        self._delta = LORA[strategies.lora].delta
        self._attend = ATTENTION[strategies.attention].attend

    def positions(self) -> jax.Array:
        return self._batch.positions

    def deltas(self, x: jax.Array, projections: Sequence[str], layer: LayerConstants) -> dict[str, jax.Array]:
        rows = {name: self._rows[name] for name in projections if name in self._rows}
        if not rows:
            return {}
        decode, prefill = self._split(x)
        parts = [
            self._delta(tokens, rows, layer.index, lane, kernel=kernels.lora.call)
            for tokens, lane, kernels in (
                (decode, self._batch.decode_lora, self._kernels.decode),
                (prefill, self._batch.prefill_lora, self._kernels.prefill),
            )
            if tokens.shape[0]
        ]
        return {name: jnp.concatenate([part[name] for part in parts]) for name in rows}

    def attend(
        self, cache: KvPages, q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerConstants
    ) -> tuple[KvPages, jax.Array]:
        c = self._config
        cache = write_kv(cache, layer.index, k, v, self._batch.write)
        maths = HeadMaths(c.query_scale, c.attention_soft_cap, layer.window)
        decode, prefill = self._split(q)
        parts = [
            self._attend(
                tokens.reshape(*lane.positions.shape, c.num_heads, c.head_dim),
                cache,
                layer.index,
                lane,
                maths,
                kernel=kernels.attention.call,
            ).reshape(tokens.shape)
            for tokens, lane, kernels in (
                (decode, self._batch.decode, self._kernels.decode),
                (prefill, self._batch.prefill, self._kernels.prefill),
            )
            if tokens.shape[0]
        ]
        return cache, jnp.concatenate(parts)

    def _split(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The decode rows and the prefill tokens of a packed array."""
        decode_rows = self._batch.decode.positions.shape[0]
        return x[:decode_rows], x[decode_rows:]


def make_step(config: ModelConfig, dtype: Any, strategies: StepStrategies) -> Any:
    """Builds the step of a model.

    Args:
        config: of the model.
        dtype: compute dtype of activations, KV and adapters.
        strategies: which strategies and kernels the step uses.

    Returns:
        A function (params, pages, rows, batch) -> (pages, StepResult), to be jitted with `pages` donated.
    """
    decoder = Decoder(config)

    def step(
        params: Params, pages: KvPages, rows: Mapping[str, AdapterRows], batch: StepBatch
    ) -> tuple[KvPages, StepResult]:
        context = PagedContext(config, batch, rows, strategies=strategies)
        with jax.named_scope("embed"):
            x = decoder.embed(params, batch.tokens, dtype)
        with jax.named_scope("layers"):
            hidden, pages = decoder.layers(params, x, pages, context)
        with jax.named_scope("head"):
            logits = decoder.logits(params, hidden.at[batch.sample_rows].get(mode="promise_in_bounds"))
        with jax.named_scope("sample"):
            sampled = sample(logits, batch.sampling)
        prompt = _prompt_logprobs(decoder, params, hidden[batch.decode.positions.shape[0] :], batch)
        return pages, StepResult(sampled, prompt)

    return step


def _prompt_logprobs(decoder: Decoder, params: Params, hidden_CD: jax.Array, batch: StepBatch) -> PromptLogprobs:
    """Scores of the prefill tokens, computed only when somebody asked; block by block to bound the logits."""
    slots = batch.prompt_targets.shape[0]
    blocks = slots // PREFILL_BLOCK

    def score(_: None) -> PromptLogprobs:
        def block(part: tuple[jax.Array, jax.Array]) -> PromptLogprobs:
            hidden, targets = part
            return PromptLogprobs(*token_logprobs(decoder.logits(params, hidden), targets))

        hidden = hidden_CD.reshape(blocks, PREFILL_BLOCK, -1)
        scored = lax.map(block, (hidden, batch.prompt_targets.reshape(blocks, PREFILL_BLOCK)))
        return jax.tree.map(lambda x: x.reshape(slots, *x.shape[2:]), scored)

    nothing = PromptLogprobs(
        jnp.zeros(slots), jnp.zeros((slots, MAX_LOGPROBS), jnp.int32), jnp.zeros((slots, MAX_LOGPROBS))
    )
    if not slots:
        return nothing
    return lax.cond(batch.any_prompt_logprobs, score, lambda _: nothing, None)
