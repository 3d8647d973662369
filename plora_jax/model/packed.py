"""Base weights in the form that serves fastest on the platform at hand.

Projections that a packing kernel can multiply are kept in its order (`strategies.products`); other 16-bit weights of
layers are kept as raw bits. Training and conversion use the tree as it was loaded.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from memory_pool.link import TENSOR_AXIS
from plora_jax.config import ModelConfig
from plora_jax.model.decoder import PACKED_HEAD, Params, stack_as_raw
from plora_jax.parallel import TensorParallel
from strategies.products import pack, unsupported


def pack_params(params: Params, parallel: TensorParallel) -> dict[str, Any]:
    """A tree that `Decoder` serves with.

    Args:
        params: placed for the shards; layers' weights are dropped one by one as their packed form is made.
        parallel: the model over its shards.

    Returns:
        The same tree with PackedWeights in place of projections in the layers, and of the head where it is not the
        embedding, under PACKED_HEAD: whatever has the sizes and the type for it.
    """
    layers = dict(params["layers"])
    for name in projections_of(parallel.config):
        if unsupported(layers[name].shape, layers[name].dtype, shards=parallel.num_shards) is None:
            layers[name] = _pack(layers[name])
    packed = {**stack_as_raw({**params, "layers": layers})}
    head = packed["head"] if "head" in packed else packed["embedding"]
    if unsupported((1, *head.shape), head.dtype, shards=parallel.num_shards) is None:
        packed[PACKED_HEAD] = _pack(head[None])
        packed.pop("head", None)
    return packed


def packed_specs(params: Params, parallel: TensorParallel) -> dict[str, Any]:
    """How the tree of `pack_params` lies over the mesh, as in_specs of a shard_map."""
    specs = parallel.param_specs()
    if PACKED_HEAD in params:
        specs.pop("head", None)
        specs[PACKED_HEAD] = PartitionSpec(None, TENSOR_AXIS) if parallel.vocabulary_sharded else PartitionSpec()
    return specs


def projections_of(config: ModelConfig) -> list[str]:
    """Names of the layers' weights that are multiplied by rows: all projections but experts."""
    return [name for name in config.projections if f"layers.{name}" in config.param_shapes()]


def _pack(weight: jax.Array) -> Any:
    sharding = weight.sharding
    if isinstance(sharding, NamedSharding):
        return jax.jit(pack, out_shardings=sharding)(weight)
    return jax.jit(pack)(weight)
