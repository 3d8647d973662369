"""Routed experts: every token goes to its k most probable experts, and only those are computed for it.

With tensor parallelism every shard has all experts at a part of their width, and routes alike.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from plora_jax.config import ModelConfig

_BY_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


def _grouped_matmul(x: jax.Array, weights_EOI: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Rows of x [M, I], sorted by expert, each times its own expert's matrix: [M, O] float32."""
    return lax.ragged_dot_general(x, weights_EOI, group_sizes, _BY_ROWS, preferred_element_type=jnp.float32)


def routed_experts(
    x: jax.Array,
    *,
    router: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    config: ModelConfig,
) -> jax.Array:
    """Mixture of experts with softmax routing.

    Args:
        x: [..., D].
        router: [E, D].
        gate: [E, F, D].
        up: [E, F, D].
        down: [E, D, F].
        config: `experts_per_token`, `norm_topk_prob`, `activation`.

    Returns:
        [..., D] float32; a partial sum where F is one shard's part of the width.

    Source:
        Mixtral (arXiv 2401.04088); Qwen3-MoE differs in `norm_topk_prob` only.
    """
    flat = x.reshape(-1, x.shape[-1])
    tokens, chosen = flat.shape[0], config.experts_per_token
    scores = jnp.einsum("TD,ED->TE", flat, router, preferred_element_type=jnp.float32).astype(x.dtype)
    probs, experts = lax.top_k(nnx.softmax(scores.astype(jnp.float32), axis=-1), chosen)
    if config.norm_topk_prob:
        probs = probs / probs.sum(axis=-1, keepdims=True)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=config.num_experts).astype(jnp.int32)
    rows = flat[order // chosen]
    gated, lifted = (_grouped_matmul(rows, w, sizes).astype(x.dtype) for w in (gate, up))
    act = nnx.silu(gated) if config.activation == "silu" else nnx.gelu(gated, approximate=True)
    out = _grouped_matmul(act * lifted, down, sizes)
    back = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    return jnp.sum(back.reshape(tokens, chosen, -1) * probs[..., None], axis=1).reshape(x.shape)
