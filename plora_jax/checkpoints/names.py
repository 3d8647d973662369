"""Which tensor of a Hugging Face checkpoint is which part of which parameter, for every architecture.

Layers (and experts) are tensors of their own there and rows of one stacked parameter here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from plora_jax.config import ModelConfig


class Part(NamedTuple):
    """A place in a parameter.

    Attributes:
        path: dotted path in the parameter tree.
        at: leading indices: (), (layer,) or (layer, expert).
    """

    path: str
    at: tuple[int, ...]


_ATTENTION = {
    **{name: f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{f"{name}_bias": f"self_attn.{name}.bias" for name in ("q_proj", "k_proj", "v_proj")},
    **{name: f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")},
    "input_norm": "input_layernorm.weight",
}
_NORMS = {"pre_mlp_norm": "post_attention_layernorm.weight"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm.weight",
    "pre_mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
_EXPERTS = {
    "mixtral": {"expert_gate": "w1", "expert_up": "w3", "expert_down": "w2"},
    "qwen3_moe": {"expert_gate": "gate_proj", "expert_up": "up_proj", "expert_down": "down_proj"},
}
_BLOCK = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
_WITHOUT_EFFECT = re.compile(r"(^|\.)(rotary_emb\.inv_freq|masked_bias|attn\.bias)$")
_OTHER_TOWERS = ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")


def hf_names(config: ModelConfig) -> dict[str, Part]:
    """Tensor names as transformers saves them, each with its place; the inverse is `{part: name}`.

    Args:
        config: of the model.

    Returns:
        Every tensor of the checkpoint, in file order of the layers.
    """
    names = {"model.embed_tokens.weight": Part("embedding", ())}
    layer = [path.removeprefix("layers.") for path in config.param_shapes() if path.startswith("layers.")]
    for index in range(config.num_layers):
        for leaf in layer:
            path, prefix = f"layers.{leaf}", f"model.layers.{index}."
            if leaf.startswith("expert_"):
                part = _EXPERTS[config.architecture][leaf]
                for expert in range(config.num_experts):
                    name = f"{prefix}{_BLOCK[config.architecture]}.experts.{expert}.{part}.weight"
                    names[name] = Part(path, (index, expert))
            else:
                names[prefix + _layer_name(config, leaf)] = Part(path, (index,))
    names["model.norm.weight"] = Part("final_norm", ())
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = Part("head", ())
    return names


def _layer_name(config: ModelConfig, leaf: str) -> str:
    if leaf == "router":
        return f"{_BLOCK[config.architecture]}.gate.weight"
    return (_ATTENTION | (_GEMMA_NORMS if config.post_norms else _NORMS))[leaf]


def canonical_name(name: str) -> str:
    """The name that transformers would use for the text model alone.

    Drops the wrapper of a Gemma 3 with a vision tower (`language_model.model.` or `model.language_model.`).
    """
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def is_harmless_extra(name: str, config: ModelConfig) -> bool:
    """Whether a tensor that `hf_names` does not list may be left out without changing the text model."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    if config.architecture == "gemma3_text" and name.startswith(_OTHER_TOWERS):
        return True
    return _WITHOUT_EFFECT.search(name) is not None


def fused_expert_names(config: ModelConfig) -> Mapping[str, tuple[int, tuple[str, ...]]]:
    """Names of experts stacked in one tensor a layer, as transformers 5 holds them in memory.

    Returns:
        Layer and leaves by tensor name; two leaves share the rows of `gate_up_proj` [E, 2F, D].
    """
    if not config.num_experts:
        return {}
    fused: dict[str, tuple[int, tuple[str, ...]]] = {}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}.mlp.experts."
        fused[prefix + "gate_up_proj"] = (index, ("expert_gate", "expert_up"))
        fused[prefix + "down_proj"] = (index, ("expert_down",))
    return fused
