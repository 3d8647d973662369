"""Base weights of 4 bits in blocks of 32 inputs, as GGUF files keep them (`--quantization gguf`), and their products.

    weights = pack(blocks_LOBC, tiled=unsupported(...) is None)     # once
    q, k, v = block_products(x, [weights_q, weights_k, weights_v], layer)

A weight is `scale * w + least` with w in 0 to 15 and both numbers its block's own. Nothing is rounded that the file had
not rounded, and steps read 5 bits a weight. Rows are rounded to 8-bit integers by blocks of 32 as well, as llama.cpp
does; a block of a row knows nothing of the rest, so a token's result does not depend on its company.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from strategies import native

BLOCK_INPUTS, BLOCK_BYTES = 32, 20
"""A block as a file of type Q4_1 has it: scale and least value in float16, then 16 bytes, inputs 0 to 15 in their low
halves and 16 to 31 in the high ones."""

TILE_OUTPUTS = 16

_LEAST = np.float32(1e-30)
"""Blocks of rows whose largest magnitude is smaller count as zeros: the steps of others are finite."""


class BlockWeights(NamedTuple):
    """Weights of one projection in all layers.

    Attributes:
        blocks: uint8 [L, O, I / 32, 20], or in tiles for the native kernel [L, O / 16, I / 32, 320]: halves by fours of
            inputs, then outputs, then the four; then 16 scales and 16 least values. Axes 1 and 2 may be sharded as O
            and I are.
    """

    blocks: Any

    @property
    def tiled(self) -> bool:
        """Whether they are in the order of the native kernel."""
        return self.blocks.shape[-1] != BLOCK_BYTES


def unsupported(shape: tuple[int, ...], *, shards: int = 1, platform: str | None = None) -> str | None:
    """Why the native kernel cannot multiply such weights here, so that XLA does; None when it can.

    Args:
        shape: [L, O, I / 32, 20] of all shards together.
        shards: how many parts the weights are cut into, along either axis.
        platform: by default that of the first device.
    """
    platform = platform or jax.local_devices()[0].platform
    if platform != "cpu":
        return f"there is no kernel for weights of 4 bits on {platform}"
    if shape[1] % (TILE_OUTPUTS * shards):
        return f"{shape[1]} outputs over {shards} shards are not whole tiles of 16"
    return native.block_unit_unavailable()


def pack(blocks_LOBC: jax.Array, *, tiled: bool) -> BlockWeights:
    """Weights as `block_products` takes them.

    Args:
        blocks_LOBC: uint8 [L, O, I / 32, 20].
        tiled: in the order of the native kernel, for which `unsupported` is None.
    """
    if not tiled:
        return BlockWeights(blocks_LOBC)
    layers, out, count, _ = blocks_LOBC.shape
    cut = blocks_LOBC.reshape(layers, out // TILE_OUTPUTS, TILE_OUTPUTS, count, BLOCK_BYTES)
    numbers, halves = cut[..., :4].reshape(*cut.shape[:-1], 2, 2), cut[..., 4:].reshape(*cut.shape[:-1], 4, 4)
    by_tile = (*cut.shape[:2], count, -1)
    fours = halves.transpose(0, 1, 3, 4, 2, 5).reshape(by_tile)
    scales_and_least = numbers.transpose(0, 1, 3, 4, 2, 5).reshape(by_tile)
    return BlockWeights(jnp.concatenate([fours, scales_and_least], axis=-1))


def block_products(
    x: jax.Array, weights: Sequence[BlockWeights], layer: jax.Array, *, used: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """x times weights that share it; by the native kernel those in its tiles, by XLA others.

    Args:
        x: [..., I] bfloat16 or float32.
        weights: as `pack` leaves them.
        layer: [] int32.
        used: [] int32, how many of the rows anybody reads the results of; None for all.

    Returns:
        [..., O] float32 for each.
    """
    rows = x.reshape(-1, x.shape[-1])
    tiles = [w.blocks for w in weights if w.tiled]
    found = iter(native.block_products(rows, tiles, layer, used=used) if tiles else ())
    plain = iter(xla_products(rows, [w for w in weights if not w.tiled], layer))
    results = (next(found) if w.tiled else next(plain) for w in weights)
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in results)


def xla_products(x_TI: jax.Array, weights: Sequence[BlockWeights], layer: jax.Array) -> tuple[jax.Array, ...]:
    """The reference: as `block_products`, of weights [L, O, I / 32, 20] and rows [T, I]."""
    if not weights:
        return ()
    rounded_TI = _rounded(x_TI.astype(jnp.float32))
    return tuple(
        jnp.einsum("TI,OI->TO", rounded_TI, dequantize(w.blocks[layer]), precision=lax.Precision.HIGHEST)
        for w in weights
    )


def dequantize(blocks: jax.Array) -> jax.Array:
    """Weights [..., I] float32 of blocks [..., I / 32, 20]."""
    numbers = lax.bitcast_convert_type(blocks[..., :4].reshape(*blocks.shape[:-1], 2, 2), jnp.float16)
    scale, least = numbers[..., :1].astype(jnp.float32), numbers[..., 1:].astype(jnp.float32)
    halves = blocks[..., 4:]
    values = jnp.concatenate([halves & 15, halves >> 4], axis=-1).astype(jnp.float32)
    return (values * scale + least).reshape(*blocks.shape[:-2], -1)


def _rounded(x_TI: jax.Array) -> jax.Array:
    """Rows rounded to 255 steps of each block, which reach its largest magnitude on both sides."""
    x_TBI = x_TI.reshape(x_TI.shape[0], -1, BLOCK_INPUTS)
    largest = jnp.max(jnp.abs(x_TBI), axis=-1, keepdims=True)
    steps = jnp.where(largest < _LEAST, 0, 127 / largest)
    return (jnp.round(x_TBI * steps) * (largest * np.float32(1 / 127))).reshape(x_TI.shape)
