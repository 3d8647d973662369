"""Shapes from rows of a table of published dimensions: dense models, experts, and latent attention.

Latent attention (MLA, arXiv 2405.04434) keeps one vector for all heads of a token. It is counted as decode runs it: the
up-projection of keys and values is absorbed, so queries and outputs are as wide as the latent vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies.cost.shapes import (
    AttentionShape,
    Matrix,
    ModelShape,
    PhaseShape,
    dense_phase,
    mlp_phases,
    transformer,
)

_LOCAL_LAYERS = {"gemma2": 2, "gemma3_text": 6}
"""Every n-th layer sees the whole context, the others a window."""


def shape_of_dims(row: Mapping[str, Any], *, expert_adapters: bool = False, item_bytes: int = 2) -> ModelShape:
    """The shape of a model in a table of dimensions.

    Args:
        row: name, model_type, hidden, intermediate, layers, heads, kv_heads, head_dim, vocab; sliding_window, moe and
            mla where it has them.
        expert_adapters: adapters may change the experts' matrices.
        item_bytes: of a number.
    """
    moe = row.get("moe") or {}
    experts = {
        "experts": moe.get("n_experts", 0),
        "experts_per_token": moe.get("top_k", 0),
        "shared_experts": moe.get("n_shared", 0),
        "expert_intermediate": moe.get("moe_intermediate") or row["intermediate"],
        "dense_layers": moe.get("first_k_dense", 0),
        "expert_adapters": expert_adapters,
    }
    if row.get("mla"):
        mlp = mlp_phases(row["hidden"], row["intermediate"], row["layers"], **experts)
        return _latent(row, mlp, item_bytes)
    sizes = {key: row[key] for key in ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab")}
    return transformer(row["name"], windows=_windows(row), item_bytes=item_bytes, **sizes, **experts)


def _windows(row: Mapping[str, Any]) -> list[int | None]:
    window, layers = row.get("sliding_window"), row["layers"]
    if not window:
        return []
    every = _LOCAL_LAYERS.get(row["model_type"])
    return [None if every and (layer + 1) % every == 0 else window for layer in range(layers)]


def _latent(row: Mapping[str, Any], mlp: tuple[PhaseShape, ...], item_bytes: int) -> ModelShape:
    hidden, layers, heads, mla = row["hidden"], row["layers"], row["heads"], row["mla"]
    latent, rope = mla["kv_lora_rank"], mla["qk_rope_head_dim"]
    nope, value = mla["qk_nope_head_dim"], mla["v_head_dim"]
    q_rank = mla["q_lora_rank"]
    qkv_a = (Matrix("q_a_proj", hidden, q_rank, "whole"), Matrix("kv_a_proj_with_mqa", hidden, latent + rope, "whole"))
    q_b = (Matrix("q_b_proj", q_rank, heads * (nope + rope)),)
    absorbed = float(latent * heads * (nope + value))
    phases = (
        dense_phase("qkv_a", layers, qkv_a),
        dense_phase("q_b", layers, q_b, more=absorbed),
        PhaseShape(name="attention", layers=layers),
        dense_phase("o", layers, (Matrix("o_proj", heads * value, hidden, "inputs"),)),
        *mlp,
        PhaseShape(name="head", layers=1, base_numbers=float(row["vocab"] * hidden)),
    )
    attention = AttentionShape(
        heads=heads,
        kv_heads=1,
        score_dim=latent + rope,
        value_dim=latent,
        kv_numbers=latent + rope,
        windows=((layers, None),),
    )
    return ModelShape(name=row["name"], phases=phases, attention=attention, item_bytes=item_bytes)
