"""A base model's shapes for the cost model, from its configuration."""

from __future__ import annotations

from plora_jax.config import ModelConfig
from strategies.cost import ModelShape, transformer


def shape_of_config(config: ModelConfig, *, name: str, item_bytes: int) -> ModelShape:
    """The phases, matrices and attention of a base model.

    Args:
        config: of the model.
        name: under which its base steps are in a calibration.
        item_bytes: of a number of weights, adapters and KV.
    """
    return transformer(
        name,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        windows=config.layer_windows,
        item_bytes=item_bytes,
        experts=config.num_experts,
        experts_per_token=config.experts_per_token,
    )
