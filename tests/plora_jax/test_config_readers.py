"""config.json in both forms, and every refusal with its text."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest

from plora_jax.checkpoints import load_hf_config, read_hf_config, write_hf_config
from plora_jax.config import ConfigError, RopeConfig

MODELS = pathlib.Path(__file__).parents[1] / "data" / "conformance" / "models"
NAMES = sorted(p.name for p in MODELS.iterdir())


def fields_of(name: str) -> dict[str, Any]:
    return json.loads((MODELS / name / "config.json").read_text())


def as_transformers_4(fields: dict[str, Any]) -> dict[str, Any]:
    """The same model as transformers 4 would have written it."""
    old = {k: v for k, v in fields.items() if k not in ("dtype", "rope_parameters", "layer_types")}
    old["torch_dtype"] = fields["dtype"]
    rope = fields["rope_parameters"]
    if fields["model_type"] == "gemma3_text":
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        old["sliding_window_pattern"] = 2
    old["rope_theta"] = rope["rope_theta"]
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    old["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    if fields["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    return old


@pytest.mark.parametrize("name", NAMES)
def test_read_hf_config_both_forms_agree(name: str) -> None:
    fields = fields_of(name)
    assert read_hf_config(as_transformers_4(fields)) == read_hf_config(fields)


@pytest.mark.parametrize("name", NAMES)
def test_write_hf_config_read_back_is_equal(name: str) -> None:
    config = read_hf_config(fields_of(name))
    assert read_hf_config(json.loads(json.dumps(write_hf_config(config)))) == config


def test_read_hf_config_llama31_reads_rope_scaling() -> None:
    config = read_hf_config(fields_of("llama31_rope"))
    assert config.rope == RopeConfig(
        theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )


def test_read_hf_config_linear_rope_by_its_oldest_name_is_read() -> None:
    config = read_hf_config(as_transformers_4(fields_of("llama")) | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert config.rope == RopeConfig(theta=10000.0, kind="linear", factor=2.0)


def test_read_hf_config_gemma2_reads_what_makes_it_gemma() -> None:
    config = read_hf_config(fields_of("gemma2"))
    assert config.layer_windows == (8, None, 8)
    assert (config.attention_soft_cap, config.final_soft_cap) == (50.0, 30.0)
    assert (config.embed_scale, config.query_scale) == (8.0, 0.25)
    assert config.norm_offset
    assert config.post_norms
    assert config.activation == "gelu_tanh"


def test_read_hf_config_published_gemma3_with_vision_tower_fills_in_defaults() -> None:
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eos_token_id": [1, 106],
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    config = read_hf_config(published)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert config.rope_local == RopeConfig(theta=1e4)
    assert [i for i, w in enumerate(config.layer_windows) if w is None] == [5, 11, 17, 23, 29]
    assert set(config.layer_windows) == {None, 1024}
    assert config.eos_token_ids == (1, 106)
    assert config.dtype == "bfloat16"
    assert config.tie_word_embeddings
    assert config.embed_scale == math.sqrt(2560)


def test_read_hf_config_qwen2_window_starts_at_max_window_layers() -> None:
    old = as_transformers_4(fields_of("qwen2_bias"))
    old |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    assert read_hf_config(old).layer_windows == (None, 16, 16)
    assert read_hf_config(old | {"use_sliding_window": False}).layer_windows == (None, None, None)


def test_read_hf_config_absent_fields_take_the_defaults_of_transformers() -> None:
    small = {"model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "torch_dtype": "torch.float16"}
    config = read_hf_config(small)
    assert config.layer_windows == (4096, 4096)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 2)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2,), "float16")
    assert not read_hf_config(small | {"model_type": "llama"}).tie_word_embeddings
    assert read_hf_config(small | {"model_type": "llama"}).num_kv_heads == 32
    assert read_hf_config(small | {"model_type": "qwen3"}).head_dim == 128
    assert read_hf_config(small | {"model_type": "gemma2"}).tie_word_embeddings
    assert read_hf_config(small | {"model_type": "mixtral"}).rope.theta == 1e6
    assert not read_hf_config(small | {"model_type": "qwen3_moe"}).norm_topk_prob


def test_read_hf_config_eos_of_generation_config_come_first_and_once() -> None:
    config = read_hf_config(fields_of("llama") | {"eos_token_id": [7, 2]}, generation={"eos_token_id": [9, 7]})
    assert config.eos_token_ids == (9, 7, 2)


def test_load_hf_config_without_dtype_takes_that_of_the_tensors(tmp_path: pathlib.Path) -> None:
    fields = {k: v for k, v in fields_of("llama").items() if k != "dtype"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    header = json.dumps({"x": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    assert load_hf_config(tmp_path).dtype == "bfloat16"


REFUSALS = [
    ("llama", {"model_type": "mamba"}, "model_type = 'mamba' is not supported; supported: llama, mistral"),
    ("llama", {"attention_bias": True}, "attention_bias = True is not supported for llama; supported: false"),
    ("llama", {"mlp_bias": True}, "mlp_bias = True is not supported for llama"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported for qwen3"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved = True is not supported"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported for llama; supported: 1.0"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported for llama"),
    ("llama", {"auto_map": {"AutoModel": "x.y"}}, "auto_map = {'AutoModel': 'x.y'} is not supported"),
    ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported; supported: silu, swish"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported for gemma2"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported for gemma3_text"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not supported for qwen3_moe; supported: \[\]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported for qwen3_moe; supported: 1"),
    (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        "use_sliding_window = True with max_window_layers = 2 is not supported",
    ),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than the 8 experts"),
    ("llama", {"residual_multiplier": 0.2}, "residual_multiplier = 0.2 is no known field of llama and may change"),
    ("llama", {"dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn' is not supported; supported: float32, bfloat16"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 8"),
    ("llama", {"hidden_size": "64"}, "hidden_size = '64' in config.json; it must be a whole number"),
    ("llama", {"num_hidden_layers": None}, "num_hidden_layers = None in config.json"),
    ("mixtral", {"num_attention_heads": 6}, "num_attention_heads = 6 does not divide hidden_size = 64; give head_dim"),
    ("gemma2", {"layer_types": ["full_attention"]}, r"layer_types = \['full_attention'\] is not supported"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "it must hold sliding_attention or full_attention"),
    ("mistral_window", {"layer_types": ["full_attention"] * 3}, "every layer of mistral has sliding_attention"),
    ("gemma2", {"sliding_window": None}, "sliding_window = None in config.json"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "rope_parameters.rope_type = 'yarn' is not supported; supported: default, linear, llama3",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}},
        r"rope_parameters.mrope_section = \[1, 2\] is not supported with rope_type 'default'",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        "original_max_position_embeddings = None; rope_type 'llama3' needs a number there",
    ),
    (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_scaling.rope_type = 'dynamic' is not supported",
    ),
    (
        "gemma3",
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        "rope_parameters.rope_theta = 1000000.0 is not supported for gemma3_text",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSALS)
def test_read_hf_config_what_changes_the_maths_is_refused_by_name(
    name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hf_config(fields_of(name) | change)


def test_read_hf_config_gemma3_wrapper_with_unknown_field_is_refused() -> None:
    fields = {"model_type": "gemma3", "text_config": fields_of("gemma3"), "altup": 3}
    with pytest.raises(ConfigError, match="altup = 3 is no known field of gemma3"):
        read_hf_config(fields)


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "holds a JSON list; it must hold an object"), ("{", "is not JSON"), (None, "does not exist")],
)
def test_load_hf_config_unreadable_file_is_refused(tmp_path: pathlib.Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_hf_config(tmp_path)
