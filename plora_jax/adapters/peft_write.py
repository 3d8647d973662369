"""An Adapter to a PEFT directory that PEFT, vLLM and `load_peft_adapter` read.

The configuration is written from the matrices: rank and alpha that most modules share become the defaults, the others
patterns. Where the adapter's own fields already give every rank and scale exactly they are kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from plora_jax.adapters.adapter import EMBEDDING, HEAD, OUTSIDE, Adapter, AdapterError, ModuleId
from plora_jax.adapters.files import CONFIG_FILE, TENSORS_FILE, new_directory, write_json
from plora_jax.adapters.keys import BLOCKS, PEFT_PREFIX
from plora_jax.adapters.matrices import as_matrix
from plora_jax.adapters.rules import module_rule, read_rules

_RULE_FIELDS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
_KEPT_FIELDS = ("base_model_name_or_path", "revision", "lora_dropout", "task_type", "peft_version")


def save_adapter(adapter: Adapter, path: str | Path, *, dtype: Any = None, overwrite: bool = False) -> None:
    """Writes a PEFT directory, whole or not at all.

    Args:
        adapter: to write.
        path: directory; must not exist, or be empty, unless overwrite is set.
        dtype: numpy or ml_dtypes dtype of the tensors, or its name; None keeps that of the matrices.
        overwrite: replace what is there.

    Raises:
        FileExistsError: something is there.
        AdapterError: the adapter has no modules, or a value that is not finite in dtype.
    """
    if not adapter.modules:
        raise AdapterError(f"adapter {adapter.name!r} has no modules: there is nothing to save")
    tensors = {}
    for module, matrices in adapter.modules.items():
        for part, matrix in (("A", matrices.a), ("B", matrices.b)):
            tensor = f"{PEFT_PREFIX}{_path(module)}.{_leaf(module, part)}"
            tensors[tensor] = as_matrix(matrix, dtype, tensor=tensor, name=adapter.name)
    with new_directory(path, overwrite=overwrite) as directory:
        write_json(directory / CONFIG_FILE, peft_fields(adapter))
        save_file(tensors, directory / TENSORS_FILE, metadata={"format": "pt"})
        # safetensors lets the owner alone read it; the server may run as another user.
        (directory / TENSORS_FILE).chmod((directory / CONFIG_FILE).stat().st_mode)


def peft_fields(adapter: Adapter) -> dict[str, Any]:
    """adapter_config.json of an adapter."""
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "revision": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        # PEFT starts a module that the file does not hold from this: B zero, so that it has no effect.
        "init_lora_weights": True,
        "lora_dropout": 0.0,
    }
    fields |= {key: adapter.config[key] for key in _KEPT_FIELDS if key in adapter.config}
    return fields | _rule_fields(adapter) | _target_fields(adapter)


def _rule_fields(adapter: Adapter) -> dict[str, Any]:
    own = {key: adapter.config[key] for key in _RULE_FIELDS if adapter.config.get(key) is not None}
    if own and _reproduces(own, adapter):
        return {"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False} | own
    rslora = bool(own.get("use_rslora", False))
    ranks = {module: matrices.rank for module, matrices in adapter.modules.items()}
    alphas = {m: _alpha(matrices.scale, matrices.rank, rslora=rslora) for m, matrices in adapter.modules.items()}
    rank, rank_pattern = _default_and_pattern(ranks)
    alpha, alpha_pattern = _default_and_pattern(alphas)
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "use_rslora": rslora,
    }


def _reproduces(fields: Mapping[str, Any], adapter: Adapter) -> bool:
    rules = read_rules(fields, name=adapter.name)
    return all(
        module_rule(rules, _path(module))[:2] == (matrices.rank, matrices.scale)
        for module, matrices in adapter.modules.items()
    )


def _alpha(scale: float, rank: int, *, rslora: bool) -> float:
    """The alpha that gives this scale again; a whole number where one does."""
    divisor = math.sqrt(rank) if rslora else rank
    alpha = scale * divisor
    nearby = (round(alpha), alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf))
    return next((x for x in nearby if x / divisor == scale), alpha)


def _default_and_pattern(values: Mapping[ModuleId, Any]) -> tuple[Any, dict[str, Any]]:
    default = Counter(values.values()).most_common(1)[0][0]
    by_projection: dict[str, set[Any]] = {}
    for module, value in values.items():
        by_projection.setdefault(module.projection, set()).add(value)
    pattern: dict[str, Any] = {}
    for module, value in sorted(values.items()):
        if value != default:
            uniform = len(by_projection[module.projection]) == 1
            pattern[module.projection if uniform else _suffix(module)] = value
    return default, pattern


def _target_fields(adapter: Adapter) -> dict[str, Any]:
    layers: dict[str, set[int]] = {}
    for module in adapter.modules:
        if module.layer != OUTSIDE:
            layers.setdefault(module.projection, set()).add(module.layer)
    outside = sorted(module.projection for module in adapter.modules if module.layer == OUTSIDE)
    first: set[int] = next(iter(layers.values()), set())
    uniform = all(other == first for other in layers.values())
    if uniform and first == set(range(len(first))) and _targets_every_layer(adapter.config, layers):
        return {"target_modules": sorted(layers) + outside, "layers_to_transform": None}
    # PEFT leaves out what is outside the layers when the layers are listed.
    if uniform and not outside:
        return {"target_modules": sorted(layers), "layers_to_transform": sorted(first)}
    return {"target_modules": [_suffix(module) for module in sorted(adapter.modules)], "layers_to_transform": None}


def _targets_every_layer(fields: Mapping[str, Any], projections: Iterable[str]) -> bool:
    # How many layers the base has is not known here; without a list PEFT puts new modules into all further ones.
    targets = fields.get("target_modules")
    by_name = targets == "all-linear" or (isinstance(targets, list | tuple) and set(projections) <= set(targets))
    return by_name and fields.get("layers_to_transform") is None


def _suffix(module: ModuleId) -> str:
    if module.layer == OUTSIDE:
        return module.projection
    return f"layers.{module.layer}.{BLOCKS[module.projection]}.{module.projection}"


def _path(module: ModuleId) -> str:
    return HEAD if module.projection == HEAD else f"model.{_suffix(module)}"


def _leaf(module: ModuleId, part: str) -> str:
    # PEFT keeps the embedding's matrices as bare parameters, without ".weight".
    return f"lora_embedding_{part}" if module.projection == EMBEDDING else f"lora_{part}.weight"
