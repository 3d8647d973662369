"""A small base model's numbers and PEFT directories made for it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from plora_jax.checkpoints import load_hf_config
from plora_jax.config import ModelConfig, RopeConfig

PACK = Path(__file__).parents[1] / "data" / "conformance"
BLOCK = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
EMBEDDING_KEY = "base_model.model.model.embed_tokens"
HEAD_KEY = "base_model.model.lm_head"
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=112,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    max_position=512,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    query_scale=8**-0.5,
)
FIELDS: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "init_lora_weights": True,
}


def pack_model(base: str) -> ModelConfig:
    """The configuration of a model of the conformance pack."""
    return load_hf_config(PACK / "models" / base)


def key(layer: int, projection: str, part: str) -> str:
    block = BLOCK.get(projection, "mlp")
    return f"base_model.model.model.layers.{layer}.{block}.{projection}.lora_{part}.weight"


def lora_tensors(
    projections: Iterable[str] = ("q_proj", "v_proj"), *, rank: int = 4, layers: Iterable[int] = (0, 1, 2)
) -> dict[str, np.ndarray]:
    """A and B of these projections, float32, by PEFT's names."""
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in layers:
        for projection in projections:
            out_size, in_size = MODEL.projections[projection]
            tensors[key(layer, projection, "A")] = rng.standard_normal((rank, in_size), dtype=np.float32)
            tensors[key(layer, projection, "B")] = rng.standard_normal((out_size, rank), dtype=np.float32)
    return tensors


def outer_tensors(*, rank: int = 4, seed: int = 1) -> dict[str, np.ndarray]:
    """A and B of the embedding and the head, float32, by PEFT's names."""
    rng = np.random.default_rng(seed)
    vocab, width = MODEL.vocab_size, MODEL.hidden_size
    shapes = {
        f"{EMBEDDING_KEY}.lora_embedding_A": (rank, vocab),
        f"{EMBEDDING_KEY}.lora_embedding_B": (width, rank),
        f"{HEAD_KEY}.lora_A.weight": (rank, width),
        f"{HEAD_KEY}.lora_B.weight": (vocab, rank),
    }
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_peft(directory: Path, tensors: dict[str, np.ndarray] | None = None, **fields: Any) -> Path:
    """A PEFT directory; `fields` are laid over those of a plain rank 4 adapter on q and v."""
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(FIELDS | fields))
    tensors = lora_tensors() if tensors is None else tensors
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory
