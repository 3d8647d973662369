"""The model as shards of a mesh: a process with eight devices measures (parallel_program.py), the tests here judge."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from memory_pool.layout import PageLayout, whole
from memory_pool.link import TENSOR_AXIS
from plora_jax.checkpoints import load_config, load_hf
from plora_jax.model import Decoder, forward_full
from plora_jax.parallel import EMBEDDING, HEAD, TensorParallel, working_sizes

ROOT = Path(__file__).parent.parent.parent
PACK = ROOT / "tests" / "data" / "conformance"
MODELS = sorted(folder.name for folder in (PACK / "models").iterdir())
TOLERANCE = 2e-5


def pack_config(name="llama", **changes):
    return dataclasses.replace(load_config(PACK / "models" / name), **changes)


@pytest.fixture(scope="module")
def measured():
    """What parallel_program.py prints; compiled programs are kept where the session keeps its own."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    cache = jax.config.values["jax_compilation_cache_dir"]
    kept = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} if cache else {}
    result = subprocess.run(
        [sys.executable, "-m", "tests.plora_jax.parallel_program", str(PACK)],
        cwd=ROOT,
        env={**os.environ, **kept, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def check(case, tolerance=TOLERANCE):
    assert case["difference"] <= tolerance
    assert case["same_argmax"]
    assert case["shards_agree"], "the shards would drift apart"


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("name", [*MODELS, "odd vocabulary"])
def test_model_over_shards_equals_one_device_with_an_adapter_and_without(measured, name, shards):
    check(measured[f"{name} {shards} base"])
    check(measured[f"{name} {shards} lora"])
    assert measured[f"{name} changed"] > 1, "the adapter must matter"


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2, 8])
def test_adapter_on_embedding_and_head_over_shards_matches_the_golden_logits(measured, shards):
    check(measured[f"outer {shards}"])


@pytest.mark.slow
def test_logits_delta_is_added_before_the_soft_cap(measured):
    check(measured["soft cap"])


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "k_bias", "f_rows"), [(2, 16, 56), (8, 64, 14)])
def test_weights_read_into_their_shards_are_placed_without_a_copy(measured, shards, k_bias, f_rows):
    assert measured[f"loading {shards}"] == {
        "no_copy": True,
        "equal": True,
        "wrong_specs": 0,
        "named": True,
        "k_rows": 8,
        "k_bias": k_bias,
        "f_rows": f_rows,
    }


@pytest.mark.slow
def test_look_up_of_a_sharded_bfloat16_table_is_exact(measured):
    assert measured["bfloat16 look-up"] is True


def test_one_shard_has_no_collective():
    config, params = load_hf(PACK / "models" / "gemma2", dtype="float32")
    program = str(jax.make_jaxpr(lambda p, t: forward_full(p, config, t))(params, jnp.zeros((1, 4), jnp.int32)))
    assert re.findall(r"\b(psum\w*|all_gather\w*|axis_index)\b", program) == []
    assert Decoder(config).parallel.shard_config is config


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_shards_exchange_one_sum_a_row_parallel_projection_the_embedding_and_the_logits(name):
    plan = TensorParallel(pack_config(name), 2)
    shapes = plan.config.param_shapes()
    layers = {p.removeprefix("layers."): _abstract(shapes.pop(p)) for p in list(shapes) if p.startswith("layers.")}
    params = {**{p: _abstract(shape) for p, shape in shapes.items()}, "layers": layers}
    run = jax.shard_map(
        lambda p, t: forward_full(p, plan.config, t, num_shards=2),
        mesh=jax.sharding.AbstractMesh((2,), (TENSOR_AXIS,), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(plan.param_specs(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    program = str(jax.make_jaxpr(run)(params, _abstract((1, 4), jnp.int32)))
    found = re.findall(r"= (psum\w*|all_gather\w*|all_to_all|ppermute)\b", program)
    assert sorted(operation.split("_inv")[0] for operation in found) == ["all_gather", "psum", "psum", "psum"]


def _abstract(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "shards", "message"),
    [
        ({}, 3, "does not divide the 8 query heads, does not divide the FFN width 112 and neither divides the 2 KV "),
        ({}, 16, "--tensor_parallel_size 16 does not divide the 8 query heads: choose 1, 2, 4 or 8"),
        ({"intermediate_size": 108}, 8, "--tensor_parallel_size 8 does not divide the FFN width 108: choose 1, 2 or 4"),
        (
            {"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 96},
            2,
            "the 9 query heads and neither divides the 3",
        ),
        ({"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 96}, 9, "width 96: choose 1 or 3"),
        ({"num_heads": 7}, 7, "neither divides the 2 KV heads nor is a multiple of them: choose 1"),
        ({}, 0, "--tensor_parallel_size must be at least 1, got 0"),
    ],
)
def test_size_that_does_not_fit_is_refused_with_those_that_do(changes, shards, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        TensorParallel(pack_config(**changes), shards)
    assert "\n" not in str(caught.value)


def test_expert_width_that_does_not_divide_is_named():
    config = pack_config("qwen3_moe", intermediate_size=44)
    with pytest.raises(ValueError, match="does not divide the expert width 44: choose 1, 2 or 4"):
        TensorParallel(config, 8)


def test_every_pack_model_works_on_two_four_and_eight():
    assert {working_sizes(pack_config(name)) for name in MODELS} == {(1, 2, 4, 8)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_shard_config_has_the_widths_of_the_cuts(name, shards):
    plan = TensorParallel(pack_config(name), shards)
    inside = {n: c for n, c in plan.cuts.items() if not c.spread}
    widths = {n: (c.out[0][1] - c.out[0][0], c.inputs[0][1] - c.inputs[0][0]) for n, c in inside.items()}
    assert widths == plan.shard_config.projections
    assert list(plan.cuts) == [*plan.config.projections, EMBEDDING, HEAD]
    assert all(len(share) == shards for cut in plan.cuts.values() for share in (cut.out, cut.inputs))


def test_cuts_of_one_shard_are_whole():
    config = pack_config()
    plan = TensorParallel(config)
    outer = {EMBEDDING: whole((64, 256), spread=True), HEAD: whole((256, 64), spread=True)}
    assert plan.cuts == {name: whole(size) for name, size in config.projections.items()} | outer


def test_cuts_of_column_parallel_projections_split_b_and_of_row_parallel_ones_a():
    cuts = TensorParallel(pack_config(num_kv_heads=4), 2).cuts
    assert cuts["q_proj"] == (((0, 32), (32, 64)), ((0, 64), (0, 64)), False)
    assert cuts["k_proj"].out == ((0, 16), (16, 32))
    assert cuts["down_proj"] == (((0, 64), (0, 64)), ((0, 56), (56, 112)), False)
    assert cuts[HEAD] == (((0, 128), (128, 256)), ((0, 64), (0, 64)), True)
    assert cuts[EMBEDDING] == (((0, 64), (0, 64)), ((0, 256), (0, 256)), True)


def test_cuts_repeat_kv_heads_and_keep_a_vocabulary_that_does_not_divide_whole():
    cuts = TensorParallel(pack_config(vocab_size=251), 4).cuts
    assert cuts["v_proj"].out == ((0, 8), (0, 8), (8, 16), (8, 16))
    assert cuts["q_proj"].out == ((0, 16), (16, 32), (32, 48), (48, 64))
    assert cuts[HEAD].out == ((0, 251),) * 4


def test_cuts_make_a_page_layout():
    plan = TensorParallel(pack_config(), 4)
    shard = plan.shard_config
    layout = PageLayout(
        num_layers=shard.num_layers,
        page_tokens=16,
        kv_heads=shard.num_kv_heads,
        head_dim=shard.head_dim,
        projections=plan.cuts,
        dtype=np.dtype(np.float32),
    )
    assert layout.num_shards == 4
    assert layout.page_width == 2 * 1 * 16 * 8
    assert layout.out_width("gate_proj") == 28
