"""plora_jax: one base model, many LoRA adapters, served in JAX.

    from plora_jax import EngineConfig, SamplingParams, build_engine

    engine = build_engine(EngineConfig(model="default")).engine
    engine.load_adapter("pirate", "launch/default/adapters/pirate")
    [[completion]] = engine.generate(["Hello"], SamplingParams(max_tokens=20), adapters="pirate")

Names are imported when they are first used: scheduler and simulation code must not pay for JAX, nor need it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plora_jax.adapters import Adapter, AdapterError, load_adapter, save_adapter
    from plora_jax.checkpoints import LoadedModel, WeightsError, load_model
    from plora_jax.config import ConfigError, ModelConfig
    from plora_jax.engine import Completion, Delta, Engine, Generation, RequestError, SamplingParams
    from plora_jax.engine.build import Deployment, EngineConfig, build_engine
    from plora_jax.tokenizer import Tokenizer, load_tokenizer, render_chat

_HOMES = {
    "plora_jax.adapters": ("Adapter", "AdapterError", "load_adapter", "save_adapter"),
    "plora_jax.checkpoints": ("LoadedModel", "WeightsError", "load_model"),
    "plora_jax.config": ("ConfigError", "ModelConfig"),
    "plora_jax.engine": ("Completion", "Delta", "Engine", "Generation", "RequestError", "SamplingParams"),
    "plora_jax.engine.build": ("Deployment", "EngineConfig", "build_engine"),
    "plora_jax.tokenizer": ("Tokenizer", "load_tokenizer", "render_chat"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Adapter",
    "AdapterError",
    "Completion",
    "ConfigError",
    "Delta",
    "Deployment",
    "Engine",
    "EngineConfig",
    "Generation",
    "LoadedModel",
    "ModelConfig",
    "RequestError",
    "SamplingParams",
    "Tokenizer",
    "WeightsError",
    "build_engine",
    "load_adapter",
    "load_model",
    "load_tokenizer",
    "render_chat",
    "save_adapter",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'plora_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
