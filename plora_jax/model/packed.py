"""Base weights in the form that serves fastest on the platform at hand, or quantised where the operator asks for it.

Projections that a packing kernel can multiply are kept in its order (`strategies.products`, `strategies.quantized`,
`strategies.block_weights`); other 16-bit weights of layers are kept as raw bits. Training and conversion use the tree
as it was loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memory_pool.link import TENSOR_AXIS, device_sharding
from plora_jax.checkpoints.weights import KeepBlocks
from plora_jax.config import ModelConfig
from plora_jax.model.decoder import PACKED_HEAD, Params, stack_as_raw
from plora_jax.parallel import ROW_PARALLEL, TensorParallel
from strategies import block_weights, products, quantized
from strategies.block_weights import BLOCK_INPUTS, BlockWeights
from strategies.products import PackedWeights
from strategies.quantized import QuantizedWeights

WEIGHT_BYTES: Mapping[str, float | None] = {
    "none": None,
    "int8": 1.0,
    "gguf": block_weights.BLOCK_BYTES / BLOCK_INPUTS,
}
"""Bytes of a projection's weight by quantization; None for those of its dtype."""

QUANTIZATIONS = tuple(WEIGHT_BYTES)


def quantization_problem(config: ModelConfig, quantization: str) -> str | None:
    """Why a model cannot be served with its weights quantised so; None when it can."""
    if quantization != "none" and config.num_experts:
        return (
            f"--quantization {quantization} does not cover routed experts, and {config.architecture} has "
            f"{config.num_experts} a layer: use --quantization none"
        )
    return None


def keeps_blocks(parallel: TensorParallel, quantization: str) -> KeepBlocks | None:
    """What `load_model` is asked to leave in the blocks of the file: all projections, with gguf.

    Its ValueError says which the shards cannot share.
    """
    if quantization != "gguf":
        return None
    names = {f"layers.{name}": name for name in projections_of(parallel.config)}

    def keep(path: str, shape: tuple[int, ...]) -> bool:
        if names.get(path) in ROW_PARALLEL and shape[-1] % (BLOCK_INPUTS * parallel.num_shards):
            raise ValueError(
                f"--quantization gguf cannot share {shape[-1] // BLOCK_INPUTS} blocks of inputs of {names[path]} among "
                f"--tensor_parallel_size {parallel.num_shards}: lower that, or use --quantization int8"
            )
        return path in names

    return keep


def pack_params(params: Params, parallel: TensorParallel, *, quantization: str = "none") -> dict[str, Any]:
    """A tree that `Decoder` serves with.

    Args:
        params: placed for the shards; layers' weights are dropped one by one as their packed form is made.
        parallel: the model over its shards.
        quantization: of QUANTIZATIONS, one for which `quantization_problem` is None.

    Returns:
        The same tree with PackedWeights in place of projections in the layers, and of the head where it is not the
        embedding, under PACKED_HEAD: whatever has the sizes and the type for it. With int8 all of these are
        QuantizedWeights, and with gguf those that came without the blocks of a file, which are BlockWeights;
        embeddings, norms and biases stay in the dtype they have.
    """
    pack = {"none": _pack, "int8": _quantize, "gguf": _keep}[quantization]
    layers = dict(params["layers"])
    for name in projections_of(parallel.config):
        packed = pack(layers[name], parallel)
        if packed is not None:
            layers[name] = packed
    tree = {**stack_as_raw({**params, "layers": layers})}
    head = tree["head"] if "head" in tree else tree["embedding"]
    packed = pack(head[None], parallel)
    if packed is not None:
        tree[PACKED_HEAD] = packed
        tree.pop("head", None)
    return tree


def packed_specs(params: Params, parallel: TensorParallel) -> dict[str, Any]:
    """How the tree of `pack_params` lies over the mesh, as in_specs of a shard_map."""
    specs = parallel.param_specs()
    if PACKED_HEAD in params:
        specs.pop("head", None)
        specs[PACKED_HEAD] = _spec_of(params[PACKED_HEAD], _head_spec(parallel))
    layers = params["layers"]
    specs["layers"] = {name: _spec_of(layers[name], spec) for name, spec in specs["layers"].items()}
    return specs


def packed_shapes(params: Params, parallel: TensorParallel, *, quantization: str = "none") -> dict[str, Any]:
    """Shapes, dtypes and shardings of what `pack_params` returns.

    Args:
        params: those of its argument (`TensorParallel.placed_shapes`).
        parallel, quantization: as `pack_params` takes them.
    """
    mesh = params["embedding"].sharding.mesh
    shapes = jax.eval_shape(functools.partial(pack_params, parallel=parallel, quantization=quantization), params)

    def placed(spec: PartitionSpec, weight: Any) -> Any:
        sharding = device_sharding(mesh, spec)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), weight)

    specs = packed_specs(shapes, parallel)
    return jax.tree.map(placed, specs, shapes, is_leaf=lambda node: isinstance(node, PartitionSpec))


def projections_of(config: ModelConfig) -> list[str]:
    """Names of the layers' weights that are multiplied by rows: all projections but experts."""
    return [name for name in config.projections if f"layers.{name}" in config.param_shapes()]


def _head_spec(parallel: TensorParallel) -> PartitionSpec:
    return PartitionSpec(None, TENSOR_AXIS) if parallel.vocabulary_sharded else PartitionSpec()


def _spec_of(weight: Any, spec: PartitionSpec) -> Any:
    """The spec of each array of a weight [L, O, I] that lies by `spec`."""
    if not isinstance(weight, QuantizedWeights):
        return spec
    return QuantizedWeights(spec, PartitionSpec(*spec[:2]))


def _pack(weight: jax.Array, parallel: TensorParallel) -> PackedWeights | None:
    if products.unsupported(weight.shape, weight.dtype, shards=parallel.num_shards) is not None:
        return None
    lies = _lies(weight)
    return jax.jit(products.pack, out_shardings=lies if isinstance(lies, NamedSharding) else None)(weight)


def _keep(weight: jax.Array, parallel: TensorParallel) -> BlockWeights | QuantizedWeights:
    if weight.dtype != np.uint8:
        return _quantize(weight, parallel)
    tiled = block_weights.unsupported(weight.shape, shards=parallel.num_shards) is None
    sharding = weight.sharding if isinstance(weight.sharding, NamedSharding) else None
    return jax.jit(functools.partial(block_weights.pack, tiled=tiled), out_shardings=sharding)(weight)


def _quantize(weight: jax.Array, parallel: TensorParallel) -> QuantizedWeights:
    tiled = quantized.unsupported(weight.shape, shards=parallel.num_shards) is None
    lies, shardings = _lies(weight), None
    if isinstance(lies, NamedSharding) and isinstance(lies.mesh, Mesh):
        specs = _spec_of(QuantizedWeights(None, None), lies.spec)
        shardings = QuantizedWeights(*(device_sharding(lies.mesh, own) for own in specs))
    return jax.jit(functools.partial(quantized.quantize, tiled=tiled), out_shardings=shardings)(weight)


def _lies(weight: jax.Array) -> Any:
    """The sharding of an array; None of one that is being traced."""
    return getattr(weight, "sharding", None)
