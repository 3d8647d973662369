"""The three tables of config.json: fields that are used, fields without effect, fields held to one value.

Whatever is in none of them is refused by the reader when it is set, because nobody can tell whether it changes the
maths.

Source: configuration_*.py of transformers 5 for the defaults; field names of transformers 4 where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_COMMON: Mapping[str, Any] = {
    "hidden_size": None,
    "num_hidden_layers": None,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "dtype": None,
    "torch_dtype": None,
    "layer_types": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}

_GEMMA: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": None,
    "_sliding_window_pattern": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

_QWEN_WINDOW: Mapping[str, Any] = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}

_SPECIFIC: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mixtral": {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "num_experts": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN_WINDOW
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,
        "max_position_embeddings": 32768,
    },
    "qwen3": _QWEN_WINDOW
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
    "qwen3_moe": _QWEN_WINDOW
    | {
        "vocab_size": 151936,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "max_window_layers": 0,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "num_local_experts": None,
        "norm_topk_prob": False,
    },
    "gemma2": _GEMMA
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": _GEMMA
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "rope_local_base_freq": 10000.0,
    },
}

USED: Mapping[str, Mapping[str, Any]] = MappingProxyType({name: _COMMON | own for name, own in _SPECIFIC.items()})
"""Fields that become part of a ModelConfig, by architecture, with transformers' defaults for absent ones."""

HELD: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "rope_interleaved": (False, None),
        "partial_rotary_factor": (1.0, None),
        "use_bidirectional_attention": (False, None),
        "attn_logit_softcapping": (None,),
        "decoder_sparse_step": (1, None),
        "mlp_only_layers": ([], None),
        "quantization_config": (None,),
        "auto_map": (None,),
        "add_cross_attention": (False, None),
        "is_encoder_decoder": (False, None),
    }
)
"""Fields that change the maths and are served with these values only."""

HARMLESS = frozenset(
    """
    model_type architectures transformers_version _name_or_path name_or_path pretraining_tp initializer_range use_cache
    attention_dropout hidden_dropout pad_token_id sep_token_id decoder_start_token_id output_router_logits
    router_aux_loss_coef router_jitter_noise cache_implementation is_llama_config transformers.js_config
    unsloth_fixed unsloth_version output_attentions output_hidden_states return_dict return_dict_in_generate
    torchscript use_bfloat16 tf_legacy_loss pruned_heads chunk_size_feed_forward is_decoder
    cross_attention_hidden_size tie_encoder_decoder problem_type finetuning_task task_specific_params
    tokenizer_class prefix id2label label2id num_labels _attn_implementation attn_implementation
    _attn_implementation_autoset _from_model_config temperature top_k top_p typical_p min_length max_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()  # noqa: SIM905 (a literal of one name a line would hide the table)
)
"""Fields that do not change what the model computes at inference."""

HARMLESS_AROUND_GEMMA3 = frozenset(
    """
    text_config vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id
    eoi_token_id image_token_id tie_word_embeddings eos_token_id bos_token_id dtype torch_dtype
    """.split()  # noqa: SIM905 (a literal of one name a line would hide the table)
)
"""Fields beside `text_config` of a Gemma 3 with a vision tower, whose text part alone is read."""
