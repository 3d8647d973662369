"""Models with int8 weights: native against XLA, over shards, under adapters, in memory; what is refused."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.checkpoints import load_config, load_hf
from plora_jax.engine import SamplingParams
from plora_jax.engine.build import EngineConfig, build_engine
from plora_jax.model import forward_full, pack_params, quantization_problem
from plora_jax.parallel import TensorParallel
from strategies import native, quantized
from strategies.quantized import QuantizedWeights
from tests.conftest import PACK, ROOT
from tests.plora_jax.conformance import deploy

TOKENS = np.random.default_rng(0).integers(0, 250, (2, 24)).astype(np.int32)
needs_unit = pytest.mark.skipif(native.int8_unit_unavailable() is not None, reason="no matrix unit here")


def packed(name, dtype):
    config, params = load_hf(PACK / "models" / name, dtype=dtype)
    return config, params, pack_params(params, TensorParallel(config), quantization="int8")


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2_bias"])
def test_int8_model_over_shards_equals_one_device(name):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    result = subprocess.run(
        [sys.executable, "-m", "tests.plora_jax.quantized_program", str(PACK / "models" / name)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["same_argmax"]
    # Sums in another order differ in the last bit, which moves some activations a step: 1 / 32639 of the largest.
    assert found["difference"] < 1e-3


def engine_answers(**options):
    """Greedy tokens of the base model and of an adapter, one by one and together, and the bytes of the weights."""
    built = deploy("llama", **options)
    engine = built.engine
    engine.load_adapter("a", str(PACK / "adapters" / "all_linear"))
    prompts, models = [TOKENS[0].tolist(), TOKENS[0].tolist()[:9]], (None, "a")
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = [engine.generate([p], greedy, adapters=m)[0][0].token_ids for m in models for p in prompts]
    together = [answer[0].token_ids for m in models for answer in engine.generate(prompts, greedy, adapters=m)]
    return alone, together, built.device_bytes()["weights"], built.precision


@pytest.mark.slow
def test_engine_with_int8_weights_serves_adapters_alike_alone_and_together_in_less_memory():
    *_, whole, precision = engine_answers()
    assert precision == "float32"
    alone, together, small, precision = engine_answers(quantization="int8")
    assert precision == "float32, int8 weights"
    assert alone == together
    assert alone[:2] != alone[2:], "the adapter changes nothing"
    assert small < 0.6 * whole


def test_quantization_that_is_none_of_the_choices_is_refused():
    with pytest.raises(ValueError, match="--quantization must be one of none, int8, got 'int4'"):
        EngineConfig(quantization="int4").validate()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_int8_of_routed_experts_is_refused(name):
    config = load_config(PACK / "models" / name)
    says = (
        f"--quantization int8 does not cover routed experts, and {config.architecture} has {config.num_experts} a "
        "layer: use --quantization none"
    )
    assert quantization_problem(config, "int8") == says
    assert quantization_problem(config, "none") is None
    with pytest.raises(ValueError, match=says):
        build_engine(EngineConfig(model=str(PACK / "models" / name), quantization="int8"))
