"""Weights in and out: Hugging Face directories, GGUF files and Orbax checkpoints become one parameter tree."""

from plora_jax.checkpoints.hf import load_hf, load_hf_config
from plora_jax.checkpoints.hf_config import read_hf_config
from plora_jax.checkpoints.weights import WeightsError

__all__ = ["WeightsError", "load_hf", "load_hf_config", "read_hf_config"]
