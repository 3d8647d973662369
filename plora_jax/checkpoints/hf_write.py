"""To a Hugging Face directory that transformers reads: config.json in its form 5, safetensors under its names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from plora_jax.checkpoints.hf import INDEX_FILE, SINGLE_FILE
from plora_jax.checkpoints.names import hf_names
from plora_jax.checkpoints.weights import check_tree, flatten
from plora_jax.config import ModelConfig, RopeConfig

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_MAX_FILE_BYTES = 5 * 10**9


def save_hf(
    path: str | Path, config: ModelConfig, params: Mapping[str, Any], *, max_file_bytes: int = _MAX_FILE_BYTES
) -> None:
    """Writes config.json and safetensors, sharded with an index where they are larger than one file may be.

    Args:
        path: directory; files of the same names are overwritten.
        config: of the model; its dtype becomes that of the parameters.
        params: nested parameter tree.
        max_file_bytes: of one file.

    Raises:
        WeightsError: params do not fit config.

    Cost:
        Holds one file's tensors in host memory at a time.
    """
    directory, flat = Path(path), flatten(params)
    check_tree(config, {name: tuple(a.shape) for name, a in flat.items()}, source="the parameter tree")
    directory.mkdir(parents=True, exist_ok=True)
    fields = write_hf_config(config) | {"dtype": str(flat["embedding"].dtype)}
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    names = hf_names(config)
    files = _plan({name: _nbytes(flat[part.path], part.at) for name, part in names.items()}, max_file_bytes)
    for number, chosen in enumerate(files, start=1):
        tensors = {}
        for name in chosen:
            part = names[name]
            tensors[name] = np.ascontiguousarray(np.asarray(flat[part.path][part.at]))
        file = SINGLE_FILE if len(files) == 1 else _file_name(number, len(files))
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {name: _file_name(i, len(files)) for i, chosen in enumerate(files, start=1) for name in chosen}
        index = {"metadata": {"total_size": sum(a.nbytes for a in flat.values())}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json in the form of transformers 5; `read_hf_config` gives an equal ModelConfig back."""
    c = config
    gemma = c.architecture in ("gemma2", "gemma3_text")
    activation = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[c.activation]
    fields: dict[str, Any] = {
        "architectures": [_CLASSES[c.architecture]],
        "model_type": c.architecture,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.norm_eps,
        "hidden_activation" if gemma else "hidden_act": activation,
        "tie_word_embeddings": c.tie_word_embeddings,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_ids[0] if len(c.eos_token_ids) == 1 else list(c.eos_token_ids) or None,
        "rope_parameters": _rope(c.rope),
        "dtype": c.dtype,
    }
    if c.rope_local is not None:
        fields["rope_parameters"] = {"full_attention": _rope(c.rope), "sliding_attention": _rope(c.rope_local)}
    if gemma:
        fields |= {
            "query_pre_attn_scalar": _whole(c.query_scale**-2),
            "final_logit_softcapping": c.final_soft_cap,
            "attn_logit_softcapping": c.attention_soft_cap,
        }
    if c.architecture == "qwen3_moe":
        fields |= {"moe_intermediate_size": c.intermediate_size, "norm_topk_prob": c.norm_topk_prob}
    if c.num_experts:
        fields |= {"num_local_experts": c.num_experts, "num_experts_per_tok": c.experts_per_token}
    return fields | _windows(c)


def _windows(c: ModelConfig) -> dict[str, Any]:
    window = next((w for w in c.layer_windows if w is not None), None)
    if c.architecture == "llama":
        return {}
    fields: dict[str, Any] = {"sliding_window": window}
    if c.architecture in ("qwen2", "qwen3", "qwen3_moe"):
        fields["use_sliding_window"] = window is not None
    if c.architecture in ("qwen2", "qwen3", "gemma2", "gemma3_text"):
        fields["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in c.layer_windows]
    return fields


def _rope(rope: RopeConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind != "default":
        fields["factor"] = rope.factor
    if rope.kind == "llama3":
        fields |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    return fields


def _whole(value: float) -> int | float:
    """The whole number that a square root and a square have blurred."""
    return round(value) if abs(value - round(value)) < 1e-6 * value else value


def _plan(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names by file, in order, none above the limit unless it holds one tensor only."""
    files: list[list[str]] = [[]]
    used = 0
    for name, nbytes in sizes.items():
        if files[-1] and used + nbytes > limit:
            files.append([])
            used = 0
        files[-1].append(name)
        used += nbytes
    return files


def _nbytes(array: Any, index: tuple[int, ...]) -> int:
    return int(np.prod(array.shape[len(index) :])) * array.dtype.itemsize


def _file_name(number: int, total: int) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"
