"""Rotary embeddings in config.json: `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plora_jax.config import ConfigError, RopeConfig

_THETA = {"mixtral": 1e6, "gemma3_text": 1e6}
_KNOWN = (
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def read_ropes(architecture: str, f: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embedding of full layers (or of all), and that of sliding layers where it differs.

    Args:
        architecture: model_type.
        f: used fields of config.json, absent ones with their defaults.

    Raises:
        ConfigError: a kind or a parameter that is not supported, by name.
    """
    theta = float(f["rope_theta"] or _THETA.get(architecture, 1e4))
    if f["rope_parameters"] is None:
        rope = _read_rope(f["rope_scaling"] or {}, field="rope_scaling", theta=theta)
        if architecture != "gemma3_text":
            return rope, None
        return rope, RopeConfig(theta=float(f["rope_local_base_freq"]))
    given = f["rope_parameters"]
    if architecture != "gemma3_text":
        return _read_rope(given, field="rope_parameters", theta=theta), None
    unknown = sorted(set(given) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(
            f"rope_parameters.{unknown[0]} = {given[unknown[0]]!r} is not supported for gemma3_text; it must hold "
            "full_attention and sliding_attention"
        )
    local = float(f["rope_local_base_freq"])
    return (
        _read_rope(given.get("full_attention", {}), field="rope_parameters.full_attention", theta=theta),
        _read_rope(given.get("sliding_attention", {}), field="rope_parameters.sliding_attention", theta=local),
    )


def _read_rope(given: Mapping[str, Any], *, field: str, theta: float) -> RopeConfig:
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"{field}.rope_type = {kind!r} is not supported; supported: default, linear, llama3")
    for name, value in given.items():
        harmless = name == "partial_rotary_factor" and value == 1.0
        if name not in _KNOWN and value is not None and not harmless:
            raise ConfigError(f"{field}.{name} = {value!r} is not supported with rope_type {kind!r}")
    theta = float(given.get("rope_theta") or theta)
    if kind == "default":
        return RopeConfig(theta=theta)

    def number(name: str) -> float:
        if not isinstance(given.get(name), int | float):
            raise ConfigError(f"{field}.{name} = {given.get(name)!r}; rope_type {kind!r} needs a number there")
        return float(given[name])

    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=number("factor"))
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=number("factor"),
        low_freq_factor=number("low_freq_factor"),
        high_freq_factor=number("high_freq_factor"),
        original_max_position=int(number("original_max_position_embeddings")),
    )
