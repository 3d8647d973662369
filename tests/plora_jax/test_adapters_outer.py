import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.convert import Conversion, convert
from plora_jax.adapters import (
    EMBEDDING,
    HEAD,
    OUTSIDE,
    AdapterError,
    ModuleId,
    load_adapter,
    module_size,
    peft_fields,
    save_adapter,
    save_adapter_orbax,
)
from plora_jax.checkpoints import load_model
from plora_jax.model import Decoder
from plora_jax.model.dense import DenseContext, LoraWeights, forward_full
from tests.plora_jax.adapters_for_tests import (
    EMBEDDING_KEY,
    HEAD_KEY,
    MODEL,
    PACK,
    lora_tensors,
    outer_tensors,
    write_peft,
)

GOLDEN = PACK / "adapters" / "embed_head_lora"
EMBEDDING_ID, HEAD_ID = ModuleId(OUTSIDE, EMBEDDING), ModuleId(OUTSIDE, HEAD)
TIED = dataclasses.replace(MODEL, tie_word_embeddings=True)


def load(path, config=MODEL, **options):
    return load_adapter(path, name="x", config=config, **options)


def refusal(path, config=MODEL, **options) -> str:
    with pytest.raises(AdapterError) as error:
        load(path, config, **options)
    return str(error.value)


def base_params(seed: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((256, 64), dtype=np.float32) for name in ("embedding", "head")}


def with_copies(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    copies = {
        f"{EMBEDDING_KEY}.base_layer.weight": params["embedding"],
        f"{HEAD_KEY}.base_layer.weight": params["head"],
    }
    return outer_tensors() | copies


def tied_tensors() -> dict[str, np.ndarray]:
    tensors = outer_tensors()
    tensors[f"{HEAD_KEY}.lora_A.weight"] = np.ascontiguousarray(tensors[f"{EMBEDDING_KEY}.lora_embedding_B"].T)
    tensors[f"{HEAD_KEY}.lora_B.weight"] = np.ascontiguousarray(tensors[f"{EMBEDDING_KEY}.lora_embedding_A"].T)
    return tensors


def only(tensors: dict[str, np.ndarray], start: str) -> dict[str, np.ndarray]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(start)}


def test_module_id_path_names_layers_and_what_is_outside_them():
    assert (ModuleId(2, "q_proj").path, EMBEDDING_ID.path, HEAD_ID.path) == (
        "layers.2.q_proj",
        "embed_tokens",
        "lm_head",
    )
    assert (module_size(EMBEDDING, MODEL), module_size(HEAD, MODEL)) == ((64, 256), (256, 64))


def test_load_adapter_with_embedding_and_head_of_the_pack_carries_them():
    model = load_model(PACK / "models" / "llama", dtype="float32")
    adapter = load(GOLDEN, model.config, base_weights=lambda: model.params)
    assert set(adapter.modules) == {EMBEDDING_ID, HEAD_ID} | {ModuleId(i, "q_proj") for i in range(3)}
    assert {(m.rank, m.scale) for m in adapter.modules.values()} == {(4, 2.0)}
    stored = load_file(GOLDEN / "adapter_model.safetensors")
    np.testing.assert_array_equal(adapter.modules[EMBEDDING_ID].a, stored[f"{EMBEDDING_KEY}.lora_embedding_A"])
    np.testing.assert_array_equal(adapter.modules[EMBEDDING_ID].b, stored[f"{EMBEDDING_KEY}.lora_embedding_B"])
    np.testing.assert_array_equal(adapter.modules[HEAD_ID].a, stored[f"{HEAD_KEY}.lora_A.weight"])
    np.testing.assert_array_equal(adapter.modules[HEAD_ID].b, stored[f"{HEAD_KEY}.lora_B.weight"])


@pytest.mark.parametrize("prompt", range(4))
def test_embedding_and_head_of_the_pack_applied_by_hand_give_the_golden_logits(prompt):
    model = load_model(PACK / "models" / "llama", dtype="float32")
    modules, config, params = load(GOLDEN, model.config).modules, model.config, model.params
    with np.load(GOLDEN / "golden.npz") as golden:
        tokens, wanted = golden[f"prompt_{prompt}"], golden[f"logits_{prompt}"]
    query = [modules[ModuleId(layer, "q_proj")] for layer in range(config.num_layers)]
    a, b = jnp.stack([m.a for m in query]), jnp.stack([m.b for m in query])
    lora = LoraWeights({"q_proj": a}, {"q_proj": b}, 2.0)
    embedding, head = modules[EMBEDDING_ID], modules[HEAD_ID]
    decoder, batch = Decoder(config), jnp.asarray(tokens)[None]
    x = decoder.embed(params, batch, np.float32) + embedding.scale * (embedding.a.T[tokens] @ embedding.b.T)[None]
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    hidden, _ = decoder.layers(params, x, (), DenseContext(config, positions, lora))
    logits = decoder.logits(params, hidden) + head.scale * (hidden @ head.a.T) @ head.b.T
    np.testing.assert_allclose(logits[0, -len(wanted) :], wanted, atol=2e-4)
    without = forward_full(params, config, batch, lora=lora)
    assert np.abs(np.asarray(without)[0, -len(wanted) :] - wanted).max() > 0.1


@pytest.mark.parametrize(
    "rename",
    [
        lambda k: k.removeprefix("base_model.model."),
        lambda k: k.removeprefix("base_model.model.").removeprefix("model."),
        lambda k: k.replace("_A.weight", "_A.default.weight").replace("_B.weight", "_B.default.weight") + "",
        lambda k: f"{k}.weight" if "embedding" in k else k,
        lambda k: k.replace("model.model.embed", "model.model.language_model.embed"),
        lambda k: k.replace("model.model.embed", "model.language_model.model.embed").replace(
            "model.lm_head", "model.language_model.lm_head"
        ),
    ],
    ids=["no prefix", "bare", "plain embedding", "embedding with weight", "multimodal 5", "multimodal 4"],
)
def test_load_adapter_accepts_every_form_of_names_outside_the_layers(rename, tmp_path):
    tensors = outer_tensors()
    renamed = {rename(k): v for k, v in tensors.items()}
    if any(".default." in k for k in renamed):
        renamed = {f"{k}.default" if "embedding" in k else k: v for k, v in renamed.items()}
    fields = {"rank_pattern": {"embed_tokens": 4}, "alpha_pattern": {"model.embed_tokens": 2, "lm_head": 12}, "r": 4}
    modules = load(write_peft(tmp_path / "a", renamed, **fields)).modules
    assert set(modules) == {EMBEDDING_ID, HEAD_ID}
    assert modules[HEAD_ID].scale == 3.0
    np.testing.assert_array_equal(modules[EMBEDDING_ID].a, tensors[f"{EMBEDDING_KEY}.lora_embedding_A"])
    np.testing.assert_array_equal(modules[HEAD_ID].b, tensors[f"{HEAD_KEY}.lora_B.weight"])


@pytest.mark.parametrize("name", ["embed_tokens.lora_embedding_A.default.weight", "embed_tokens.lora_embedding_A.x"])
def test_load_adapter_embedding_named_for_its_adapter_is_paired(name, tmp_path):
    other = name.replace("_A", "_B")
    tensors = outer_tensors()
    pair = {
        name: tensors[f"{EMBEDDING_KEY}.lora_embedding_A"],
        other: tensors[f"{EMBEDDING_KEY}.lora_embedding_B"],
    }
    modules = load(write_peft(tmp_path / "a", pair, alpha_pattern={"model.embed_tokens": 2})).modules
    assert (set(modules), modules[EMBEDDING_ID].scale) == ({EMBEDDING_ID}, 0.5)


def test_load_adapter_rules_outside_the_layers_follow_patterns_and_rslora(tmp_path):
    tensors = lora_tensors() | only(outer_tensors(rank=16), HEAD_KEY) | only(outer_tensors(rank=9), EMBEDDING_KEY)
    fields = {"rank_pattern": {"lm_head": 16, "embed_tokens": 9}, "alpha_pattern": {"embed_.*": 6}, "use_rslora": True}
    modules = load(write_peft(tmp_path / "a", tensors, **fields)).modules
    assert (modules[HEAD_ID].rank, modules[HEAD_ID].scale) == (16, 2.0)
    assert (modules[EMBEDDING_ID].rank, modules[EMBEDDING_ID].scale) == (9, 2.0)
    assert modules[ModuleId(0, "q_proj")].scale == 4.0


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        (f"{EMBEDDING_KEY}.lora_embedding_A", (4, 257), "embed_tokens of the base model needs [rank, 256]"),
        (f"{EMBEDDING_KEY}.lora_embedding_B", (4, 64), "embed_tokens of the base model needs [64, 4]"),
        (f"{HEAD_KEY}.lora_A.weight", (4, 256), "lm_head of the base model needs [rank, 64]"),
        (f"{HEAD_KEY}.lora_B.weight", (255, 4), "lm_head of the base model needs [256, 4]"),
    ],
)
def test_load_adapter_with_a_wrong_shape_outside_the_layers_says_got_and_wanted(name, shape, text, tmp_path):
    path = write_peft(tmp_path / "a", outer_tensors() | {name: np.ones(shape, np.float32)})
    assert f"tensor {name} has shape {list(shape)}; {text}" in refusal(path)


def test_load_adapter_outside_the_layers_is_held_to_rank_limit_finite_values_and_pairs(tmp_path):
    tensors = outer_tensors()
    path = write_peft(tmp_path / "a", tensors)
    assert "has rank 4 at embed_tokens; this server holds rank <= 3" in refusal(path, max_lora_rank=3)
    assert "gives rank 8 at lm_head (rank_pattern['lm_head']=8)" in refusal(
        write_peft(tmp_path / "b", tensors, rank_pattern={"lm_head": 8})
    )
    half = {k: v for k, v in tensors.items() if not k.endswith("embedding_B")}
    assert f"has {EMBEDDING_KEY}.lora_embedding_A without its lora_embedding_B" in refusal(
        write_peft(tmp_path / "c", half)
    )
    tensors[f"{EMBEDDING_KEY}.lora_embedding_A"][2, 200] = np.nan
    assert f"tensor {EMBEDDING_KEY}.lora_embedding_A has NaN or Inf" in refusal(write_peft(tmp_path / "d", tensors))


@pytest.mark.parametrize(
    "tensor",
    [f"{EMBEDDING_KEY}.lora_A.weight", f"{HEAD_KEY}.lora_embedding_A", "base_model.model.visual.embed_tokens.lora_A.x"],
)
def test_load_adapter_with_a_name_that_peft_does_not_write_outside_the_layers_is_refused(tensor, tmp_path):
    path = write_peft(tmp_path / "a", lora_tensors() | {tensor: np.ones((4, 64), np.float32)})
    message = refusal(path)
    assert f"has 1 tensors that match no module: {tensor};" in message
    assert "embed_tokens and lm_head" in message


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("served", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_load_adapter_drops_copies_of_the_base_in_any_dtype(stored, served, tmp_path):
    params = base_params()
    tensors = with_copies({k: v.astype(stored) for k, v in params.items()})
    base = {k: jnp.asarray(v.astype(stored).astype(np.float32)).astype(served) for k, v in params.items()}
    adapter = load(write_peft(tmp_path / "a", tensors), base_weights=lambda: base)
    assert set(adapter.modules) == {EMBEDDING_ID, HEAD_ID}


@pytest.mark.parametrize(
    ("leaf", "param", "feature"), [(EMBEDDING_KEY, "embedding", "embedding"), (HEAD_KEY, "head", "head")]
)
def test_load_adapter_with_a_copy_that_differs_from_the_base_is_refused(leaf, param, feature, tmp_path):
    params = base_params()
    changed = params | {param: params[param] + 0.01 * (np.arange(256) > 253)[:, None].astype(np.float32)}
    message = refusal(write_peft(tmp_path / "a", with_copies(changed)), base_weights=lambda: params)
    assert f"full {feature} weights (tensor {leaf}.base_layer.weight differs from the base in 2 of 256 rows)" in message
    assert "save_embedding_layers=False" in message


def test_load_adapter_with_a_copy_of_a_resized_vocabulary_is_refused_without_the_base(tmp_path):
    tensors = with_copies(base_params()) | {f"{HEAD_KEY}.base_layer.weight": np.ones((300, 64), np.float32)}
    assert "full head weights (tensor" in refusal(write_peft(tmp_path / "a", tensors))
    assert "has shape [300, 64]; that of the base is [256, 64]" in refusal(write_peft(tmp_path / "b", tensors))


def test_load_adapter_with_a_tied_base_compares_the_head_with_the_embedding(tmp_path):
    embedding = base_params()["embedding"]
    path = write_peft(tmp_path / "a", with_copies({"embedding": embedding, "head": embedding}))
    assert HEAD_ID in load(path, TIED, base_weights=lambda: {"embedding": embedding}).modules


def test_load_adapter_with_a_copy_but_without_lora_there_is_refused(tmp_path):
    tensors = with_copies(base_params())
    del tensors[f"{HEAD_KEY}.lora_A.weight"], tensors[f"{HEAD_KEY}.lora_B.weight"]
    path = write_peft(tmp_path / "a", tensors)
    assert f"full head weights (tensor {HEAD_KEY}.base_layer.weight)" in refusal(path)


@pytest.mark.parametrize("part", [EMBEDDING_KEY, HEAD_KEY])
def test_load_adapter_on_tied_weights_changes_only_the_place_it_names(part, tmp_path):
    tensors = only(outer_tensors(), part)
    assert len(load(write_peft(tmp_path / "a", tensors), TIED).modules) == 1


def test_load_adapter_with_weight_tying_is_served_where_it_is_what_the_tensors_say(tmp_path):
    path = write_peft(tmp_path / "a", tied_tensors(), ensure_weight_tying=True)
    assert set(load(path, TIED).modules) == {EMBEDDING_ID, HEAD_ID}
    # Nothing is tied in a base that does not tie them, nor without LoRA there.
    assert len(load(write_peft(tmp_path / "b", outer_tensors(), ensure_weight_tying=True)).modules) == 2
    assert len(load(write_peft(tmp_path / "c", ensure_weight_tying=True), TIED).modules) == 6


@pytest.mark.parametrize("save", [None, save_adapter_orbax])
@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (outer_tensors(), "the matrices of lm_head are not the transposed ones of embed_tokens"),
        (only(outer_tensors(), EMBEDDING_KEY), "there is LoRA of embed_tokens only"),
        (only(outer_tensors(), HEAD_KEY), "there is LoRA of lm_head only"),
    ],
)
def test_load_adapter_with_weight_tying_that_the_tensors_do_not_have_is_refused(save, tensors, problem, tmp_path):
    path = write_peft(tmp_path / "a", tensors, ensure_weight_tying=True)
    if save is not None:
        save(load(path), tmp_path / "b")
        path = tmp_path / "b"
    message = refusal(path, TIED)
    assert "does not serve: ensure_weight_tying (field ensure_weight_tying=true" in message
    assert problem in message


@pytest.mark.parametrize("save", [save_adapter, save_adapter_orbax])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_save_with_embedding_and_head_loads_equal(save, dtype, tmp_path):
    tensors = lora_tensors() | only(outer_tensors(rank=16), HEAD_KEY) | only(outer_tensors(rank=9), EMBEDDING_KEY)
    fields = {"rank_pattern": {"lm_head": 16, "embed_tokens": 9}, "alpha_pattern": {"embed_tokens": 7}}
    adapter = load(write_peft(tmp_path / "a", tensors, **fields), dtype=dtype)
    save(adapter, tmp_path / "saved")
    got = load(tmp_path / "saved")
    assert set(got.modules) == set(adapter.modules)
    for module, matrices in adapter.modules.items():
        assert (got.modules[module].scale, got.modules[module].a.dtype) == (matrices.scale, np.dtype(dtype))
        np.testing.assert_array_equal(got.modules[module].a, matrices.a)
        np.testing.assert_array_equal(got.modules[module].b, matrices.b)


def test_save_adapter_with_embedding_and_head_writes_the_names_of_peft(tmp_path):
    save_adapter(load(GOLDEN), tmp_path / "saved")
    theirs = load_file(GOLDEN / "adapter_model.safetensors")
    ours = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert set(ours) == {name for name in theirs if "base_layer" not in name}
    fields = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (fields["target_modules"], fields["layers_to_transform"]) == (["q_proj", "embed_tokens", "lm_head"], None)


def test_peft_fields_with_some_layers_and_the_head_list_modules_since_peft_would_leave_the_head_out(tmp_path):
    tensors = lora_tensors(("q_proj",), layers=(1,)) | only(outer_tensors(), HEAD_KEY)
    fields = peft_fields(load(write_peft(tmp_path / "a", tensors)))
    assert fields["target_modules"] == ["lm_head", "layers.1.self_attn.q_proj"]
    assert fields["layers_to_transform"] is None
    alone = peft_fields(load(write_peft(tmp_path / "b", outer_tensors())))
    assert (alone["target_modules"], alone["layers_to_transform"]) == (["embed_tokens", "lm_head"], None)


def test_convert_adapter_with_embedding_and_head_to_orbax_and_back_keeps_them(tmp_path):
    base = str(PACK / "models" / "llama")
    convert(Conversion(input=base, adapter=str(GOLDEN), output=str(tmp_path / "o"), to="orbax"))
    convert(Conversion(input=base, adapter=str(tmp_path / "o"), output=str(tmp_path / "p"), to="hf"))
    wanted = load(GOLDEN).modules
    for folder in ("o", "p"):
        got = load(tmp_path / folder).modules
        assert got.keys() == wanted.keys()
        for module, matrices in wanted.items():
            assert got[module].scale == matrices.scale
            np.testing.assert_array_equal(got[module].a, matrices.a)
            np.testing.assert_array_equal(got[module].b, matrices.b)


def test_convert_adapter_with_a_changed_copy_of_the_embedding_is_refused(tmp_path):
    tensors = load_file(GOLDEN / "adapter_model.safetensors")
    tensors[f"{EMBEDDING_KEY}.base_layer.weight"][3, 3] += 1
    path = write_peft(tmp_path / "a", tensors)
    with pytest.raises(AdapterError, match=r"full embedding weights .* in 1 of 256 rows"):
        convert(
            Conversion(input=str(PACK / "models" / "llama"), adapter=str(path), output=str(tmp_path / "o"), to="hf")
        )
