"""From GGUF metadata to a ModelConfig, for the architectures whose conversion is known exactly.

Source: llama.cpp, conversion of the models and llama-model.cpp for what the metadata leaves to the reader (the
Gemma 3 pattern and local theta, the query scale of the 27B models).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from plora_jax.config import ConfigError, ModelConfig, RopeConfig
from plora_jax.model.rope import inverse_frequencies

_SUPPORTED = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
_WINDOW_PATTERN = {"gemma2": 2, "gemma3": 6}
# (architecture, layers) of models whose query scale is that of hidden_size / num_heads, not of head_dim.
_WIDE_QUERY_SCALE = (("gemma2", 46), ("gemma3", 62))
_KNOWN = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "vocab_size",
        "expert_count",
        "expert_used_count",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    }
)
"""Keys that are used, or that repeat what others say; another key of the architecture is refused."""


def read_gguf_config(
    metadata: Mapping[str, Any], *, vocab_size: int, tied: bool, dtype: str, rope_factors: np.ndarray | None = None
) -> ModelConfig:
    """The model that GGUF metadata describes.

    Args:
        metadata: key to value, as Python values.
        vocab_size: rows of the embedding tensor.
        tied: there is no tensor of a head.
        dtype: ModelConfig.dtype.
        rope_factors: the tensor rope_freqs.weight [H / 2], where the file has one.

    Raises:
        ConfigError: an architecture, key or value that cannot be served exactly, by name.
    """
    name = metadata.get("general.architecture")
    if name not in _SUPPORTED:
        raise ConfigError(
            f"general.architecture = {name!r} is not supported in GGUF; supported: {', '.join(_SUPPORTED)}"
        )
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    _refuse_unknown(name, own)
    hidden, num_heads, num_layers = (
        _integer(name, own, key) for key in ("embedding_length", "attention.head_count", "block_count")
    )
    head_dim = _integer(name, own, "attention.key_length", default=hidden // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise ConfigError(f"{name}.{key} = {own[key]} is not supported; the heads have {head_dim} dimensions")
    gemma, num_experts = name.startswith("gemma"), int(own.get("expert_count", 0))
    windows = _windows(name, own, num_layers)
    architecture = {"gemma3": "gemma3_text", "llama": "mixtral" if num_experts else "llama"}.get(name, name)
    wide = (name, num_layers) in _WIDE_QUERY_SCALE
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_integer(name, own, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(name, own, "attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        max_position=_integer(name, own, "context_length"),
        norm_eps=_norm_eps(name, own),
        rope=_rope(name, own, head_dim=head_dim, factors=rope_factors),
        rope_local=RopeConfig(theta=1e4) if name == "gemma3" else None,
        query_scale=float(hidden / num_heads if wide else head_dim) ** -0.5,
        layer_windows=windows,
        activation="gelu_tanh" if gemma else "silu",
        tie_word_embeddings=tied,
        qkv_bias=name == "qwen2",
        qk_norm=name in ("qwen3", "gemma3"),
        norm_offset=gemma,
        post_norms=gemma,
        embed_scale=math.sqrt(hidden) if gemma else 1.0,
        attention_soft_cap=_cap(own, "attn_logit_softcapping", 50.0) if name == "gemma2" else None,
        final_soft_cap=_cap(own, "final_logit_softcapping", 30.0) if name == "gemma2" else None,
        num_experts=num_experts,
        experts_per_token=int(own.get("expert_used_count", 0)),
        norm_topk_prob=bool(num_experts),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos(metadata),
        dtype=dtype,
    )


def _refuse_unknown(name: str, own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        dense_only = name != "llama" and key.startswith("expert_") and value
        window = not name.startswith("gemma") and key == "attention.sliding_window"
        caps = name != "gemma2" and key.endswith("softcapping")
        if key not in _KNOWN or dense_only or window or caps:
            raise ConfigError(
                f"{name}.{key} = {str(value)[:80]} is not supported in GGUF and may change what the model computes"
            )


def _integer(name: str, own: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = own.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}.{key} = {value!r} in the GGUF metadata; it must be one whole number of 1 or more")
    return value


def _decimal(value: float) -> float:
    """The number that was written as float32: 9.99e-06 becomes 1e-05 again."""
    return float(str(np.float32(value)))


def _norm_eps(name: str, own: Mapping[str, Any]) -> float:
    key = "attention.layer_norm_rms_epsilon"
    if key not in own:
        raise ConfigError(f"{name}.{key} is not in the GGUF metadata")
    return _decimal(own[key])


def _cap(own: Mapping[str, Any], key: str, default: float) -> float:
    return _decimal(own.get(key, default))


def _eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _windows(name: str, own: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    if name not in _WINDOW_PATTERN:
        return (None,) * num_layers
    window = _integer(name, own, "attention.sliding_window")
    return tuple(window if (i + 1) % _WINDOW_PATTERN[name] else None for i in range(num_layers))


def _rope(name: str, own: Mapping[str, Any], *, head_dim: int, factors: np.ndarray | None) -> RopeConfig:
    theta = _decimal(own.get("rope.freq_base", 1e6 if name == "gemma3" else 1e4))
    kind = own.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ConfigError(f"{name}.rope.scaling.type = {kind!r} is not supported in GGUF; supported: none, linear")
    if factors is not None:
        return _llama3(theta, head_dim, factors, original=int(own.get("rope.scaling.original_context_length", 8192)))
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=_decimal(own.get("rope.scaling.factor", 1.0)))
    return RopeConfig(theta=theta)


def _llama3(theta: float, head_dim: int, factors: np.ndarray, *, original: int) -> RopeConfig:
    """The Llama 3.1 scaling whose frequencies the file lists, as divisors of the plain ones."""
    rope = RopeConfig(theta=theta, kind="llama3", factor=_decimal(factors.max()), original_max_position=original)
    plain = inverse_frequencies(RopeConfig(theta=theta), head_dim)
    if factors.shape != plain.shape or not np.allclose(plain / factors, inverse_frequencies(rope, head_dim), rtol=1e-4):
        raise ConfigError(
            "rope_freqs.weight is not supported: its factors are not those of Llama 3.1 (low_freq_factor 1, "
            f"high_freq_factor 4, original context {original})"
        )
    return rope
