"""Weights in and out: Hugging Face directories, GGUF files and Orbax checkpoints become one parameter tree.

model = load_model("default", dtype="bfloat16")
model.config, model.params
"""

from plora_jax.checkpoints.gguf import default_model_path, load_gguf
from plora_jax.checkpoints.hf import load_hf, load_hf_config
from plora_jax.checkpoints.hf_config import read_hf_config
from plora_jax.checkpoints.hf_write import save_hf, write_hf_config
from plora_jax.checkpoints.load import DEFAULT_MODEL, LoadedModel, find_model, load_config, load_model
from plora_jax.checkpoints.orbax import load_orbax, load_orbax_config, save_orbax
from plora_jax.checkpoints.weights import (
    KeepBlocks,
    Params,
    Progress,
    ShardingOf,
    WeightsError,
    numpy_dtype,
    one_device_sharding,
    resolve_dtype,
)

__all__ = [
    "DEFAULT_MODEL",
    "KeepBlocks",
    "LoadedModel",
    "Params",
    "Progress",
    "ShardingOf",
    "WeightsError",
    "default_model_path",
    "find_model",
    "load_config",
    "load_gguf",
    "load_hf",
    "load_hf_config",
    "load_model",
    "load_orbax",
    "load_orbax_config",
    "numpy_dtype",
    "one_device_sharding",
    "read_hf_config",
    "resolve_dtype",
    "save_hf",
    "save_orbax",
    "write_hf_config",
]
