"""The model over whole sequences without a cache: what training differentiates and tests compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from plora_jax.config import ModelConfig
from plora_jax.model.decoder import Decoder, Params
from plora_jax.model.layers import LayerConstants
from strategies.int8_kv import quantize_rows


class LoraWeights(NamedTuple):
    """One adapter, layers stacked; with tensor parallelism one shard's part, as `TensorParallel.cuts` says.

    Attributes:
        a: [L, R, I] by projection.
        b: [L, O, R] by projection.
        scale: factor on their product.
    """

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    scale: Any


class DenseContext:
    """Causal attention over [B, T]; the same adapter, or none, for all rows.

    Args:
        config: of one shard.
        positions_BT: [B, T] int32.
        lora: an adapter of projections inside the layers.
        int8_kv: keys and values count as a cache of int8 would keep them.
    """

    def __init__(
        self, config: ModelConfig, positions_BT: jax.Array, lora: LoraWeights | None, *, int8_kv: bool = False
    ) -> None:
        self._config, self._positions, self._lora, self._int8_kv = config, positions_BT, lora, int8_kv

    def positions(self) -> jax.Array:
        return self._positions

    def used(self) -> jax.Array | None:
        return None

    def embed_delta(self, tokens: jax.Array) -> jax.Array | None:
        del tokens
        return None

    def adapt(self, sums: dict[str, jax.Array], x: jax.Array, layer: LayerConstants) -> dict[str, jax.Array]:
        if self._lora is None:
            return sums
        lora, adapted = self._lora, dict(sums)
        for name, y in sums.items():
            if name in lora.a:
                a, b = lora.a[name][layer.index], lora.b[name][layer.index]
                shrunk = jnp.einsum("BTI,RI->BTR", x.astype(a.dtype), a, preferred_element_type=jnp.float32)
                adapted[name] = y + lora.scale * jnp.einsum(
                    "BTR,OR->BTO", shrunk, b, preferred_element_type=jnp.float32
                )
        return adapted

    def attend(
        self, cache: Any, q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerConstants
    ) -> tuple[Any, jax.Array]:
        c, key_scales, value_scales = self._config, None, None
        if self._int8_kv:
            (k, key_scales), (v, value_scales) = quantize_rows(k), quantize_rows(v)
            k = k.astype(q.dtype)
        v = v.astype(q.dtype)
        batch, tokens = q.shape[:2]
        q = q.reshape(batch, tokens, c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
        scores = jnp.einsum("BTKRH,BSKH->BKRTS", q, k, preferred_element_type=jnp.float32) * c.query_scale
        if key_scales is not None:
            scores *= _by_key(key_scales)
        if c.attention_soft_cap is not None:
            scores = c.attention_soft_cap * jnp.tanh(scores / c.attention_soft_cap)
        behind = self._positions[:, :, None] - self._positions[:, None, :]
        visible = (behind >= 0) & (behind < layer.window)
        probs = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), axis=-1)
        if value_scales is not None:
            probs *= _by_key(value_scales)
        probs = probs.astype(v.dtype)
        out = jnp.einsum("BKRTS,BSKH->BTKRH", probs, v, preferred_element_type=jnp.float32).astype(v.dtype)
        return cache, out.reshape(batch, tokens, c.num_heads, c.head_dim)


def _by_key(scales_BSK: jax.Array) -> jax.Array:
    """As scores are: [B, K, 1, 1, S]."""
    return scales_BSK.swapaxes(1, 2)[:, :, None, None]


def forward_full(
    params: Params,
    config: ModelConfig,
    tokens_BT: jax.Array,
    *,
    lora: LoraWeights | None = None,
    dtype: Any = None,
    num_shards: int = 1,
    int8_kv: bool = False,
) -> jax.Array:
    """Logits at every position of whole sequences; padding belongs at the end.

    Args:
        params: parameter tree of the base model.
        config: of the whole model.
        tokens_BT: [B, T] int32.
        lora: an adapter for all rows.
        dtype: compute dtype; that of the embedding by default.
        num_shards: shards of the mesh axis `tensor`; more than 1 inside a shard_map only, with one shard's `params` and
            `lora`.
        int8_kv: keys and values are rounded as by a cache of int8.

    Returns:
        [B, T, V] float32.

    Cost:
        Attention takes B * N * T * T scores at once.
    """
    decoder = Decoder(config, num_shards=num_shards)
    positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
    x = decoder.embed(params, tokens_BT, dtype or params["embedding"].dtype)
    context = DenseContext(decoder.parallel.shard_config, positions, lora, int8_kv=int8_kv)
    hidden, _ = decoder.layers(params, x, (), context)
    return decoder.logits(params, hidden)
