import json
import math
import os

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from plora_jax.adapters import (
    Adapter,
    AdapterError,
    LoraMatrices,
    ModuleId,
    load_adapter,
    peft_fields,
    restore_adapter,
    save_adapter,
    save_adapter_orbax,
)
from plora_jax.adapters import files as adapter_files
from tests.plora_jax.adapters_for_tests import MODEL, PACK, lora_tensors, write_peft

SAVERS = [save_adapter, save_adapter_orbax]


def load(path, **options):
    return load_adapter(path, name="x", config=MODEL, **options)


def matrices(projection: str, *, rank: int = 4, scale: float = 2.0, dtype=np.float32) -> LoraMatrices:
    out_size, in_size = MODEL.projections[projection]
    rng = np.random.default_rng(rank)
    a, b = rng.standard_normal((rank, in_size)), rng.standard_normal((out_size, rank))
    return LoraMatrices(a.astype(dtype), b.astype(dtype), scale)


def in_memory(modules: dict[tuple[int, str], LoraMatrices], **config) -> Adapter:
    return Adapter(name="x", modules={ModuleId(*m): value for m, value in modules.items()}, config=config)


def assert_equal(got: Adapter, wanted: Adapter) -> None:
    assert set(got.modules) == set(wanted.modules)
    for module, want in wanted.modules.items():
        have = got.modules[module]
        assert have.scale == pytest.approx(want.scale, rel=1e-15)
        assert have.a.dtype == want.a.dtype
        np.testing.assert_array_equal(have.a, want.a)
        np.testing.assert_array_equal(have.b, want.b)


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("name", ["plain_qv", "rslora", "rank_alpha_pattern", "regex_targets", "one_layer", "exclude"])
def test_save_of_an_adapter_of_the_pack_loads_equal(save, name, tmp_path):
    adapter = load(PACK / "adapters" / name)
    save(adapter, tmp_path / "saved")
    assert_equal(load(tmp_path / "saved"), adapter)


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_save_keeps_the_dtype_and_load_casts(save, dtype, tmp_path):
    adapter = in_memory({(0, "q_proj"): matrices("q_proj", dtype=dtype)})
    save(adapter, tmp_path / "saved")
    assert_equal(load(tmp_path / "saved"), adapter)
    assert load(tmp_path / "saved", dtype=np.float32).modules[ModuleId(0, "q_proj")].b.dtype == np.float32


_RULES = st.fixed_dictionaries({"rank": st.sampled_from([1, 2, 3, 8]), "alpha": st.sampled_from([1, 7, 16, 0.3])})
_MODULES = st.dictionaries(
    st.tuples(st.integers(0, 2), st.sampled_from(sorted(MODEL.projections))), _RULES, min_size=1, max_size=8
)


@hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(modules=_MODULES, rslora=st.booleans())
def test_save_adapter_of_any_ranks_scales_and_layers_loads_equal(modules, rslora, tmp_path):
    adapter = in_memory(
        {
            module: matrices(
                module[1],
                rank=rule["rank"],
                scale=rule["alpha"] / (math.sqrt(rule["rank"]) if rslora else rule["rank"]),
            )
            for module, rule in modules.items()
        },
        use_rslora=rslora,
    )
    save_adapter(adapter, tmp_path / "saved", overwrite=True)
    assert_equal(load(tmp_path / "saved"), adapter)


def test_save_adapter_writes_names_and_metadata_as_peft_does(tmp_path):
    save_adapter(load(PACK / "adapters" / "plain_qv"), tmp_path / "saved")
    with (
        safe_open(tmp_path / "saved" / "adapter_model.safetensors", "np") as ours,
        safe_open(PACK / "adapters" / "plain_qv" / "adapter_model.safetensors", "np") as theirs,
    ):
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert ours.metadata() == {"format": "pt"}
    assert sorted(os.listdir(tmp_path / "saved")) == ["adapter_config.json", "adapter_model.safetensors"]
    fields = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    peft_writes = json.loads((PACK / "adapters" / "plain_qv" / "adapter_config.json").read_text())
    assert set(fields) <= set(peft_writes)
    assert {k: fields[k] for k in ("peft_type", "r", "lora_alpha", "target_modules")} == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
    }


def test_save_adapter_casts_when_asked_and_refuses_what_the_dtype_cannot_hold(tmp_path):
    adapter = in_memory({(0, "q_proj"): matrices("q_proj")})
    save_adapter(adapter, tmp_path / "half", dtype=ml_dtypes.bfloat16)
    assert load(tmp_path / "half").modules[ModuleId(0, "q_proj")].a.dtype == ml_dtypes.bfloat16
    adapter.modules[ModuleId(0, "q_proj")].a[0, 0] = 1e6
    with pytest.raises(AdapterError, match=r"q_proj\.lora_A\.weight has values beyond float16"):
        save_adapter(adapter, tmp_path / "bad", dtype=np.float16)
    assert not (tmp_path / "bad").exists()


def test_peft_fields_where_a_projection_differs_are_patterns():
    modules = {(i, p): matrices(p) for i in range(3) for p in ("q_proj", "k_proj")}
    modules |= {(i, "v_proj"): matrices("v_proj", rank=2, scale=4.0) for i in range(3)}
    modules[1, "q_proj"] = matrices("q_proj", rank=8, scale=0.5)
    fields = peft_fields(in_memory(modules, target_modules=["q_proj", "k_proj", "v_proj"]))
    assert (fields["r"], fields["lora_alpha"]) == (4, 8)
    assert fields["rank_pattern"] == {"layers.1.self_attn.q_proj": 8, "v_proj": 2}
    assert fields["alpha_pattern"] == {"layers.1.self_attn.q_proj": 4}
    assert (fields["target_modules"], fields["layers_to_transform"]) == (["k_proj", "q_proj", "v_proj"], None)


def test_peft_fields_of_some_layers_name_no_others():
    same = peft_fields(in_memory({(1, "q_proj"): matrices("q_proj"), (1, "up_proj"): matrices("up_proj")}))
    assert (same["target_modules"], same["layers_to_transform"]) == (["q_proj", "up_proj"], [1])
    mixed = peft_fields(in_memory({(0, "q_proj"): matrices("q_proj"), (1, "up_proj"): matrices("up_proj")}))
    assert mixed["target_modules"] == ["layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"]
    assert mixed["layers_to_transform"] is None


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"target_modules": ["q_proj"]}, None),
        ({"target_modules": "all-linear"}, None),
        ({}, [0, 1]),
        ({"target_modules": r".*layers\.[01]\..*q_proj"}, [0, 1]),
        ({"target_modules": ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"]}, [0, 1]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 1]}, [0, 1]),
    ],
)
def test_peft_fields_of_the_first_layers_list_them_unless_every_layer_was_meant(config, layers):
    fields = peft_fields(in_memory({(i, "q_proj"): matrices("q_proj") for i in (0, 1)}, **config))
    assert (fields["target_modules"], fields["layers_to_transform"]) == (["q_proj"], layers)


def test_peft_fields_keep_what_the_adapter_says_of_itself_but_not_how_training_began(tmp_path):
    path = write_peft(tmp_path / "a", init_lora_weights=False, base_model_name_or_path="org/base", lora_dropout=0.1)
    fields = peft_fields(load(path))
    assert (fields["base_model_name_or_path"], fields["lora_dropout"], fields["init_lora_weights"]) == (
        "org/base",
        0.1,
        True,
    )


@pytest.mark.parametrize("save", SAVERS)
def test_save_over_something_needs_to_be_asked_for(save, tmp_path):
    old, new = in_memory({(0, "q_proj"): matrices("q_proj")}), in_memory({(1, "v_proj"): matrices("v_proj")})
    (tmp_path / "saved").mkdir()
    save(old, tmp_path / "saved")
    with pytest.raises(FileExistsError, match="is there already; choose another path or overwrite it"):
        save(new, tmp_path / "saved")
    assert_equal(load(tmp_path / "saved"), old)
    save(new, tmp_path / "saved", overwrite=True)
    assert_equal(load(tmp_path / "saved"), new)
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("save", SAVERS)
def test_save_of_an_adapter_without_modules_is_refused(save, tmp_path):
    with pytest.raises(AdapterError, match="adapter 'x' has no modules: there is nothing to save"):
        save(in_memory({}), tmp_path / "saved")


def test_new_directory_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "old").write_text("old")

    def crash() -> None:
        with adapter_files.new_directory(tmp_path / "saved", overwrite=True) as fresh:
            (fresh / "new").write_text("half")
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        crash()
    assert os.listdir(tmp_path) == ["saved"]
    assert os.listdir(tmp_path / "saved") == ["old"]


def checkpoint(tmp_path, **edit):
    """An Orbax checkpoint of two modules whose JSON is then changed."""
    adapter = in_memory({(0, "q_proj"): matrices("q_proj"), (2, "up_proj"): matrices("up_proj")}, r=4, lora_alpha=8)
    save_adapter_orbax(adapter, tmp_path / "saved", overwrite=True)
    file = tmp_path / "saved" / "plora_adapter.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | edit))
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        ({"format": 9}, r"has format 9; this version reads 1"),
        ({"modules": {}}, r"must hold the objects 'config' and 'modules'"),
        (
            {"modules": {"layers.0.q_proj": {"rank": 4, "scale": 2.0}}},
            r"extra layers\.2\.up_proj\.a, layers\.2\.up_proj\.b",
        ),
        (
            {"modules": {f"layers.{m}": {"rank": 4, "scale": 2.0} for m in ("0.q_proj", "2.up_proj", "1.q_proj")}},
            r"missing layers\.1\.q_proj\.a, layers\.1\.q_proj\.b",
        ),
        (
            {"modules": {"layers.7.q_proj": {"rank": 4, "scale": 2.0}}},
            r"has 1 modules that the base model .*layers\.7\.q_p",
        ),
        ({"modules": {"layers.0.q_proj": {"rank": 4, "scale": None}}}, r"gives layers\.0\.q_proj the scale None"),
        ({"config": {"use_dora": True}}, r"needs what this server does not serve: DoRA"),
    ],
)
def test_restore_adapter_that_does_not_fit_is_refused(edit, text, tmp_path):
    with pytest.raises(AdapterError, match=f"adapter 'x'.*{text}"):
        restore_adapter(checkpoint(tmp_path, **edit), name="x", config=MODEL)


def test_restore_adapter_above_the_rank_limit_is_refused(tmp_path):
    with pytest.raises(
        AdapterError, match=r"has rank 4 at layers\.0\.q_proj; this server holds rank <= 2: raise --max"
    ):
        load(checkpoint(tmp_path), max_lora_rank=2)


def test_restore_adapter_with_nan_names_the_array(tmp_path):
    adapter = in_memory({(0, "q_proj"): matrices("q_proj")})
    adapter.modules[ModuleId(0, "q_proj")].b[0, 0] = np.nan
    save_adapter_orbax(adapter, tmp_path / "saved")
    with pytest.raises(AdapterError, match=r"layers\.0\.q_proj\.b has NaN or Inf"):
        load(tmp_path / "saved")


def test_restore_adapter_on_another_model_is_refused(tmp_path):
    out_size, _ = MODEL.projections["q_proj"]
    wide = LoraMatrices(np.ones((4, 128), np.float32), np.ones((out_size, 4), np.float32), 1.0)
    save_adapter_orbax(in_memory({(0, "q_proj"): wide}), tmp_path / "saved")
    with pytest.raises(AdapterError, match=r"layers\.0\.q_proj\.a has shape \[4, 128\]; layers\.0\.q_proj of the base"):
        load(tmp_path / "saved")


def test_restore_adapter_without_its_matrices_is_refused(tmp_path):
    path = checkpoint(tmp_path)
    (path / "matrices").rename(path / "elsewhere")
    with pytest.raises(AdapterError, match=r"/saved has no folder matrices; save it again"):
        load(path)


def test_restore_adapter_from_nowhere_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adapter 'x': .* has no plora_adapter\.json"):
        restore_adapter(tmp_path, name="x", config=MODEL)


def test_load_adapter_of_a_directory_in_both_forms_reads_that_of_peft(tmp_path):
    path = checkpoint(tmp_path)
    write_peft(path, lora_tensors(("v_proj",)))
    assert {m.projection for m in load(path).modules} == {"v_proj"}


def test_restore_adapter_with_damaged_matrices_is_refused(tmp_path):
    path = checkpoint(tmp_path)
    for file in (path / "matrices").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(AdapterError, match=r"/matrices is not a complete Orbax checkpoint: .*; save it again"):
        load(path)


def test_restore_adapter_whose_record_gives_another_rank_says_both(tmp_path):
    modules = {f"layers.{m}": {"rank": 8, "scale": 2.0} for m in ("0.q_proj", "2.up_proj")}
    with pytest.raises(AdapterError, match=r"gives rank 8 at layers\.0\.q_proj, but layers\.0\.q_proj\.a has rank 4"):
        load(checkpoint(tmp_path, modules=modules))
