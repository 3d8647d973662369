"""The base model: Flax modules, and pure functions over a stacked parameter tree."""

from plora_jax.model.decoder import Decoder, Params, stack_as_raw
from plora_jax.model.dense import LoraWeights, forward_full
from plora_jax.model.layers import Context, LayerConstants
from plora_jax.model.packed import (
    QUANTIZATIONS,
    WEIGHT_BYTES,
    keeps_blocks,
    pack_params,
    packed_shapes,
    packed_specs,
    quantization_problem,
)

__all__ = [
    "QUANTIZATIONS",
    "WEIGHT_BYTES",
    "Context",
    "Decoder",
    "LayerConstants",
    "LoraWeights",
    "Params",
    "forward_full",
    "keeps_blocks",
    "pack_params",
    "packed_shapes",
    "packed_specs",
    "quantization_problem",
    "stack_as_raw",
]
