"""Writes models of the pack as GGUF files, as llama.cpp's converter would."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from plora_jax.checkpoints import load_hf
from plora_jax.config import ModelConfig

MODELS = pathlib.Path(__file__).parents[1] / "data" / "conformance" / "models"
ARCHITECTURES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "llama_tied": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "llama31_rope": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "mixtral": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "qwen2_bias": (gguf.MODEL_ARCH.QWEN2, "qwen2"),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, "qwen3"),
    "gemma2": (gguf.MODEL_ARCH.GEMMA2, "gemma2"),
}


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does for the llama architecture."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def converted(name: str, config: ModelConfig) -> dict[str, np.ndarray]:
    """Tensors of a pack model under the names that the gguf package gives them."""
    architecture, label = ARCHITECTURES[name]
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    stored = load_file(MODELS / name / "model.safetensors")
    tensors: dict[str, np.ndarray] = {}
    for layer in range(config.num_layers if config.num_experts else 0):
        for letter in ("w1", "w2", "w3"):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts."
            pieces = [stored.pop(f"{prefix}{e}.{letter}.weight") for e in range(config.num_experts)]
            stored[f"layers.{layer}.feed_forward.experts.{letter}.weight"] = np.stack(pieces)
    for hf_name, value in stored.items():
        if label == "llama" and hf_name.endswith("q_proj.weight"):
            value = permute(value, config.num_heads)
        if label == "llama" and hf_name.endswith("k_proj.weight"):
            value = permute(value, config.num_kv_heads)
        if label == "gemma2" and hf_name.endswith("norm.weight"):
            value = value + 1
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        tensors[gguf_name] = value
    return tensors


def write(
    path: pathlib.Path,
    name: str,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    kinds: Mapping[str, str] = MappingProxyType({}),
    **extra: Any,
) -> ModelConfig:
    """Writes a pack model as GGUF; returns its configuration as Hugging Face has it.

    Args:
        path: the file.
        name: of the model.
        tensors: instead of its own.
        kinds: types that tensors are quantised to.
        **extra: further metadata.
    """
    config, _ = load_hf(MODELS / name)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[name][1])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.experts_per_token)
    if name == "gemma2":
        writer.add_sliding_window(8)
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    for key, value in extra.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor_name, value in (tensors or converted(name, config)).items():
        kind = gguf.GGMLQuantizationType[kinds[tensor_name]] if tensor_name in kinds else None
        writer.add_tensor(tensor_name, value if kind is None else gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config
