"""Rank and scale of a module, as PEFT computes them from adapter_config.json.

`rank_pattern` and `alpha_pattern` are looked up apart from each other: a module may take its rank from a pattern and
its alpha from the default. The first key in file order that matches wins.

Source: peft 0.21 `utils/other.py:get_pattern_key`, `tuners/lora/layer.py:update_layer`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from plora_jax.adapters.adapter import AdapterError
from plora_jax.adapters.patterns import anchored, check_pattern
from plora_jax.wording import in_json

PEFT_DEFAULT_RANK = 8
PEFT_DEFAULT_ALPHA = 8
_LARGEST_RANK = 10**6  # far above any; beyond float64 the division by it would fail
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class ModuleRule(NamedTuple):
    """What the configuration says of one module.

    Attributes:
        rank: R.
        scale: alpha / r, or alpha / sqrt(r) with rsLoRA.
        rank_source: the field that gave the rank, for messages.
    """

    rank: int
    scale: float
    rank_source: str


@dataclasses.dataclass(frozen=True)
class LoraRules:
    """The fields of adapter_config.json that give rank and scale, checked.

    Attributes:
        rank: of modules that no pattern matches.
        alpha: of modules that no pattern matches.
        rank_pattern: rank by regex, in file order.
        alpha_pattern: alpha by regex, in file order.
        rslora: scale is alpha / sqrt(r).
    """

    rank: int = PEFT_DEFAULT_RANK
    alpha: float = PEFT_DEFAULT_ALPHA
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rslora: bool = False


def module_rule(rules: LoraRules, module: str) -> ModuleRule:
    """Rank and scale of a module.

    Args:
        rules: of the adapter.
        module: path in the base model: "model.layers.0.self_attn.q_proj", "model.embed_tokens", "lm_head".
    """
    rank_key = _first_match(rules.rank_pattern, module)
    alpha_key = _first_match(rules.alpha_pattern, module)
    rank = rules.rank if rank_key is None else rules.rank_pattern[rank_key]
    alpha = rules.alpha if alpha_key is None else rules.alpha_pattern[alpha_key]
    source = f"r={rank}" if rank_key is None else f"rank_pattern[{rank_key!r}]={rank}"
    return ModuleRule(rank, alpha / (math.sqrt(rank) if rules.rslora else rank), source)


def read_rules(fields: Mapping[str, Any], *, name: str) -> LoraRules:
    """The rules of an adapter_config.json; absent fields have PEFT's defaults.

    Args:
        fields: the JSON object.
        name: of the adapter, for messages.

    Raises:
        AdapterError: a value that is no rank, no alpha or no regex; names the field.
    """
    reader = _Reader(name)
    rslora = fields.get("use_rslora")
    if not isinstance(rslora, bool | None):
        raise reader.error("use_rslora", rslora, "true or false")
    return LoraRules(
        rank=reader.rank("r", fields.get("r", PEFT_DEFAULT_RANK)),
        alpha=reader.alpha("lora_alpha", fields.get("lora_alpha", PEFT_DEFAULT_ALPHA)),
        rank_pattern=reader.pattern("rank_pattern", fields, reader.rank),
        alpha_pattern=reader.pattern("alpha_pattern", fields, reader.alpha),
        rslora=bool(rslora),
    )


def is_finite_float32(value: Any) -> TypeGuard[float]:
    """Whether a JSON value is a number that stays finite in float32, in which the step holds scales."""
    # NaN fails the comparison; so does a whole number beyond float64, which math.isfinite cannot take.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _FLOAT32_MAX


class _Reader:
    """Reads values and says whose they were when they are wrong."""

    def __init__(self, name: str) -> None:
        self.name = name

    def error(self, field: str, value: Any, allowed: str) -> AdapterError:
        return AdapterError(
            f"adapter {self.name!r}: {field} in adapter_config.json is {in_json(value)}; it must be {allowed}"
        )

    def rank(self, field: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_RANK:
            raise self.error(field, value, f"a whole number from 1 to {_LARGEST_RANK}")
        return value

    def alpha(self, field: str, value: Any) -> float:
        if not is_finite_float32(value):
            raise self.error(field, value, "a finite number of float32")
        return value

    def pattern(self, field: str, fields: Mapping[str, Any], read: Callable[[str, Any], Any]) -> dict[str, Any]:
        patterns = fields.get(field)
        if patterns is None:
            return {}
        if not isinstance(patterns, dict):
            raise self.error(field, patterns, "an object of values by regex")
        for key in patterns:
            try:
                check_pattern(key)
            except ValueError as error:
                raise self.error(f"a key of {field}", _cut(key), str(error)) from None
        return {key: read(f"{field}[{key!r}]", value) for key, value in patterns.items()}


def _cut(key: str, most: int = 80) -> str:
    return key if len(key) <= most else f"{key[:most]}..."


def _first_match(patterns: Mapping[str, Any], module: str) -> str | None:
    return next((key for key in patterns if re.match(anchored(key), module)), None)
