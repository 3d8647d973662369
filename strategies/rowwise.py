"""Functions of rows that XLA on the CPU cuts into passes of their own: the gate of an MLP, and the best of a row.

XLA's versions are the reference and serve everywhere; the native kernels make one pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from strategies import native


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def gated(gate: jax.Array, up: jax.Array, kind: str) -> jax.Array:
    """activation(gate) * up, the activation computed in float32 and rounded before the product.

    Args:
        gate, up: [...] of one dtype.
        kind: "silu", or "gelu" in its approximation by tanh.
    """
    if gate.dtype == jnp.bfloat16 and _native():
        return native.gated(gate, up, silu=kind == "silu")
    return xla_gated(gate, up, kind)


@gated.defjvp
def _gated_jvp(kind: str, primals: Any, tangents: Any) -> Any:
    return jax.jvp(lambda gate, up: xla_gated(gate, up, kind), primals, tangents)


def xla_gated(gate: jax.Array, up: jax.Array, kind: str) -> jax.Array:
    """The reference of `gated`."""
    # In float32 and rounded once: XLA on the CPU otherwise rounds after each operation, three times as slow.
    x = gate.astype(jnp.float32)
    active = jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=True)
    return active.astype(gate.dtype) * up


def first_best(x_BV: jax.Array) -> jax.Array:
    """Index i32[B] of the largest entry of f32[B, V], of equal ones the first; NaN is below all numbers."""
    return native.first_best(x_BV) if _native() else xla_first_best(x_BV)


def xla_first_best(x_BV: jax.Array) -> jax.Array:
    """The reference of `first_best`: argmax in two passes that vectorise."""
    keys_BV = ordered(x_BV)
    index_BV = lax.broadcasted_iota(jnp.int32, x_BV.shape, 1)
    return jnp.min(jnp.where(keys_BV == jnp.max(keys_BV, axis=1, keepdims=True), index_BV, x_BV.shape[1]), axis=1)


def ordered(x: jax.Array) -> jax.Array:
    """float32 as int32 in the same order, both zeros alike; NaN is below all numbers."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    keys = jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return jnp.where(jnp.isnan(x), jnp.iinfo(jnp.int32).min, keys)


def _native() -> bool:
    return jax.local_devices()[0].platform == "cpu" and native.unavailable() is None
