"""Base weights as int8 with a scale for each output, and products with them that are exact but for rounded inputs.

    weights = quantize(weight_LOI, tiled=unsupported(...) is None)     # once
    q, k, v = int8_products(x, [weights_q, weights_k, weights_v], layer)

A row of activations becomes 16-bit integers by its own largest magnitude, so a token's result does not depend on its
company. Each integer is two digits of 8 bits, which are multiplied as they are into sums of 32 bits: exact in any
order, so the native kernel and XLA give the same bits. Weights are read in half the bytes of bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from strategies import native

TILE_OUTPUTS, TILE_INPUTS = 16, 64

MAX_INPUTS = 2**17
"""Inputs whose products of digits, at most 127 * 128 each, cannot exceed 32 bits in their sum."""

_MOST = np.float32(32639)
"""127 * 256 + 127, the largest integer of two digits."""

_UNIT = np.float32(1) / _MOST
_LEAST = np.float32(1e-30)
"""Rows whose largest magnitude is no larger count as zeros: the steps of others are finite."""


class QuantizedWeights(NamedTuple):
    """Weights of one projection in all layers; a weight is its integer times the scale of its output.

    Attributes:
        values: int8 in -127 to 127: [L, O, I], or in tiles for the native kernel [L, O / 16, I / 64, 1024]: fours of
            inputs, then outputs, then the four of a group. Axes 1 and 2 may be sharded as O and I are.
        scales: [L, O] float32; sharded as O is.
    """

    values: Any
    scales: Any


def unsupported(shape: tuple[int, ...], *, shards: int = 1, platform: str | None = None) -> str | None:
    """Why the native kernel cannot multiply int8 weights here, so that XLA does; None when it can.

    Args:
        shape: [L, O, I] of all shards together.
        shards: how many parts the weights are cut into, along either axis.
        platform: by default that of the first device.
    """
    platform = platform or jax.local_devices()[0].platform
    if platform != "cpu":
        return f"there is no kernel for int8 weights on {platform}"
    out, inputs = shape[-2:]
    if out % (TILE_OUTPUTS * shards) or inputs % (TILE_INPUTS * shards):
        return f"{out} outputs and {inputs} inputs over {shards} shards are not whole tiles of 16 and 64"
    return native.int8_unit_unavailable()


def quantize(weight_LOI: jax.Array, *, tiled: bool) -> QuantizedWeights:
    """Weights rounded to the nearest of 255 steps of their output, which reach its largest weight on both sides.

    Args:
        weight_LOI: [L, O, I] floating point.
        tiled: in the order of the native kernel, for which `unsupported` is None.

    Raises:
        ValueError: more inputs than sums of 32 bits can take.
    """
    layers, out, inputs = weight_LOI.shape
    if inputs > MAX_INPUTS:
        raise ValueError(
            f"a projection of {inputs} inputs cannot have int8 weights, since sums of 32 bits hold {MAX_INPUTS}: use "
            "--quantization none"
        )
    weight = weight_LOI.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weight), axis=-1)
    scales = largest * np.float32(1 / 127)
    steps = jnp.where(largest > _LEAST, 127 / largest, 0)
    values = jnp.round(weight * steps[..., None]).astype(jnp.int8)
    if tiled:
        cut = values.reshape(layers, out // TILE_OUTPUTS, TILE_OUTPUTS, inputs // TILE_INPUTS, TILE_INPUTS // 4, 4)
        tiles = cut.transpose(0, 1, 3, 4, 2, 5)
        values = tiles.reshape(*tiles.shape[:3], TILE_OUTPUTS * TILE_INPUTS)
    return QuantizedWeights(values, scales)


def largest_magnitude(x: jax.Array) -> jax.Array:
    """What a row's integers are scaled by: [...] float32 of x [..., I]."""
    return jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32)


def int8_products(
    x: jax.Array,
    weights: Sequence[QuantizedWeights],
    layer: jax.Array,
    *,
    largest: jax.Array | None = None,
    used: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """x times weights that share it; by the native kernel those in its tiles, by XLA others, with the same bits.

    Args:
        x: [..., I] bfloat16 or float32.
        weights: as `quantize` leaves them.
        layer: [] int32.
        largest: [...] float32, the magnitude that a row's integers are scaled by, where x is a part of the row; that of
            x by default.
        used: [] int32, how many of the rows anybody reads the results of; None for all.

    Returns:
        [..., O] float32 for each.
    """
    rows = x.reshape(-1, x.shape[-1])
    largest_T = None if largest is None else largest.reshape(-1)
    tiled = [w for w in weights if w.values.ndim == 4]
    found = iter(native.int8_products(rows, tiled, layer, largest_T=largest_T, used=used) if tiled else ())
    plain = iter(xla_products(rows, [w for w in weights if w.values.ndim == 3], layer, largest_T=largest_T))
    results = (next(found) if w.values.ndim == 4 else next(plain) for w in weights)
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in results)


def xla_products(
    x_TI: jax.Array, weights: Sequence[QuantizedWeights], layer: jax.Array, *, largest_T: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """The reference: as `int8_products`, of weights [L, O, I] and rows [T, I]."""
    if not weights:
        return ()
    digits_CTI, scale_T = _digits(x_TI, largest_magnitude(x_TI) if largest_T is None else largest_T)
    results = []
    for values_LOI, scales_LO in weights:
        sums_CTO = jnp.einsum("CTI,OI->CTO", digits_CTI, values_LOI[layer], preferred_element_type=jnp.int32)
        high, low = sums_CTO.astype(jnp.float32)
        results.append((high * 256 + low) * scale_T[:, None] * scales_LO[layer])
    return tuple(results)


def _digits(x_TI: jax.Array, largest_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """High and low digits [2, T, I] int8 of rows as integers, and what a unit of each row is worth, [T] float32."""
    steps_T = jnp.where(largest_T > _LEAST, _MOST / largest_T, 0)
    whole = jnp.round(x_TI.astype(jnp.float32) * steps_T[:, None]).astype(jnp.int32)
    high = (whole + 128) >> 8
    return jnp.stack([high, whole - 256 * high]).astype(jnp.int8), largest_T * _UNIT
