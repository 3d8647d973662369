"""Models with int8 weights, or of 4 bits: native against XLA, over shards, under adapters, in memory; refusals."""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.checkpoints import load_config, load_hf, load_model
from plora_jax.engine import SamplingParams
from plora_jax.engine.build import EngineConfig, build_engine
from plora_jax.model import forward_full, keeps_blocks, pack_params, quantization_problem
from plora_jax.parallel import TensorParallel
from strategies import block_weights, native, quantized
from strategies.block_weights import BlockWeights
from strategies.quantized import QuantizedWeights
from tests.conftest import PACK, ROOT
from tests.plora_jax.conformance import deploy
from tests.plora_jax.gguf_files import converted, write

TOKENS = np.random.default_rng(0).integers(0, 250, (2, 24)).astype(np.int32)
needs_unit = pytest.mark.skipif(native.int8_unit_unavailable() is not None, reason="no matrix unit here")
needs_bytes = pytest.mark.skipif(native.block_unit_unavailable() is not None, reason="no 8-bit products here")


def packed(name, dtype):
    config, params = load_hf(PACK / "models" / name, dtype=dtype)
    return config, params, pack_params(params, TensorParallel(config), quantization="int8")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """The llama model with blocks of 4 bits in every projection whose inputs are whole blocks; down_proj's are not."""
    folder = tmp_path_factory.mktemp("blocks")
    names = [name for name in converted("llama", load_config(PACK / "models" / "llama")) if name.startswith("blk.")]
    fits = [name for name in names if "norm" not in name and "ffn_down" not in name]
    write(folder / "m.gguf", "llama", kinds=dict.fromkeys(fits, "Q4_1"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PACK / "models" / "llama" / name, folder)
    return folder / "m.gguf"


def packed_blocks(path, dtype="float32", quantization="gguf"):
    parallel = TensorParallel(load_config(path))
    loaded = load_model(path, dtype=dtype, keep_blocks=keeps_blocks(parallel, quantization))
    return loaded.config, pack_params(loaded.params, parallel, quantization=quantization)


def logits(config, params):
    return np.asarray(jax.jit(lambda p, t: forward_full(p, config, t))(params, TOKENS), np.float64)


def without_kernel(monkeypatch):
    monkeypatch.setattr(quantized, "unsupported", lambda *_, **__: "switched off")


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2_bias", "gemma2"])
def test_model_with_int8_weights_is_near_the_one_without(name):
    config, params, small = packed(name, "float32")
    exact, found = logits(config, params), logits(config, small)
    assert 0 < np.abs(found - exact).mean() < 0.05 * np.abs(exact).mean()


def test_pack_params_quantises_projections_and_head_and_keeps_the_rest():
    config, _, small = packed("llama_tied", "bfloat16")
    assert {n for n, w in small["layers"].items() if isinstance(w, QuantizedWeights)} == set(config.projections)
    assert small["packed_head"].scales.shape == (1, config.vocab_size)
    assert small["embedding"].dtype == jnp.bfloat16
    assert small["final_norm"].dtype == jnp.bfloat16


@needs_unit
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_model_in_the_native_kernel_has_the_tokens_of_xla(monkeypatch, dtype):
    config, _, tiles = packed("llama", dtype)
    assert tiles["layers"]["q_proj"].values.ndim == 4
    without_kernel(monkeypatch)
    _, _, plain = packed("llama", dtype)
    assert plain["layers"]["q_proj"].values.ndim == 3
    found, expected = logits(config, tiles), logits(config, plain)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))
    np.testing.assert_allclose(found, expected, atol=1e-5 if dtype == "float32" else 2e-2)


def over_shards(model, quantization, *shards):
    """What quantized_program.py finds of a model over shards, against one device."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    result = subprocess.run(
        [sys.executable, "-m", "tests.plora_jax.quantized_program", str(model), quantization, *map(str, shards)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2_bias"])
def test_int8_model_over_shards_equals_one_device(name):
    (found,) = over_shards(PACK / "models" / name, "int8", 4)
    assert found["same_argmax"]
    # Sums in another order differ in the last bit, which moves some activations a step: 1 / 32639 of the largest.
    assert found["difference"] < 1e-3


@pytest.mark.slow
def test_model_in_blocks_over_shards_equals_one_device(blocks):
    (found,) = over_shards(blocks, "gguf", 2)
    assert found["same_argmax"]
    # Sums in another order differ in the last bit, which moves some activations a step: 1 / 127 of a block's largest.
    assert found["difference"] < 2e-2


def test_model_in_blocks_is_near_the_one_that_its_file_dequantises_to(blocks):
    exact, found = logits(*packed_blocks(blocks, quantization="none")), logits(*packed_blocks(blocks))
    assert 0 < np.abs(found - exact).mean() < 0.02 * np.abs(exact).mean()


def test_pack_params_keeps_blocks_and_quantises_what_has_none(blocks):
    config, small = packed_blocks(blocks, "bfloat16")
    kinds = {name: type(weight) for name, weight in small["layers"].items()}
    assert {name for name, kind in kinds.items() if kind is BlockWeights} == set(config.projections) - {"down_proj"}
    assert kinds["down_proj"] is QuantizedWeights
    assert isinstance(small["packed_head"], QuantizedWeights)


@needs_bytes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_in_blocks_in_the_native_kernel_has_the_tokens_of_xla(monkeypatch, blocks, dtype):
    config, tiles = packed_blocks(blocks, dtype)
    assert tiles["layers"]["q_proj"].tiled
    monkeypatch.setattr(block_weights, "unsupported", lambda *_, **__: "switched off")
    _, plain = packed_blocks(blocks, dtype)
    assert not plain["layers"]["q_proj"].tiled
    found, expected = logits(config, tiles), logits(config, plain)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))
    np.testing.assert_allclose(found, expected, atol=2e-2)


@pytest.mark.slow
def test_engine_with_weights_in_blocks_serves_adapters_alike_alone_and_together(blocks):
    alone, together, size, precision = engine_answers(str(blocks), quantization="gguf")
    assert precision == "float32, gguf weights"
    assert alone == together
    assert alone[:2] != alone[2:], "the adapter changes nothing"
    _, whole = packed_blocks(blocks, quantization="none")
    assert size < 0.5 * sum(leaf.nbytes for leaf in jax.tree.leaves(whole))


def engine_answers(model="llama", **options):
    """Greedy tokens of the base model and of an adapter, one by one and together, and the bytes of the weights."""
    built = deploy(model, **options)
    engine = built.engine
    engine.load_adapter("a", str(PACK / "adapters" / "all_linear"))
    prompts, models = [TOKENS[0].tolist(), TOKENS[0].tolist()[:9]], (None, "a")
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = [engine.generate([p], greedy, adapters=m)[0][0].token_ids for m in models for p in prompts]
    together = [answer[0].token_ids for m in models for answer in engine.generate(prompts, greedy, adapters=m)]
    return alone, together, built.device_bytes()["weights"], built.precision


@pytest.mark.slow
def test_engine_with_int8_weights_serves_adapters_alike_alone_and_together_in_less_memory():
    alone, together, small, precision = engine_answers(quantization="int8")
    assert precision == "float32, int8 weights"
    assert alone == together
    assert alone[:2] != alone[2:], "the adapter changes nothing"
    assert small < 0.6 * sum(leaf.nbytes for leaf in jax.tree.leaves(packed("llama", "float32")[1]))


def test_quantization_that_is_none_of_the_choices_is_refused():
    with pytest.raises(ValueError, match="--quantization must be one of none, int8, gguf, got 'int4'"):
        EngineConfig(quantization="int4").validate()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("quantization", ["int8", "gguf"])
def test_quantized_routed_experts_are_refused(name, quantization):
    config = load_config(PACK / "models" / name)
    says = (
        f"--quantization {quantization} does not cover routed experts, and {config.architecture} has "
        f"{config.num_experts} a layer: use --quantization none"
    )
    assert quantization_problem(config, quantization) == says
    assert quantization_problem(config, "none") is None
    with pytest.raises(ValueError, match=says):
        build_engine(EngineConfig(model=str(PACK / "models" / name), quantization=quantization))
