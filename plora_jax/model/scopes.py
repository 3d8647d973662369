"""Names of a step's parts, as compiled programs carry them: what profilers show, and what a breakdown adds up.

What adapters add stands under names of its own inside these, `<phase>.<strategy>` (`strategies.traffic`).
"""

from __future__ import annotations

from collections.abc import Mapping

INPUTS = "inputs"
EMBED = "embed"
LAYERS = "layers"
NORM = "norm"
ROTARY = "rotary"
KV_WRITE = "kv_write"
ACTIVATION = "activation"
EXPERTS = "experts"
HEAD = "head"
SAMPLE = "sample"

PRODUCTS: Mapping[str, str] = {"q_proj": "qkv", "o_proj": "o", "gate_proj": "gate_up", "down_proj": "down"}
"""Name of a group of projections that share an input, by the first of them."""


def attention_of(phase: str) -> str:
    """Name of the attention of a phase, "decode" or "prefill"."""
    return f"{phase}.attention"
