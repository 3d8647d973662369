"""Weights in and out of Hugging Face directories and Orbax checkpoints."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from plora_jax.checkpoints import (
    WeightsError,
    find_model,
    load_config,
    load_hf,
    load_model,
    load_orbax,
    save_hf,
    save_orbax,
)
from plora_jax.checkpoints.weights import flatten
from plora_jax.config import ConfigError

MODELS = pathlib.Path(__file__).parents[1] / "data" / "conformance" / "models"
NAMES = sorted(p.name for p in MODELS.iterdir())


def assert_equal_params(got: Any, wanted: Any) -> None:
    got, wanted = flatten(got), flatten(wanted)
    assert got.keys() == wanted.keys()
    for path in wanted:
        np.testing.assert_array_equal(np.asarray(got[path]), np.asarray(wanted[path]), err_msg=path)


@pytest.fixture
def editable(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the pack's llama whose files a test may change."""
    return pathlib.Path(shutil.copytree(MODELS / "llama", tmp_path / "llama"))


def edit(directory: pathlib.Path, **changes: np.ndarray | None) -> None:
    tensors = load_file(directory / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_load_hf_pack_model_has_every_parameter_in_its_shape(name: str) -> None:
    config, params = load_hf(MODELS / name)
    assert {path: a.shape for path, a in flatten(params).items()} == config.param_shapes()
    assert all(a.dtype == jnp.float32 for a in flatten(params).values())
    assert all(isinstance(a.sharding, NamedSharding) for a in flatten(params).values())


def test_load_hf_layers_and_experts_are_stacked_in_order() -> None:
    _, params = load_hf(MODELS / "mixtral")
    stored = load_file(MODELS / "mixtral" / "model.safetensors")
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.k_proj.weight"
        np.testing.assert_array_equal(params["layers"]["k_proj"][layer], stored[name])
        for leaf, letter in (("expert_gate", "w1"), ("expert_up", "w3"), ("expert_down", "w2")):
            name = f"model.layers.{layer}.block_sparse_moe.experts.3.{letter}.weight"
            np.testing.assert_array_equal(params["layers"][leaf][layer, 3], stored[name])


def test_load_hf_gemma_norms_keep_their_places() -> None:
    _, params = load_hf(MODELS / "gemma2")
    stored = load_file(MODELS / "gemma2" / "model.safetensors")
    for leaf, name in (
        ("input_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("pre_mlp_norm", "pre_feedforward_layernorm"),
        ("post_mlp_norm", "post_feedforward_layernorm"),
    ):
        np.testing.assert_array_equal(params["layers"][leaf][2], stored[f"model.layers.2.{name}.weight"])


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_load_hf_fused_experts_equal_separate_ones(tmp_path: pathlib.Path, name: str) -> None:
    config, wanted = load_hf(MODELS / name)
    stored = load_file(MODELS / name / "model.safetensors")
    tensors = {k.replace("block_sparse_moe", "mlp"): v for k, v in stored.items() if ".experts." not in k}
    layers = wanted["layers"]
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}.mlp.experts."
        fused = np.concatenate([layers["expert_gate"][i], layers["expert_up"][i]], axis=1)
        tensors[prefix + "gate_up_proj"] = fused
        tensors[prefix + "down_proj"] = np.asarray(layers["expert_down"][i])
    shutil.copy(MODELS / name / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal_params(load_hf(tmp_path)[1], wanted)


def test_load_hf_gemma3_with_vision_tower_loads_its_text_model(tmp_path: pathlib.Path) -> None:
    stored = load_file(MODELS / "gemma3" / "model.safetensors")
    tensors = {f"language_model.{name}": value for name, value in stored.items()}
    tensors["vision_tower.x"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((MODELS / "gemma3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    config, params = load_hf(tmp_path)
    wanted_config, wanted = load_hf(MODELS / "gemma3")
    assert config == wanted_config
    assert_equal_params(params, wanted)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_load_hf_stored_dtype_is_converted(editable: pathlib.Path, stored: Any) -> None:
    tensors = load_file(editable / "model.safetensors")
    save_file({k: v.astype(stored) for k, v in tensors.items()}, editable / "model.safetensors")
    _, params = load_hf(editable, dtype="bfloat16")
    wanted = tensors["model.norm.weight"].astype(stored).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(params["final_norm"]), wanted)


def test_load_hf_published_in_float16_loads_as_bfloat16(editable: pathlib.Path) -> None:
    fields = json.loads((editable / "config.json").read_text())
    (editable / "config.json").write_text(json.dumps(fields | {"dtype": "float16"}))
    assert load_model(editable).dtype == "bfloat16"


def test_load_hf_float16_on_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype 'float16' is not supported; choose auto, float32 or bfloat16"):
        load_hf(MODELS / "llama", dtype="float16")


def test_load_hf_progress_ends_at_the_bytes_of_the_parameters() -> None:
    seen: list[tuple[int, int]] = []
    _, params = load_hf(MODELS / "llama", progress=lambda done, total: seen.append((done, total)))
    total = sum(a.nbytes for a in flatten(params).values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_load_hf_sharding_is_asked_for_every_parameter() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    asked: dict[str, tuple[int, ...]] = {}

    def sharding_of(path: str, shape: tuple[int, ...]) -> NamedSharding:
        asked[path] = shape
        return NamedSharding(mesh, PartitionSpec(None, "model") if path == "layers.q_proj" else PartitionSpec())

    config, params = load_hf(MODELS / "llama", sharding_of=sharding_of)
    assert asked == config.param_shapes()
    assert params["layers"]["q_proj"].sharding.spec == PartitionSpec(None, "model")


def test_load_hf_wrong_tensors_are_all_listed_with_shapes(editable: pathlib.Path) -> None:
    edit(
        editable,
        **{
            "model.layers.1.self_attn.q_proj.weight": None,
            "model.layers.0.mlp.up_proj.weight": np.zeros((64, 112), np.float32),
            "model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32),
        },
    )
    with pytest.raises(WeightsError) as error:
        load_hf(editable)
    text = str(error.value)
    assert "1 missing: model.layers.1.self_attn.q_proj.weight [64, 64]" in text
    assert "1 not expected: model.layers.0.self_attn.q_proj.bias [64]" in text
    assert "1 misshaped: model.layers.0.mlp.up_proj.weight: got [64, 112], wanted [112, 64]" in text


def test_load_hf_extra_layer_is_refused(editable: pathlib.Path) -> None:
    edit(editable, **{"model.layers.3.input_layernorm.weight": np.zeros(64, np.float32)})
    with pytest.raises(WeightsError, match=r"1 not expected: model\.layers\.3\.input_layernorm\.weight \[64\]"):
        load_hf(editable)


def test_load_hf_extras_without_effect_are_left_out(editable: pathlib.Path, tmp_path: pathlib.Path) -> None:
    edit(editable, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)})
    load_hf(editable)
    tied = pathlib.Path(shutil.copytree(MODELS / "llama_tied", tmp_path / "tied"))
    edit(tied, **{"lm_head.weight": np.zeros((256, 64), np.float32)})
    assert "head" not in load_hf(tied)[1]


def test_load_hf_integer_tensor_is_refused(editable: pathlib.Path) -> None:
    edit(editable, **{"model.norm.weight": np.zeros(64, np.int8)})
    with pytest.raises(WeightsError, match=r"tensor model\.norm\.weight has dtype I8; supported: F64, F32, BF16, F16"):
        load_hf(editable)


def test_load_hf_truncated_file_is_refused(editable: pathlib.Path) -> None:
    file = editable / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(WeightsError, match=r"bytes\) is not a complete safetensors file.*download it again"):
        load_hf(editable)


def test_load_hf_lfs_pointer_is_refused(editable: pathlib.Path) -> None:
    (editable / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(WeightsError, match="is a Git LFS pointer, not the weights; run `git lfs pull`"):
        load_hf(editable)


def test_load_hf_pickled_weights_are_refused(editable: pathlib.Path) -> None:
    (editable / "model.safetensors").rename(editable / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"has pickled \*\.bin weights only.*save_pretrained"):
        load_hf(editable)


def test_load_hf_without_weights_is_refused(editable: pathlib.Path) -> None:
    (editable / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no weights: neither model\.safetensors nor"):
        load_hf(editable)


@pytest.mark.parametrize("name", NAMES)
def test_save_hf_read_back_is_equal_and_names_are_those_of_the_pack(tmp_path: pathlib.Path, name: str) -> None:
    config, params = load_hf(MODELS / name)
    save_hf(tmp_path, config, params)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(MODELS / name / "model.safetensors").keys()
    again_config, again = load_hf(tmp_path)
    assert again_config == config
    assert_equal_params(again, params)


def test_save_hf_over_the_file_limit_is_sharded_and_reads_back(tmp_path: pathlib.Path) -> None:
    config, params = load_hf(MODELS / "qwen3", dtype="bfloat16")
    save_hf(tmp_path, config, params, max_file_bytes=60_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    again = load_model(tmp_path)
    assert again.dtype == "bfloat16"
    assert_equal_params(again.params, params)
    shards[1].unlink()
    with pytest.raises(WeightsError, match=f"lists files that are not there: {shards[1].name}"):
        load_hf(tmp_path)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe"])
def test_save_orbax_read_back_is_equal_and_cast(tmp_path: pathlib.Path, name: str) -> None:
    config, params = load_hf(MODELS / name)
    save_orbax(tmp_path / "o", config, params, extra_files=[MODELS / name / "tokenizer.json"])
    again = load_model(tmp_path / "o")
    assert (again.config, again.dtype) == (config, "float32")
    assert_equal_params(again.params, params)
    assert (tmp_path / "o" / "tokenizer.json").read_bytes() == (MODELS / name / "tokenizer.json").read_bytes()
    _, narrow = load_orbax(tmp_path / "o", dtype="bfloat16")
    assert_equal_params(narrow, jax.tree.map(lambda a: a.astype(jnp.bfloat16), params))
    assert all(isinstance(a.sharding, NamedSharding) for a in flatten(narrow).values())


def test_load_orbax_config_that_does_not_fit_lists_arrays(tmp_path: pathlib.Path) -> None:
    config, params = load_hf(MODELS / "llama")
    save_orbax(tmp_path / "o", config, params)
    file = tmp_path / "o" / "model_config.json"
    content = json.loads(file.read_text())
    content["config"] |= {"num_layers": 4, "layer_windows": [None] * 4, "qk_norm": True, "tie_word_embeddings": True}
    file.write_text(json.dumps(content))
    with pytest.raises(WeightsError) as error:
        load_orbax(tmp_path / "o")
    text = str(error.value)
    assert "2 missing: layers.q_norm [4, 8], layers.k_norm [4, 8]" in text
    assert "1 not expected: head [256, 64]" in text
    assert "layers.q_proj: got [3, 64, 64], wanted [4, 64, 64]" in text


def test_save_orbax_over_other_files_is_refused(tmp_path: pathlib.Path) -> None:
    config, params = load_hf(MODELS / "llama")
    (tmp_path / "x").touch()
    with pytest.raises(FileExistsError, match="is not empty; choose another path"):
        save_orbax(tmp_path, config, params)


def test_load_orbax_unreadable_config_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model_config.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError, match="has format 99; this version reads 1"):
        load_orbax(tmp_path)


def test_find_model_says_what_it_looked_for(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="nowhere does not exist, and nothing is downloaded; give a local Hugging"
    ):
        find_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"looked for config\.json .* found no \.gguf file"):
        find_model(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert find_model(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"found 2 \.gguf files \(a\.gguf, b\.gguf; name one\)"):
        find_model(tmp_path)


def test_load_config_equals_that_of_the_whole_model() -> None:
    assert load_config(MODELS / "gemma2") == load_model(MODELS / "gemma2").config
