import dataclasses
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from plora_jax.adapters import AdapterError, ModuleId, load_adapter
from tests.plora_jax.adapters_for_tests import MODEL, PACK, key, lora_tensors, pack_model, write_peft

INDEX = json.loads((PACK / "index.json").read_text())["adapters"]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# name: projections, layers, and the set of (rank, scale), worked out by hand from index.json.
SERVED = {
    "plain_qv": (("q_proj", "v_proj"), (0, 1, 2), {(4, 2.0)}),
    "all_linear": (ALL, (0, 1, 2), {(8, 2.0)}),
    "alpha_ne_r": (("q_proj", "o_proj"), (0, 1, 2), {(4, 8.0)}),
    "rslora": (ALL, (0, 1, 2), {(16, 4.0)}),
    "rank_alpha_pattern": (("q_proj", "v_proj"), (0, 1, 2), {(8, 2.0), (32, 4.0), (2, 8.0)}),
    "regex_targets": (("q_proj", "v_proj"), (0, 1), {(4, 2.0)}),
    "one_layer": (("q_proj", "down_proj"), (1,), {(4, 2.0)}),
    "exclude": (("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), (0, 1, 2), {(4, 2.0)}),
    "q_only_gqa": (("q_proj",), (0, 1, 2), {(4, 2.0)}),
    "gate_only": (("gate_proj",), (0, 1, 2), {(4, 2.0)}),
    "rank1": (ALL, (0, 1, 2), {(1, 1.0)}),
    "rank48": (ALL, (0, 1, 2), {(48, 0.5)}),
    "qwen2_all": (ALL, (0, 1, 2), {(8, 2.0)}),
    "qwen3_all": (ALL, (0, 1, 2), {(8, 2.0)}),
    "mistral_all": (ALL, (0, 1, 2), {(8, 2.0)}),
    "llama31_all": (ALL, (0, 1, 2), {(8, 2.0)}),
    "gemma2_all": (ALL, (0, 1, 2), {(8, 2.0)}),
    "mixtral_attn": (ALL[:4], (0, 1, 2), {(8, 2.0)}),
}
REFUSED = {
    "lora_bias": ["lora_bias (field lora_bias=true; tensor ", ".mlp.down_proj.lora_B.bias"],
    "bias_all_qwen2": ['bias (field bias="all"; tensor ', "self_attn.q_proj.base_layer.bias"],
    "modules_to_save_head": [
        'modules_to_save (field modules_to_save=["lm_head"])',
        "full head weights (tensor base_model.model.lm_head.weight)",
    ],
    "dora": ["DoRA (field use_dora=true; tensor ", ".mlp.up_proj.lora_magnitude_vector", "and 7 more"],
}


def load(path, **options):
    return load_adapter(path, name="x", config=options.pop("config", MODEL), **options)


def test_conformance_pack_is_covered():
    assert set(INDEX) == set(SERVED) | set(REFUSED) | {"embed_head_lora"}  # test_adapters_outer.py


@pytest.mark.parametrize("name", SERVED)
def test_load_adapter_of_the_pack_has_its_modules_ranks_and_scales(name):
    projections, layers, rules = SERVED[name]
    adapter = load(PACK / "adapters" / name, config=pack_model(INDEX[name]["base"]), max_lora_rank=64)
    assert set(adapter.modules) == {ModuleId(layer, p) for layer in layers for p in projections}
    assert {(m.rank, m.scale) for m in adapter.modules.values()} == rules
    stored = load_file(PACK / "adapters" / name / "adapter_model.safetensors")
    for module, matrices in adapter.modules.items():
        np.testing.assert_array_equal(matrices.a, stored[key(*module, "A")])
        np.testing.assert_array_equal(matrices.b, stored[key(*module, "B")])


def test_load_adapter_gives_patterns_to_the_modules_they_name():
    modules = load(PACK / "adapters" / "rank_alpha_pattern").modules
    assert (modules[ModuleId(1, "q_proj")].rank, modules[ModuleId(1, "q_proj")].scale) == (32, 4.0)
    assert (modules[ModuleId(0, "q_proj")].rank, modules[ModuleId(1, "v_proj")].rank) == (8, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_load_adapter_of_the_pack_with_another_feature_names_it(name):
    with pytest.raises(AdapterError) as error:
        load(PACK / "adapters" / name, config=pack_model(INDEX[name]["base"]))
    for text in [f"adapter 'x' needs what this server does not serve: {REFUSED[name][0]}", *REFUSED[name][1:]]:
        assert text.removeprefix("adapter 'x' needs what this server does not serve: ") in str(error.value)


@pytest.mark.parametrize(
    "rename",
    [
        lambda k: k.removeprefix("base_model.model."),
        lambda k: k.removeprefix("base_model.model.model."),
        lambda k: k.replace(".weight", ".default.weight"),
        lambda k: k.replace(".weight", ".my-adapter_2.weight").removeprefix("base_model.model."),
        lambda k: k.replace("base_model.model.model.", "base_model.model."),
        lambda k: k.replace("model.layers", "model.language_model.layers"),
        lambda k: k.replace("model.model.layers", "model.language_model.model.layers"),
    ],
    ids=["no prefix", "bare", "default", "named", "headless model", "multimodal 5", "multimodal 4"],
)
def test_load_adapter_accepts_every_form_of_names(rename, tmp_path):
    fields = {"rank_pattern": {"layers.1.self_attn.q_proj": 4}, "alpha_pattern": {"layers.1.self_attn.q_proj": 4}}
    tensors = {rename(k): v for k, v in lora_tensors().items()}
    renamed = load(write_peft(tmp_path / "a", tensors, **fields)).modules
    plain = load(write_peft(tmp_path / "b", lora_tensors(), **fields)).modules
    assert set(renamed) == set(plain)
    assert all(renamed[m].scale == (1.0 if m == (1, "q_proj") else 2.0) for m in renamed)
    assert all(np.array_equal(renamed[m].a, plain[m].a) and np.array_equal(renamed[m].b, plain[m].b) for m in plain)


def test_load_adapter_full_path_pattern_applies_to_names_without_any_prefix(tmp_path):
    tensors = {k.removeprefix("base_model.model.model."): v for k, v in lora_tensors().items()}
    fields = {"alpha_pattern": {"model.layers.1.self_attn.q_proj": 4}}
    assert load(write_peft(tmp_path / "a", tensors, **fields)).modules[ModuleId(1, "q_proj")].scale == 1.0


def test_load_adapter_fused_projections_share_a_and_cut_b_by_rows(tmp_path):
    rng = np.random.default_rng(1)
    shapes = {"self_attn.qkv_proj": 64 + 16 + 16, "mlp.gate_up_proj": 2 * 112}
    tensors = {}
    for path, rows in shapes.items():
        tensors[f"base_model.model.model.layers.2.{path}.lora_A.weight"] = rng.random((4, 64), dtype=np.float32)
        tensors[f"base_model.model.model.layers.2.{path}.lora_B.weight"] = rng.random((rows, 4), dtype=np.float32)
    fields = {"target_modules": ["qkv_proj", "gate_up_proj"], "alpha_pattern": {"qkv_proj": 2}}
    modules = load(write_peft(tmp_path / "a", tensors, **fields)).modules
    for path, parts, scale in (
        ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"), 0.5),
        ("mlp.gate_up_proj", ("gate_proj", "up_proj"), 2.0),
    ):
        cut = [modules[ModuleId(2, p)] for p in parts]
        a, b = (tensors[f"base_model.model.model.layers.2.{path}.lora_{x}.weight"] for x in "AB")
        np.testing.assert_array_equal(np.concatenate([m.scale * m.b @ m.a for m in cut]), scale * b @ a)
        assert [m.b.shape[0] for m in cut] == [MODEL.projections[p][0] for p in parts]
    assert len(modules) == 5


@pytest.mark.parametrize("stored", [np.float16, np.float32, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("wanted", [None, np.float32, ml_dtypes.bfloat16])
def test_load_adapter_casts_to_the_dtype_asked_for(stored, wanted, tmp_path):
    tensors = {k: v.astype(stored) for k, v in lora_tensors().items()}
    matrices = load(write_peft(tmp_path / "a", tensors), dtype=wanted).modules[ModuleId(0, "q_proj")]
    expected = tensors[key(0, "q_proj", "A")].astype(wanted or stored)
    assert matrices.a.dtype == matrices.b.dtype == np.dtype(wanted or stored)
    np.testing.assert_array_equal(matrices.a, expected)


def test_load_adapter_outlives_its_files_and_ignores_others(tmp_path):
    path = write_peft(tmp_path / "a")
    (path / "README.md").write_text("hello")
    (path / "adapter_model.bin").write_bytes(b"never read")
    (path / "optimizer.pt").write_bytes(b"")
    tensors = lora_tensors()
    adapter = load(path)
    shutil.rmtree(path)
    np.testing.assert_array_equal(adapter.modules[ModuleId(2, "v_proj")].b, tensors[key(2, "v_proj", "B")])
    assert (adapter.name, adapter.path, adapter.config["r"]) == ("x", str(path), 4)


def test_load_adapter_twice_gives_two_identities(tmp_path):
    path = write_peft(tmp_path / "a")
    assert load(path).identity != load(path).identity


def test_load_adapter_at_the_rank_limit_is_served_and_above_it_is_refused(tmp_path):
    path = write_peft(tmp_path / "a")
    assert load(path, max_lora_rank=4).max_rank == 4
    with pytest.raises(AdapterError) as error:
        load(path, max_lora_rank=3)
    wanted = "adapter 'x' has rank 4 at layers.0.q_proj; this server holds rank <= 3: raise --max_lora_rank"
    assert str(error.value) == wanted


def test_load_adapter_pattern_rank_above_the_limit_is_refused(tmp_path):
    tensors = lora_tensors() | lora_tensors(("v_proj",), rank=80, layers=(1,))
    path = write_peft(tmp_path / "a", tensors, rank_pattern={"layers.1.self_attn.v_proj": 80})
    with pytest.raises(AdapterError, match=r"has rank 80 at layers\.1\.v_proj; this server holds rank <= 64"):
        load(path, max_lora_rank=64)
    # A pattern that names no module of the file changes nothing.
    assert load(write_peft(tmp_path / "b", rank_pattern={"k_proj": 80}), max_lora_rank=64).max_rank == 4


def test_load_adapter_on_experts_model_takes_attention_only(tmp_path):
    config = dataclasses.replace(MODEL, architecture="mixtral", num_experts=4, experts_per_token=2)
    assert len(load(write_peft(tmp_path / "a"), config=config).modules) == 6
    with pytest.raises(AdapterError, match=r"match no module: .*mlp\.gate_proj\.lora_A.*each with q_proj, k_proj, v"):
        load(write_peft(tmp_path / "b", lora_tensors(("gate_proj",))), config=config)
