"""LoRA adapters as values: read from PEFT directories and Orbax checkpoints, checked against the base, written back.

adapter = load_adapter("my_adapter", name="my_adapter", config=model.config, max_lora_rank=64)
adapter.modules[ModuleId(0, "q_proj")].a
"""

from plora_jax.adapters.adapter import EMBEDDING, HEAD, OUTSIDE, Adapter, AdapterError, LoraMatrices, ModuleId
from plora_jax.adapters.load import check_adapter_files, load_adapter
from plora_jax.adapters.matrices import module_size
from plora_jax.adapters.orbax import restore_adapter, save_adapter_orbax
from plora_jax.adapters.peft import load_peft_adapter
from plora_jax.adapters.peft_write import peft_fields, save_adapter
from plora_jax.adapters.rules import LoraRules, ModuleRule, module_rule, read_rules

__all__ = [
    "EMBEDDING",
    "HEAD",
    "OUTSIDE",
    "Adapter",
    "AdapterError",
    "LoraMatrices",
    "LoraRules",
    "ModuleId",
    "ModuleRule",
    "check_adapter_files",
    "load_adapter",
    "load_peft_adapter",
    "module_rule",
    "module_size",
    "peft_fields",
    "read_rules",
    "restore_adapter",
    "save_adapter",
    "save_adapter_orbax",
]
