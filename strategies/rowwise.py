"""Functions of rows that XLA on the CPU cuts into passes of their own: norms, rotations, gates, sums, the best of one.

XLA's versions are the reference and serve everywhere; the native kernels make one pass. Functions that take `used`,
[] int32, need compute only so much of the first axis: nobody reads what they give for the rest. None is all of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from strategies import low_rank, native


def native_serves() -> bool:
    """Whether the kernels for the CPU run here; else the references do."""
    return jax.local_devices()[0].platform == "cpu" and native.unavailable() is None


def _differentiated_as(reference: Callable[..., Any], operands: int) -> Callable[[Callable[..., Any]], Any]:
    """Gives a function the derivative of `reference` by its first `operands` arguments; its last one is `used`."""

    def wrap(function: Callable[..., Any]) -> Any:
        settings = tuple(range(operands, len(inspect.signature(function).parameters) - 1))
        served = jax.custom_jvp(function, nondiff_argnums=settings)

        @served.defjvp
        def _jvp(*args: Any) -> Any:
            *chosen, primals, tangents = args
            return jax.jvp(lambda *values: reference(*values, *chosen), primals[:operands], tangents[:operands])

        return functools.wraps(function)(served)

    return wrap


def xla_gated(gate: jax.Array, up: jax.Array, kind: str, dtype: Any) -> jax.Array:
    """The reference of `gated`."""
    gate, up = gate.astype(dtype), up.astype(dtype)
    # In float32 and rounded once: XLA on the CPU otherwise rounds after each operation, three times as slow.
    x = gate.astype(jnp.float32)
    active = jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=True)
    return active.astype(dtype) * up


@_differentiated_as(xla_gated, operands=2)
def gated(gate: jax.Array, up: jax.Array, kind: str, dtype: Any, used: jax.Array | None = None) -> jax.Array:
    """activation(gate) * up, the activation computed in float32 and rounded before the product.

    Args:
        gate, up: [...] of `dtype`, or float32 that is first rounded to it.
        kind: "silu", or "gelu" in its approximation by tanh.
        dtype: of the result.
        used: as above.
    """
    if _serves(dtype, gate, up):
        return native.gated(gate, up, used, silu=kind == "silu")
    return xla_gated(gate, up, kind, dtype)


def xla_rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: bool, dtype: Any) -> jax.Array:
    """The reference of `rms_norm`."""
    x32 = x.astype(dtype).astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    if offset:
        return (x32 * (1.0 + weight.astype(jnp.float32))).astype(dtype)
    return x32.astype(dtype) * weight.astype(dtype)


@_differentiated_as(xla_rms_norm, operands=2)
def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, offset: bool, dtype: Any, used: jax.Array | None = None
) -> jax.Array:
    """RMS norm over the last axis, in float32.

    Args:
        x: [..., D] of `dtype`, or float32 that is first rounded to it.
        weight: [D].
        eps: added to the mean square.
        offset: multiplies by 1 + weight before it rounds (Gemma), else rounds and multiplies by weight.
        dtype: of the result.
        used: as above.
    """
    if _serves(dtype, x) and weight.dtype == dtype:
        return native.rms_norm(x, weight, used, eps=eps, offset=offset)
    return xla_rms_norm(x, weight, eps, offset, dtype)


def xla_add_rms_norm(
    x: jax.Array, out: jax.Array, weight: jax.Array, eps: float, offset: bool
) -> tuple[jax.Array, jax.Array]:
    """The reference of `add_rms_norm`."""
    total = x + out.astype(x.dtype)
    return total, xla_rms_norm(total, weight, eps, offset, x.dtype)


@_differentiated_as(xla_add_rms_norm, operands=3)
def add_rms_norm(
    x: jax.Array, out: jax.Array, weight: jax.Array, eps: float, offset: bool, used: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """x [..., D] with `out` added, rounded to the dtype of x before and after, and the RMS norm of that."""
    if _serves(x.dtype, x) and _serves(x.dtype, out) and weight.dtype == x.dtype:
        return native.add_rms_norm(x, out, weight, used, eps=eps, offset=offset)
    return xla_add_rms_norm(x, out, weight, eps, offset)


def xla_rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, dtype: Any) -> jax.Array:
    """The reference of `rotated`."""
    low, high = jnp.split(x.astype(dtype).astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(dtype)


@_differentiated_as(xla_rotated, operands=3)
def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, dtype: Any, used: jax.Array | None = None) -> jax.Array:
    """Dimension i of each head rotated with i + H / 2, in float32.

    Args:
        x: [..., heads, H] of `dtype`, or float32 that is first rounded to it.
        cos, sin: [..., H / 2] float32.
        dtype: of the result.
        used: as above.
    """
    if _serves(dtype, x) and x.shape[:-2] == cos.shape[:-1]:
        return native.rotated(x, cos, sin, used)
    return xla_rotated(x, cos, sin, dtype)


def add_rows(sums: Sequence[jax.Array], parts: Sequence[jax.Array], *, first: int) -> tuple[jax.Array, ...]:
    """Sums with parts added to some of their rows; `low_rank.add_rows` is the reference.

    Args:
        sums: [N, O] float32 each.
        parts: [T, O] bfloat16 or float32, one of each sum.
        first: row of a sum that belongs to the first of its part; N is at least `first` + T.
    """
    return (native.add_rows if native_serves() else low_rank.add_rows)(sums, parts, first=first)


def first_best(x_BV: jax.Array) -> jax.Array:
    """Index i32[B] of the largest entry of f32[B, V], of equal ones the first; NaN is below all numbers."""
    return native.first_best(x_BV) if native_serves() else xla_first_best(x_BV)


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


def _serves(dtype: Any, *operands: jax.Array) -> bool:
    """Whether the kernels for bfloat16 take these operands, all of one type."""
    fits = dtype == jnp.bfloat16 and len({x.dtype for x in operands}) == 1
    return fits and operands[0].dtype in (jnp.bfloat16, jnp.float32) and native_serves()
