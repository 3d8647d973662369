import json
import re

import ml_dtypes
import numpy as np
import pytest

from plora_jax.adapters import AdapterError, load_adapter
from plora_jax.adapters.features import FEATURES, HARMLESS_FIELDS, USED_FIELDS
from tests.plora_jax.adapters_for_tests import MODEL, PACK, key, lora_tensors, write_peft

LAYER = "base_model.model.model.layers.0"


def load(path, **options):
    return load_adapter(path, name="x", config=MODEL, **options)


def refusal(path, **options) -> str:
    with pytest.raises(AdapterError) as error:
        load(path, **options)
    assert str(error.value).startswith("adapter 'x'")
    return str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "feature"),
    [
        ("use_dora", True, "DoRA (field use_dora=true)"),
        ("lora_bias", True, "lora_bias (field lora_bias=true)"),
        ("bias", "all", 'bias (field bias="all")'),
        ("bias", "lora_only", 'bias (field bias="lora_only")'),
        ("modules_to_save", ["embed_tokens"], 'modules_to_save (field modules_to_save=["embed_tokens"])'),
        ("trainable_token_indices", [1, 2], "trainable tokens (field trainable_token_indices=[1, 2])"),
        ("trainable_token_indices", {"embed_tokens": [1]}, "trainable tokens (field"),
        ("alora_invocation_tokens", [5], "aLoRA (field alora_invocation_tokens=[5])"),
        ("layer_replication", [[0, 2], [1, 3]], "layer_replication (field layer_replication=[[0, 2], [1, 3]])"),
        ("use_qalora", True, "QALoRA (field use_qalora=true)"),
        ("use_bdlora", {"nblocks": 2}, "BD-LoRA (field use_bdlora="),
        ("arrow_config", {"top_k": 2}, "Arrow routing (field arrow_config="),
        ("kasa_config", {"beta": 1e-4}, "KaSA (field kasa_config="),
        ("velora_config", {"scale": 1.0}, "VeLoRA (field velora_config="),
        ("monteclora_config", {"num_samples": 8}, "MonteCLoRA (field monteclora_config="),
        ("target_parameters", ["mlp.experts.down_proj"], "MoE expert LoRA (field target_parameters="),
        ("megatron_config", {"num_layers": 3}, "Megatron layers (field megatron_config="),
        ("fan_in_fan_out", True, "fan_in_fan_out (field fan_in_fan_out=true)"),
        ("enable_lora", [True, False], "enable_lora (field enable_lora="),
        ("init_lora_weights", "pissa", 'PiSSA initialisation (field init_lora_weights="pissa")'),
        ("init_lora_weights", "pissa_niter_16", "PiSSA initialisation"),
        ("init_lora_weights", "olora", "OLoRA initialisation"),
        ("init_lora_weights", "corda", "CorDA initialisation"),
        ("init_lora_weights", "lora_ga", "LoRA-GA initialisation"),
        ("init_lora_weights", "loftq", "LoftQ initialisation"),
        ("init_lora_weights", "magic", 'an unknown initialisation (field init_lora_weights="magic")'),
        ("lora_next_big_thing", 3, "the unknown field lora_next_big_thing=3"),
        ("use_future", True, "the unknown field use_future=true"),
        ("scaling_offset", 0, "the unknown field scaling_offset=0"),
    ],
)
def test_load_adapter_with_a_field_that_is_not_served_names_feature_and_field(field, value, feature, tmp_path):
    assert f"needs what this server does not serve: {feature}" in refusal(write_peft(tmp_path / "a", **{field: value}))


@pytest.mark.parametrize(
    ("tensor", "shape", "feature"),
    [
        (f"{LAYER}.self_attn.q_proj.lora_magnitude_vector", [64], "DoRA"),
        (f"{LAYER}.self_attn.q_proj.lora_magnitude_vector.default.weight", [64], "DoRA"),
        (f"{LAYER}.self_attn.q_proj.lora_B.bias", [64], "lora_bias"),
        (f"{LAYER}.self_attn.q_proj.lora_B.default.bias", [64], "lora_bias"),
        (f"{LAYER}.self_attn.q_proj.base_layer.bias", [64], "bias"),
        (f"{LAYER}.self_attn.k_proj.bias", [16], "bias"),
        (f"{LAYER}.self_attn.q_proj.lora_diag", [4], "KaSA"),
        ("base_model.model.model.embed_tokens.base_layer.weight", [256, 64], "full embedding weights"),
        ("base_model.model.lm_head.base_layer.weight", [256, 64], "full head weights"),
        ("base_model.model.model.embed_tokens.weight", [256, 64], "full embedding weights"),
        ("base_model.model.model.embed_tokens.modules_to_save.weight", [256, 64], "full embedding weights"),
        ("base_model.model.lm_head.weight", [256, 64], "full head weights"),
        ("base_model.model.lm_head.modules_to_save.default.weight", [256, 64], "full head weights"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", [2, 64], "trainable tokens"),
        (f"{LAYER}.input_layernorm.weight", [64], "modules_to_save"),
        (f"{LAYER}.mlp.experts.1.gate_proj.lora_A.weight", [4, 64], "MoE expert LoRA"),
        (f"{LAYER}.block_sparse_moe.experts.1.w1.lora_B.weight", [112, 4], "MoE expert LoRA"),
        (f"{LAYER}.mlp.experts.base_layer.lora_A.weight", [16, 64], "MoE expert LoRA"),
        (f"{LAYER}.mlp.gate.lora_A.weight", [4, 64], "MoE router LoRA"),
        (f"{LAYER}.block_sparse_moe.gate.lora_A.weight", [4, 64], "MoE router LoRA"),
    ],
)
def test_load_adapter_with_a_clean_config_names_the_tensor_that_is_not_served(tensor, shape, feature, tmp_path):
    path = write_peft(tmp_path / "a", lora_tensors() | {tensor: np.ones(shape, np.float32)})
    assert f"does not serve: {feature} (tensor {tensor})" in refusal(path)


def test_load_adapter_with_several_features_names_them_all(tmp_path):
    message = refusal(write_peft(tmp_path / "a", use_dora=True, use_qalora=True, init_lora_weights="pissa"))
    assert all(
        feature in message for feature in ("DoRA", "QALoRA", "PiSSA", "path_initial_model_for_weight_conversion")
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"init_lora_weights": value}
        for value in (True, False, None, "gaussian", "eva", "orthogonal", "mica")  # leave the base's weights alone
    ]
    + [
        {"target_modules": "all-linear", "exclude_modules": ["k_proj"], "layers_to_transform": [0, 1, 2]},
        {"lora_dropout": 0.1, "inference_mode": False, "task_type": None, "peft_version": "0.99", "revision": "main"},
        {"eva_config": {"rho": 2.0}, "qalora_group_size": 32, "loftq_config": {"loftq_bits": 4}},
        {"use_dora": None, "modules_to_save": [], "use_future": False, "future_config": {}, "future_list": None},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}, "merge_weights": False},
    ],
)
def test_load_adapter_with_harmless_fields_is_served(fields, tmp_path):
    assert len(load(write_peft(tmp_path / "a", **fields)).modules) == 6


def test_feature_tables_know_every_field_that_peft_writes():
    written = json.loads((PACK / "adapters" / "plain_qv" / "adapter_config.json").read_text())
    features = {field for feature in FEATURES for field in feature.fields}
    assert set(written) <= features | USED_FIELDS | HARMLESS_FIELDS | {"init_lora_weights"}
    assert not features & (USED_FIELDS | HARMLESS_FIELDS)
    assert not USED_FIELDS & HARMLESS_FIELDS


@pytest.mark.parametrize("kind", ["IA3", "LOHA", "PREFIX_TUNING", "ADALORA", "lora"])
def test_load_adapter_of_another_peft_type_names_it(kind, tmp_path):
    path = write_peft(tmp_path / "a", peft_type=kind)
    assert refusal(path) == f"adapter 'x' has peft_type {kind!r}; this server serves 'LORA' only"


def test_load_adapter_that_is_not_of_peft_says_so(tmp_path):
    path = write_peft(tmp_path / "a")
    (path / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": {"rank": 8}}))
    message = refusal(path)
    assert "is not PEFT's, it has no peft_type (fields: fine_tune_type, lora_parameters)" in message
    assert "It looks like one of MLX" in message


def test_load_adapter_whose_names_match_no_module_lists_them(tmp_path):
    tensors = {k.replace("model.model.layers", "transformer.h"): v for k, v in lora_tensors().items()}
    message = refusal(write_peft(tmp_path / "a", tensors))
    assert (
        "adapter 'x' has 12 tensors that match no module: base_model.transformer.h.0.self_attn.q_proj.lora_A" in message
    )
    assert "and 4 more; the base model (llama) has model.layers.0 to 2, each with q_proj, k_proj, v_proj" in message


@pytest.mark.parametrize(
    "tensor",
    [
        "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.c_attn.lora_A.weight",
        "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_E",
        "base_model.model.model.layers.0.self_attn.q_proj.hada_w1_a",
    ],
)
def test_load_adapter_with_one_unknown_tensor_is_refused(tensor, tmp_path):
    path = write_peft(tmp_path / "a", lora_tensors() | {tensor: np.ones((4, 64), np.float32)})
    assert f"has 1 tensors that match no module: {tensor};" in refusal(path)


def test_load_adapter_without_lora_tensors_is_refused(tmp_path):
    assert "has no LoRA tensors: adapter_model.safetensors is without A and B" in refusal(
        write_peft(tmp_path / "a", {})
    )


@pytest.mark.parametrize(("gone", "kept"), ["AB", "BA"])
def test_load_adapter_with_half_a_pair_is_refused(gone, kept, tmp_path):
    tensors = lora_tensors()
    del tensors[key(1, "q_proj", gone)]
    message = refusal(write_peft(tmp_path / "a", tensors))
    assert f"has {key(1, 'q_proj', kept)} without its lora_{gone}: the file is incomplete" in message


def test_load_adapter_with_one_matrix_twice_is_refused(tmp_path):
    name = key(0, "q_proj", "A")
    tensors = lora_tensors() | {name.removeprefix("base_model.model."): np.ones((4, 64), np.float32)}
    message = refusal(write_peft(tmp_path / "a", tensors))
    assert message.startswith("adapter 'x' has one matrix twice: ")
    assert name in message


def test_load_adapter_with_tensors_of_two_adapters_is_refused(tmp_path):
    tensors = {k.replace(".weight", ".one.weight"): v for k, v in lora_tensors(("q_proj",)).items()}
    tensors |= {k.replace(".weight", ".two.weight"): v for k, v in lora_tensors(("v_proj",)).items()}
    assert "has tensors of several adapters" in refusal(write_peft(tmp_path / "a", tensors))


def test_load_adapter_with_a_fused_and_a_single_projection_is_refused(tmp_path):
    fused = f"{LAYER}.self_attn.qkv_proj.lora_"
    tensors = lora_tensors() | {f"{fused}A.weight": np.ones((4, 64)), f"{fused}B.weight": np.ones((96, 4))}
    assert "changes layers.0.q_proj twice: " in refusal(write_peft(tmp_path / "a", tensors))


@pytest.mark.parametrize(
    ("part", "shape", "text"),
    [
        ("A", (4, 128), "has shape [4, 128]; layers.1.q_proj of the base model needs [rank, 64]"),
        ("A", (64,), "has shape [64]; layers.1.q_proj of the base model needs [rank, 64]"),
        ("A", (0, 64), "has shape [0, 64]; layers.1.q_proj of the base model needs [rank, 64]"),
        ("A", (4, 64, 1), "has shape [4, 64, 1]"),
        ("B", (128, 4), "has shape [128, 4]; layers.1.q_proj of the base model needs [64, 4]"),
        ("B", (64, 5), "has shape [64, 5]; layers.1.q_proj of the base model needs [64, 4]"),
    ],
)
def test_load_adapter_with_a_wrong_shape_says_got_and_wanted(part, shape, text, tmp_path):
    name = key(1, "q_proj", part)
    message = refusal(write_peft(tmp_path / "a", lora_tensors() | {name: np.ones(shape, np.float32)}))
    assert f"tensor {name} {text}" in message


def test_load_adapter_with_rows_that_do_not_make_a_fused_layer_is_refused(tmp_path):
    fused = f"{LAYER}.self_attn.qkv_proj.lora_"
    tensors = {f"{fused}A.weight": np.ones((4, 64)), f"{fused}B.weight": np.ones((192, 4))}
    message = refusal(write_peft(tmp_path / "a", tensors))
    assert f"tensor {fused}B.weight has shape [192, 4]; layers.0.qkv_proj of the base model needs [96, 4]" in message


def test_load_adapter_whose_config_gives_another_rank_says_both(tmp_path):
    message = refusal(write_peft(tmp_path / "a", r=16, rank_pattern={"q_proj": 8}))
    assert "adapter_config.json gives rank 8 at layers.0.q_proj (rank_pattern['q_proj']=8), but tensor" in message
    assert f"{key(0, 'q_proj', 'A')} has rank 4 (shape [4, 64])" in message


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_load_adapter_with_a_value_that_is_not_finite_names_the_tensor(bad, stored, tmp_path):
    tensors = {k: v.astype(stored) for k, v in lora_tensors().items()}
    name = key(2, "v_proj", "B")
    tensors[name][3, 1] = bad
    message = refusal(write_peft(tmp_path / "a", tensors), dtype=ml_dtypes.bfloat16)
    assert f"tensor {name} has NaN or Inf" in message


def test_load_adapter_with_a_value_beyond_the_dtype_names_the_tensor(tmp_path):
    tensors = lora_tensors()
    name = key(0, "q_proj", "B")
    tensors[name][0, 0] = 1e6
    path = write_peft(tmp_path / "a", tensors)
    assert f"tensor {name} has values beyond float16" in refusal(path, dtype=np.float16)
    assert load(path, dtype=ml_dtypes.bfloat16).max_rank == 4


def test_load_adapter_with_whole_numbers_in_a_tensor_is_refused(tmp_path):
    name = key(0, "q_proj", "A")
    message = refusal(write_peft(tmp_path / "a", lora_tensors() | {name: np.ones((4, 64), np.int8)}))
    assert f"tensor {name} has dtype I8; supported: F64, F32, F16, BF16" in message


def test_load_adapter_with_rank_zero_is_refused(tmp_path):
    assert "r in adapter_config.json is 0" in refusal(write_peft(tmp_path / "a", r=0))


def test_load_adapter_refused_leaves_the_name_to_the_next(tmp_path):
    with pytest.raises(AdapterError, match=re.escape("r in adapter_config.json is 0")):
        load(write_peft(tmp_path / "a", r=0))
    assert load(write_peft(tmp_path / "a")).name == "x"
