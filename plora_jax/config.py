"""What a base model is, as numbers: one frozen value that every floor above reads and nobody changes.

The readers in `plora_jax.checkpoints` make a ModelConfig from a config.json or from GGUF metadata; the modules in
`plora_jax.model` build the network from it. A field exists here only if it changes the maths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


class ConfigError(ValueError):
    """A model configuration that this project cannot run exactly; the message names the field and its value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear" (all frequencies over `factor`) or "llama3" (frequencies by wavelength).
        factor: context extension, used by "linear" and "llama3".
        low_freq_factor: "llama3" only.
        high_freq_factor: "llama3" only.
        original_max_position: context the model was first trained with, tokens; "llama3" only.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
        architecture: Hugging Face `model_type`: "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text",
            "mixtral" or "qwen3_moe".
        vocab_size: V.
        hidden_size: D.
        intermediate_size: F of a dense MLP, or of one expert where `num_experts` is not 0.
        num_layers: L.
        num_heads: N, query heads.
        num_kv_heads: K.
        head_dim: H.
        max_position: longest context, tokens.
        norm_eps: epsilon of every RMS norm.
        rope: rotary embedding of layers without a sliding window, and of all layers where `rope_local` is None.
        rope_local: rotary embedding of layers with a sliding window (Gemma 3).
        layer_windows: per layer, how many tokens back (itself included) a query sees; None for all.
        activation: "silu" or "gelu_tanh".
        tie_word_embeddings: the head is the embedding matrix.
        qkv_bias: q, k and v projections have a bias.
        qk_norm: RMS norm over H of every query and key head before the rotary embedding.
        norm_offset: norms multiply by (1 + weight) (Gemma).
        post_norms: norms after attention and after the MLP as well (Gemma).
        embed_scale: factor on the embeddings, rounded to the compute dtype before it is applied.
        query_scale: factor on q . k.
        attention_soft_cap: cap * tanh(scores / cap), or None.
        final_soft_cap: the same on the logits, or None.
        num_experts: E, 0 for a dense MLP.
        experts_per_token: experts a token is routed to.
        norm_topk_prob: the chosen experts' probabilities are divided by their sum.
        bos_token_id: or None.
        eos_token_ids: tokens that end a generation.
        dtype: dtype the weights were published in: "float32", "bfloat16" or "float16".
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    query_scale: float
    rope_local: RopeConfig | None = None
    layer_windows: tuple[int | None, ...] = ()
    activation: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_offset: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    norm_topk_prob: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)

    @property
    def projections(self) -> Mapping[str, tuple[int, int]]:
        """(O, I) of every linear layer of a decoder layer that a LoRA adapter may target, by its PEFT leaf name."""
        wide, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = {
            "q_proj": (wide, self.hidden_size),
            "k_proj": (narrow, self.hidden_size),
            "v_proj": (narrow, self.hidden_size),
            "o_proj": (self.hidden_size, wide),
        }
        if self.num_experts:
            return attention
        return attention | {
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every base parameter, by its dotted path in the parameter tree; layers are stacked on axis 0.

        Matrices are kept as (O, I), the order of the checkpoints: products contract the last axis of both sides, which
        is also XLA's fast path on the CPU (1.4 ms against 2.2 for 8 rows of bfloat16 on 2048 x 8192).
        """
        c = self
        layer: dict[str, tuple[int, ...]] = {"input_norm": (c.hidden_size,), "pre_mlp_norm": (c.hidden_size,)}
        if c.post_norms:
            layer |= {"post_attention_norm": (c.hidden_size,), "post_mlp_norm": (c.hidden_size,)}
        layer |= c.projections
        if c.qkv_bias:
            layer |= {f"{p}_bias": (c.projections[p][0],) for p in ("q_proj", "k_proj", "v_proj")}
        if c.qk_norm:
            layer |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
        if c.num_experts:
            layer |= {
                "router": (c.num_experts, c.hidden_size),
                "expert_gate": (c.num_experts, c.intermediate_size, c.hidden_size),
                "expert_up": (c.num_experts, c.intermediate_size, c.hidden_size),
                "expert_down": (c.num_experts, c.hidden_size, c.intermediate_size),
            }
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (c.vocab_size, c.hidden_size),
            "final_norm": (c.hidden_size,),
        }
        if not c.tie_word_embeddings:
            shapes["head"] = (c.vocab_size, c.hidden_size)
        shapes |= {f"layers.{name}": (c.num_layers, *shape) for name, shape in layer.items()}
        return shapes
