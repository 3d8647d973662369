"""Products of rows with base weights, which may be kept in the order that a kernel reads them in.

XLA's product (`plora_jax.model.layers.matmul`) takes weights as they are and is the reference. On a CPU with a matrix
unit the native kernel reads packed weights at the speed of memory, of all layers in one array: XLA would first copy a
layer's part out of it. The default model, 32 rows, two cores that read 28 GB/s: all layers take 10 ms. int8 weights
(`strategies.quantized`) and those of 4 bits (`strategies.block_weights`) have products of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from memory_pool.raw import to_raw
from strategies import native
from strategies.block_weights import BlockWeights, block_products
from strategies.quantized import QuantizedWeights, int8_products

TILE_OUTPUTS, TILE_INPUTS = 16, 32


class PackedWeights(NamedTuple):
    """bfloat16 weights of one projection in all layers.

    Attributes:
        tiles: [L, O / 16, I / 32, 512] uint16, raw bfloat16. A tile has 16 outputs and 32 inputs: pairs of inputs, then
            outputs, then the two of a pair. Axes 1 and 2 may be sharded as O and I are.
    """

    tiles: Any


Weights = PackedWeights | QuantizedWeights | BlockWeights
"""What `products` takes."""


def is_packed(weight: Any) -> TypeGuard[Weights]:
    """Whether `products` takes it; others are plain arrays."""
    return isinstance(weight, Weights)


def unsupported(shape: tuple[int, ...], dtype: Any, *, shards: int = 1, platform: str | None = None) -> str | None:
    """Why weights cannot be packed here; None when they can.

    Args:
        shape: [L, O, I] of all shards together.
        dtype: of weights and rows.
        shards: how many parts the weights are cut into, along either axis.
        platform: by default that of the first device.
    """
    platform = platform or jax.local_devices()[0].platform
    if platform != "cpu":
        return f"there is no kernel for packed weights on {platform}"
    if np.dtype(dtype) != jnp.bfloat16:
        return f"the matrix unit multiplies bfloat16, not {np.dtype(dtype)}"
    out, inputs = shape[-2:]
    if out % (TILE_OUTPUTS * shards) or inputs % (TILE_INPUTS * shards):
        return f"{out} outputs and {inputs} inputs over {shards} shards are not whole tiles of 16 and 32"
    return native.matrix_unit_unavailable()


def pack(weight_LOI: jax.Array) -> PackedWeights:
    """Weights in the order of the kernel.

    Args:
        weight_LOI: [L, O, I] bfloat16, for which `unsupported` is None.
    """
    layers, out, inputs = weight_LOI.shape
    cut = to_raw(weight_LOI).reshape(
        layers, out // TILE_OUTPUTS, TILE_OUTPUTS, inputs // TILE_INPUTS, TILE_INPUTS // 2, 2
    )
    tiles = cut.transpose(0, 1, 3, 4, 2, 5)
    return PackedWeights(tiles.reshape(*tiles.shape[:3], TILE_OUTPUTS * TILE_INPUTS))


def products(
    x: jax.Array,
    weights: Sequence[Weights],
    layer: jax.Array,
    *,
    largest: jax.Array | None = None,
    used: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """x times weights that share it, summed in float32 and left there.

    Args:
        x: [..., I], bfloat16 where weights are.
        weights: of any kinds.
        layer: [] int32.
        largest, used: as `int8_products`.

    Returns:
        [..., O] float32 for each.
    """
    by_kind: dict[type[Weights], list[Any]] = {}
    for weight in weights:
        by_kind.setdefault(type(weight), []).append(weight)

    def multiply(kind: type[Weights], own: list[Any]) -> Iterator[jax.Array]:
        if kind is QuantizedWeights:
            return iter(int8_products(x, own, layer, largest=largest, used=used))
        if kind is BlockWeights:
            return iter(block_products(x, own, layer, used=used))
        found = native.products(x.reshape(-1, x.shape[-1]), [w.tiles for w in own], layer, used=used)
        return (y.reshape(*x.shape[:-1], y.shape[-1]) for y in found)

    found = {kind: multiply(kind, own) for kind, own in by_kind.items()}
    return tuple(next(found[type(weight)]) for weight in weights)
