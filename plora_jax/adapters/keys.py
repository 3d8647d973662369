"""From the name of a tensor in a PEFT file to the matrix of a linear layer that it is.

`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, also without PEFT's prefix and with one adapter name
before `.weight`. A path must be that of the language model: a vision tower's `encoder.layers.0.self_attn.q_proj` ends
alike and is another layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from plora_jax.adapters.adapter import AdapterError
from plora_jax.config import ModelConfig

PEFT_PREFIX = "base_model.model."
BLOCKS: Mapping[str, str] = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "qkv_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
    "gate_up_proj": "mlp",
}
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Projections that some checkpoints keep as one matrix, and whose rows follow each other in it."""

_KEY = re.compile(
    rf"(?:{re.escape(PEFT_PREFIX)})?"
    r"(?P<module>(?:model\.|language_model\.)*layers\.(?P<layer>0|[1-9]\d{0,5})\.(?P<block>\w+)\.(?P<leaf>\w+))"
    r"\.lora_(?P<part>[AB])(?:\.(?P<adapter>[^.]+))?\.weight"
)


class LinearId(NamedTuple):
    """A linear layer as the file has it; `leaf` may be a fused one.

    Attributes:
        layer: decoder layer.
        leaf: PEFT leaf name.
        module: path in the base model, for the patterns of the configuration.
    """

    layer: int
    leaf: str
    module: str


class Pair(NamedTuple):
    """Names of the two tensors of one linear layer."""

    a: str
    b: str


def leaf_parts(leaf: str, config: ModelConfig) -> tuple[str, ...]:
    """Projections of the base model that a leaf name stands for; empty where it has none of that name."""
    parts = FUSED.get(leaf, (leaf,))
    return parts if all(part in config.projections for part in parts) else ()


def pair_tensors(tensors: Iterable[str], config: ModelConfig, *, name: str) -> tuple[dict[LinearId, Pair], list[str]]:
    """Pairs the A and B of every linear layer.

    Args:
        tensors: names in the file.
        config: of the base model.
        name: of the adapter, for messages.

    Returns:
        Names by linear layer, and the names that are no matrix of any.

    Raises:
        AdapterError: an A without its B, two tensors for one matrix, or tensors of several adapters.
    """
    found: dict[tuple[int, str], dict[str, str]] = {}
    modules: dict[tuple[int, str], str] = {}
    rest: list[str] = []
    adapters: set[str] = set()
    for tensor in tensors:
        match = _match(tensor, config)
        if match is None:
            rest.append(tensor)
            continue
        parts = found.setdefault((int(match["layer"]), match["leaf"]), {})
        if match["part"] in parts:
            raise AdapterError(f"adapter {name!r} has one matrix twice: {parts[match['part']]} and {tensor}; keep one")
        parts[match["part"]] = tensor
        adapters.add(match["adapter"] or "")
        modules[int(match["layer"]), match["leaf"]] = _module_path(match["module"], tensor)
    _check_one_adapter(adapters, name)
    _check_whole(found, name)
    _check_overlap(found, name)
    return {LinearId(*key, modules[key]): Pair(p["A"], p["B"]) for key, p in sorted(found.items())}, rest


def _match(tensor: str, config: ModelConfig) -> re.Match[str] | None:
    match = _KEY.fullmatch(tensor)
    if match is None or BLOCKS.get(match["leaf"]) != match["block"]:
        return None
    return match if int(match["layer"]) < config.num_layers and leaf_parts(match["leaf"], config) else None


def _module_path(module: str, tensor: str) -> str:
    # Patterns are written for paths in the base model. Only PEFT's prefix proves that what follows is one.
    bare = not tensor.startswith(PEFT_PREFIX) and module.startswith("layers.")
    return f"model.{module}" if bare else module


def _check_one_adapter(adapters: set[str], name: str) -> None:
    if len(adapters) > 1:
        found = ", ".join(sorted(repr(adapter) for adapter in adapters))
        raise AdapterError(
            f"adapter {name!r} has tensors of several adapters (by the segment after lora_A: {found}); save each apart"
        )


def _check_whole(found: Mapping[tuple[int, str], Mapping[str, str]], name: str) -> None:
    for parts in found.values():
        if len(parts) == 1:
            ((part, tensor),) = parts.items()
            other = {"A": "B", "B": "A"}[part]
            raise AdapterError(
                f"adapter {name!r} has {tensor} without its lora_{other}: the file is incomplete; save it again"
            )


def _check_overlap(found: Mapping[tuple[int, str], Mapping[str, str]], name: str) -> None:
    for (layer, leaf), parts in found.items():
        for part in FUSED.get(leaf, ()):
            if (layer, part) in found:
                both = f"{parts['A']} and {found[layer, part]['A']}"
                raise AdapterError(f"adapter {name!r} changes layers.{layer}.{part} twice: {both}; keep one")
