"""The trained values: LoRA matrices of every layer, stacked, and how they become an Adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plora_jax.adapters import Adapter, LoraMatrices, ModuleId
from plora_jax.config import ModelConfig
from plora_jax.training.config import TrainConfig

LoraParams = dict[str, dict[str, jax.Array]]
"""{"a": {projection: [L, R, I]}, "b": {projection: [L, O, R]}}, float32."""


def init_lora(model: ModelConfig, config: TrainConfig) -> LoraParams:
    """First values as PEFT draws them: A uniform with the bound of Kaiming's rule at a = sqrt(5), B zero.

    That bound is sqrt(6 / ((1 + 5) * I)) = 1 / sqrt(I). With B zero the adapter is the base model.
    """
    keys = jax.random.split(jax.random.key(config.seed), len(config.targets))
    a, b = {}, {}
    for key, name in zip(keys, config.targets, strict=True):
        out_size, in_size = model.projections[name]
        shape = (model.num_layers, config.rank, in_size)
        bound = in_size**-0.5
        a[name] = jax.random.uniform(key, shape, jnp.float32, minval=-bound, maxval=bound)
        b[name] = jnp.zeros((model.num_layers, out_size, config.rank), jnp.float32)
    return {"a": a, "b": b}


def to_adapter(
    lora: Mapping[str, Mapping[str, Any]], config: TrainConfig, *, name: str, base: str, dtype: Any = np.float32
) -> Adapter:
    """The trained values as an adapter in memory.

    Args:
        lora: trained values.
        config: they were trained with.
        name: of the adapter.
        base: name or path of the base model, for the adapter's own record.
        dtype: numpy or ml_dtypes dtype of the matrices.
    """
    modules = {}
    for projection in config.targets:
        a, b = (np.asarray(lora[part][projection], dtype) for part in "ab")
        for layer in range(a.shape[0]):
            modules[ModuleId(layer, projection)] = LoraMatrices(a[layer], b[layer], config.scale)
    return Adapter(name=name, modules=modules, config=_peft_config(config, base))


def _peft_config(config: TrainConfig, base: str) -> dict[str, Any]:
    alpha = int(config.alpha) if float(config.alpha).is_integer() else config.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(config.targets),
        "use_rslora": config.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
