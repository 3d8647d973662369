"""From the name of a tensor in a PEFT file to the matrix of a projection that it is.

`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, also without PEFT's prefix and with one adapter name
before `.weight`; the embedding's are `...embed_tokens.lora_embedding_A`, mostly without `.weight`. A path must be that
of the language model: a vision tower's `encoder.layers.0.self_attn.q_proj` ends alike and is another layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from plora_jax.adapters.adapter import EMBEDDING, HEAD, OUTSIDE, AdapterError
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

_PREFIX = rf"(?:{re.escape(PEFT_PREFIX)})?"
_LINEAR_KEY = re.compile(
    _PREFIX
    + r"(?P<module>(?:model\.|language_model\.)*layers\.(?P<layer>0|[1-9]\d{0,5})\.(?P<block>\w+)\.(?P<leaf>\w+))"
    + r"\.lora_(?P<part>[AB])(?:\.(?P<adapter>[^.]+))?\.weight"
)
_EMBEDDING_PATH = rf"(?P<module>(?:model\.|language_model\.)*(?P<leaf>{EMBEDDING}))"
_HEAD_PATH = rf"(?P<module>(?:language_model\.)?(?P<leaf>{HEAD}))"
_OUTER_KEYS = (
    re.compile(
        _PREFIX + _EMBEDDING_PATH + r"\.lora_embedding_(?P<part>[AB])(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?"
    ),
    re.compile(_PREFIX + _HEAD_PATH + r"\.lora_(?P<part>[AB])(?:\.(?P<adapter>[^.]+))?\.weight"),
)
_BASE_COPIES = tuple(re.compile(_PREFIX + path + r"\.base_layer\.weight") for path in (_EMBEDDING_PATH, _HEAD_PATH))


class LinearId(NamedTuple):
    """A projection as the file has it; `leaf` may be a fused one.

    Attributes:
        layer: decoder layer, or OUTSIDE.
        leaf: PEFT leaf name.
        module: path in the base model, for the patterns of the configuration.
    """

    layer: int
    leaf: str
    module: str


class Pair(NamedTuple):
    """Names of the two tensors of one projection."""

    a: str
    b: str


class _Key(NamedTuple):
    """What a tensor's name says."""

    linear: LinearId
    part: str
    adapter: str


def leaf_parts(leaf: str, config: ModelConfig) -> tuple[str, ...]:
    """Projections of a decoder layer that a leaf name stands for; empty where it has none of that name."""
    parts = FUSED.get(leaf, (leaf,))
    return parts if all(part in config.projections for part in parts) else ()


def pair_tensors(tensors: Iterable[str], config: ModelConfig, *, name: str) -> tuple[dict[LinearId, Pair], list[str]]:
    """Pairs the A and B of every projection.

    Args:
        tensors: names in the file.
        config: of the base model.
        name: of the adapter, for messages.

    Returns:
        Names by projection, and the names that are no matrix of any.

    Raises:
        AdapterError: an A without its B, two tensors for one matrix, or tensors of several adapters.
    """
    found: dict[tuple[int, str], dict[str, str]] = {}
    modules: dict[tuple[int, str], str] = {}
    rest: list[str] = []
    adapters: set[str] = set()
    for tensor in tensors:
        key = _read_key(tensor, config)
        if key is None:
            rest.append(tensor)
            continue
        parts = found.setdefault(key.linear[:2], {})
        if key.part in parts:
            raise AdapterError(f"adapter {name!r} has one matrix twice: {parts[key.part]} and {tensor}; keep one")
        parts[key.part] = tensor
        adapters.add(key.adapter)
        modules[key.linear[:2]] = key.linear.module
    _check_one_adapter(adapters, name)
    _check_whole(found, name)
    _check_overlap(found, name)
    return {LinearId(*key, modules[key]): Pair(p["A"], p["B"]) for key, p in sorted(found.items())}, rest


def base_copies(tensors: Iterable[str], pairs: Iterable[LinearId]) -> tuple[dict[str, str], list[str]]:
    """Finds the copies of base weights that PEFT saves beside LoRA of the embedding or the head.

    Args:
        tensors: names that are no matrix of LoRA.
        pairs: what the adapter changes.

    Returns:
        Name of the copy by leaf, and the other names.
    """
    leaves = {linear.leaf for linear in pairs if linear.layer == OUTSIDE}
    copies: dict[str, str] = {}
    rest = []
    for tensor in tensors:
        match = next(filter(None, (key.fullmatch(tensor) for key in _BASE_COPIES)), None)
        if match is not None and match["leaf"] in leaves - copies.keys():
            copies[match["leaf"]] = tensor
        else:
            rest.append(tensor)
    return copies, rest


def _read_key(tensor: str, config: ModelConfig) -> _Key | None:
    for pattern in _OUTER_KEYS:
        if match := pattern.fullmatch(tensor):
            return _key(match, OUTSIDE)
    match = _LINEAR_KEY.fullmatch(tensor)
    if match is None or BLOCKS.get(match["leaf"]) != match["block"]:
        return None
    layer = int(match["layer"])
    return _key(match, layer) if layer < config.num_layers and leaf_parts(match["leaf"], config) else None


def _key(match: re.Match[str], layer: int) -> _Key:
    # Patterns are written for paths in the base model. Only PEFT's prefix proves that what follows is one.
    module = match["module"]
    bare = not match.string.startswith(PEFT_PREFIX) and module.startswith(("layers.", EMBEDDING))
    linear = LinearId(layer, match["leaf"], f"model.{module}" if bare else module)
    return _Key(linear, match["part"], match["adapter"] or "")


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
            kind = "lora_embedding_" if "lora_embedding_" in tensor else "lora_"
            other = kind + {"A": "B", "B": "A"}[part]
            raise AdapterError(
                f"adapter {name!r} has {tensor} without its {other}: the file is incomplete; save it again"
            )


def _check_overlap(found: Mapping[tuple[int, str], Mapping[str, str]], name: str) -> None:
    for (layer, leaf), parts in found.items():
        for part in FUSED.get(leaf, ()):
            if (layer, part) in found:
                both = f"{parts['A']} and {found[layer, part]['A']}"
                raise AdapterError(f"adapter {name!r} changes layers.{layer}.{part} twice: {both}; keep one")
