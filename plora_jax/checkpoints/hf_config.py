"""From a Hugging Face config.json, in the form of transformers 4 or 5, to a ModelConfig.

A field that changes the maths is read, or refused with its name and value; none is dropped silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from plora_jax.checkpoints.hf_fields import HARMLESS, HARMLESS_AROUND_GEMMA3, HELD, USED
from plora_jax.checkpoints.hf_rope import read_ropes
from plora_jax.config import ConfigError, ModelConfig

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = ("float32", "bfloat16", "float16")
_GEMMA = ("gemma2", "gemma3_text")
_ALL_LAYERS_SLIDE = ("mistral", "mixtral", "qwen3_moe")


def read_hf_config(fields: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model that a config.json describes.

    Args:
        fields: config.json as parsed.
        generation: generation_config.json as parsed; its end tokens come first.

    Raises:
        ConfigError: an architecture, field or value that cannot be served exactly, by name.
    """
    architecture, fields = _architecture(fields)
    _refuse_unknown(architecture, fields)
    f = {name: _given(fields, name, default) for name, default in USED[architecture].items()}
    num_layers, hidden = (_positive(f, name) for name in ("num_hidden_layers", "hidden_size"))
    num_heads, num_kv_heads, head_dim = _heads(f, hidden)
    gemma = architecture in _GEMMA
    rope, rope_local = read_ropes(architecture, f)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(f, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(f, "moe_intermediate_size" if architecture == "qwen3_moe" else "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=_positive(f, "max_position_embeddings"),
        norm_eps=float(f["rms_norm_eps"]),
        rope=rope,
        rope_local=rope_local,
        query_scale=float(f["query_pre_attn_scalar"] if gemma else head_dim) ** -0.5,
        layer_windows=_windows(architecture, f, num_layers),
        activation=_activation(f, "hidden_activation" if gemma else "hidden_act"),
        tie_word_embeddings=bool(f["tie_word_embeddings"]),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture in ("qwen3", "qwen3_moe", "gemma3_text"),
        norm_offset=gemma,
        post_norms=gemma,
        embed_scale=math.sqrt(hidden) if gemma else 1.0,
        attention_soft_cap=_optional_float(f.get("attn_logit_softcapping")),
        final_soft_cap=_optional_float(f.get("final_logit_softcapping")),
        bos_token_id=f["bos_token_id"],
        eos_token_ids=_eos(f["eos_token_id"], generation or {}),
        dtype=_dtype(f),
        **_experts(architecture, f),
    )


def _architecture(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """model_type and the fields of the text model."""
    name = fields.get("model_type")
    if name == "gemma3" and isinstance(fields.get("text_config"), Mapping):
        unknown = [k for k in fields if k not in HARMLESS | HARMLESS_AROUND_GEMMA3 and fields[k] is not None]
        if unknown:
            raise _unknown(unknown[0], fields[unknown[0]], "gemma3")
        shared = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "dtype", "torch_dtype")
        outer = {k: fields[k] for k in shared if k in fields}
        return "gemma3_text", outer | dict(fields["text_config"])
    if not isinstance(name, str) or name not in USED:
        raise ConfigError(f"model_type = {name!r} is not supported; supported: {', '.join([*USED, 'gemma3 (text)'])}")
    return name, fields


def _refuse_unknown(architecture: str, fields: Mapping[str, Any]) -> None:
    harmless = HARMLESS | {"hidden_act"} if architecture in _GEMMA else HARMLESS
    for name, value in fields.items():
        if name in harmless or name in USED[architecture] or value is None:
            continue
        if name not in HELD:
            raise _unknown(name, value, architecture)
        if value not in HELD[name]:
            allowed = " or ".join("null" if v is None else repr(v).lower() for v in HELD[name])
            raise ConfigError(f"{name} = {_short(value)} is not supported for {architecture}; supported: {allowed}")


def _unknown(name: str, value: Any, architecture: str) -> ConfigError:
    return ConfigError(
        f"{name} = {_short(value)} is no known field of {architecture} and may change what the model computes; "
        "remove it from config.json if it does not"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _given(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value in the file, null included where null has a meaning, else transformers' default."""
    nullable = (
        "sliding_window",
        "num_key_value_heads",
        "head_dim",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    )
    if name in fields and (fields[name] is not None or name in nullable or name.endswith("token_id")):
        return fields[name]
    return default


def _positive(f: Mapping[str, Any], name: str) -> int:
    value = f[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} = {value!r} in config.json; it must be a whole number of 1 or more")
    return value


def _heads(f: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Query heads, KV heads and dimensions of one."""
    num_heads = _positive(f, "num_attention_heads")
    num_kv_heads = num_heads if f["num_key_value_heads"] is None else _positive(f, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_key_value_heads = {num_kv_heads} does not divide num_attention_heads = {num_heads}")
    if f["head_dim"] is not None:
        return num_heads, num_kv_heads, _positive(f, "head_dim")
    if hidden % num_heads:
        raise ConfigError(f"num_attention_heads = {num_heads} does not divide hidden_size = {hidden}; give head_dim")
    return num_heads, num_kv_heads, hidden // num_heads


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _activation(f: Mapping[str, Any], name: str) -> str:
    if f[name] not in _ACTIVATIONS:
        raise ConfigError(f"{name} = {f[name]!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[f[name]]


def _dtype(f: Mapping[str, Any]) -> str:
    name = "dtype" if f["dtype"] is not None else "torch_dtype"
    value = str(f[name] or "float32").removeprefix("torch.")
    if value not in _DTYPES:
        raise ConfigError(f"{name} = {f[name]!r} is not supported; supported: {', '.join(_DTYPES)}")
    return value


def _eos(from_config: int | list[int] | None, generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (generation.get("eos_token_id"), from_config):
        ids += source if isinstance(source, list) else [] if source is None else [source]
    return tuple(dict.fromkeys(ids))


def _experts(architecture: str, f: Mapping[str, Any]) -> dict[str, Any]:
    if architecture not in ("mixtral", "qwen3_moe"):
        return {}
    # The name that the architecture does not use natively has no default, so it counts where it is given.
    native, other = "num_local_experts", "num_experts"
    if architecture == "qwen3_moe":
        native, other = other, native
    num_experts = _positive(f, native if f[other] is None else other)
    chosen = _positive(f, "num_experts_per_tok")
    if chosen > num_experts:
        raise ConfigError(f"num_experts_per_tok = {chosen} is more than the {num_experts} experts of the model")
    return {
        "num_experts": num_experts,
        "experts_per_token": chosen,
        "norm_topk_prob": architecture == "mixtral" or bool(f["norm_topk_prob"]),
    }


def _windows(architecture: str, f: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Window of every layer; transformers' masks count the query itself, as ours do."""
    window = f.get("sliding_window")
    if not f.get("use_sliding_window", True):
        window = None
    expected = _layer_types(architecture, f, window, num_layers)
    given = f["layer_types"]
    if given is None:
        given = expected
    elif len(given) != num_layers or not set(given) <= {"sliding_attention", "full_attention"}:
        raise ConfigError(
            f"layer_types = {_short(given)} is not supported; it must hold sliding_attention or full_attention "
            f"for each of the {num_layers} layers"
        )
    elif architecture in ("llama", *_ALL_LAYERS_SLIDE) and list(given) != expected:
        raise ConfigError(f"layer_types = {_short(given)}: every layer of {architecture} has {expected[0]}")
    if "sliding_attention" in given:
        _positive({"sliding_window": window}, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in given)


def _layer_types(architecture: str, f: Mapping[str, Any], window: int | None, num_layers: int) -> list[str]:
    """Kind of every layer where the file does not say."""
    if architecture in _GEMMA:
        pattern = f["sliding_window_pattern"] or f["_sliding_window_pattern"] or (2 if architecture == "gemma2" else 6)
        slides = [bool((i + 1) % pattern) for i in range(num_layers)]
    elif window is None:
        slides = [False] * num_layers
    elif architecture == "qwen3_moe" and f["max_window_layers"] != 0:
        raise ConfigError(
            f"use_sliding_window = True with max_window_layers = {f['max_window_layers']} is not supported for "
            "qwen3_moe, where versions of transformers disagree on its meaning; supported: max_window_layers = 0"
        )
    else:
        first = f.get("max_window_layers", 0)
        slides = [i >= first for i in range(num_layers)]
    return ["sliding_attention" if s else "full_attention" for s in slides]
