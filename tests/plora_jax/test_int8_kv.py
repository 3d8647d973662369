"""Engines with an int8 KV cache: tokens in any mix, the model that it stands for, bytes, shards; what is refused."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from plora_jax.checkpoints import load_config, load_hf
from plora_jax.engine import SamplingParams
from plora_jax.engine import build as build_module
from plora_jax.engine.build import EngineConfig, build_engine, page_layout
from plora_jax.engine.machine import shape_of_model
from plora_jax.model import forward_full
from plora_jax.parallel import TensorParallel
from strategies.cost.attention_work import KvLoad, attention_work
from tests.conftest import PACK, ROOT
from tests.plora_jax.conformance import adapters_of, deploy, engine_over, golden
from tests.plora_jax.test_step import Auditor

LLAMA = PACK / "models" / "llama"
PROMPTS = [np.random.default_rng(i).integers(3, 250, count).tolist() for i, count in enumerate((40, 9, 23))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def built():
    return deploy("llama", page_tokens=4, kv_cache_dtype="int8")


def answers(engine, prompts, sampling=GREEDY):
    return [completion.token_ids for (completion,) in engine.generate(prompts, sampling)]


def test_engine_with_int8_kv_answers_alike_alone_together_and_in_chunks(built):
    alone = [answers(engine_over(built, built.executor, chunk=None), [prompt])[0] for prompt in PROMPTS]
    assert len(set(alone)) == len(alone), "the prompts must be answered differently"
    for chunk in (None, 16, 5):
        assert answers(engine_over(built, built.executor, chunk=chunk), PROMPTS) == alone
    assert built.precision == "float32, int8 KV"


def test_engine_with_int8_kv_computes_what_the_model_does_with_rounded_keys_and_values(built):
    scored = dataclasses.replace(GREEDY, prompt_logprobs=1)
    ((completion,),) = engine_over(built, built.executor, chunk=16).generate(PROMPTS[:1], scored)
    got = np.array([entry.logprob for entry in completion.prompt_logprobs[1:]])
    config, params = load_hf(LLAMA, dtype="float32")
    tokens = np.array(PROMPTS[:1], np.int32)

    def scores(int8_kv):
        logits = forward_full(params, config, tokens, int8_kv=int8_kv)[0]
        return np.asarray(jax.nn.log_softmax(logits))[np.arange(len(got)), tokens[0, 1:]]

    rounded, plain = np.abs(got - scores(True)).max(), np.abs(got - scores(False)).max()
    assert rounded < 2e-4
    assert 5 * rounded < plain < 0.05


def test_ledger_equals_audit_for_every_step_over_int8_pages(built):
    auditor, copies = Auditor(built), built.kv._most_copies
    wanted = answers(engine_over(built, built.executor, chunk=8), PROMPTS)
    built.kv._most_copies = 0
    built.executor._attention_of = lambda sequence: ("local", "distributed")[sequence.seq_id % 2]
    assert answers(engine_over(built, auditor, chunk=8), PROMPTS) == wanted, "pages in the pool give other tokens"
    built.kv._most_copies = copies
    assert {("kv", "local", "decode"), ("activation", "distributed", "decode")} <= auditor.seen


def test_adapters_beside_int8_kv_give_their_golden_tokens(built):
    """Of the model whose keys and values are not rounded, after a prompt that leaves no two tokens near one another."""
    engine, names = engine_over(built, built.executor, chunk=16), adapters_of("llama")
    for name in names:
        engine.load_adapter(name, str(PACK / "adapters" / name))
    assert "embed_head_lora" in names
    goldens = [golden(name, "llama") for name in (None, *names)]
    sampling = dataclasses.replace(GREEDY, max_tokens=12)
    found = engine.generate([g["prompt_3"].tolist() for g in goldens], sampling, adapters=[None, *names])
    assert [list(c.token_ids) for (c,) in found] == [g["greedy_3"].tolist() for g in goldens]


def layouts(**changes):
    """Pages of a model of the default one's head dim, as bfloat16 keeps it and as int8."""
    config = dataclasses.replace(load_config(LLAMA), head_dim=64, **changes)
    of = TensorParallel(config)
    return config, [page_layout(of, EngineConfig(kv_cache_dtype=kind), dtype=BFLOAT16) for kind in ("auto", "int8")]


def test_the_same_device_memory_holds_nearly_twice_the_tokens_of_bfloat16():
    config, (plain, small) = layouts()
    assert plain.page_bytes == config.num_layers * 2 * config.num_kv_heads * 16 * 64 * 2
    assert small.page_bytes == config.num_layers * 2 * config.num_kv_heads * 16 * (64 + 4)
    pages = [build_module._sizes(EngineConfig(device_kv_mb=64), layout).kv_pages for layout in (plain, small)]
    assert pages == [2**26 // plain.page_bytes, 2**26 // small.page_bytes]
    assert pages[1] / pages[0] == pytest.approx(128 / 68, rel=1e-3)


def test_cost_model_reads_the_bytes_of_int8_pages():
    config, pair = layouts()
    load = KvLoad(contexts=np.array([160]), queries=np.ones(1, int))
    work = [
        attention_work(shape_of_model(config, name="m", item_bytes=2, kv_item_bytes=layout.kv_item_bytes), load)
        for layout in pair
    ]
    for layout, found in zip(pair, work, strict=True):
        assert found.stored_bytes == found.read_bytes == 10 * layout.page_bytes
    assert work[0].q_bytes == work[1].q_bytes, "queries keep their dtype"


@pytest.mark.slow
def test_engine_with_int8_kv_over_shards_equals_one_device():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    result = subprocess.run(
        [sys.executable, "-m", "tests.plora_jax.int8_kv_program"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["2"] == found["1"]
    assert found["heads"] == [2, 1]


def test_kv_cache_dtype_that_is_none_of_the_choices_is_refused():
    with pytest.raises(ValueError, match=r"^--kv_cache_dtype must be one of auto, int8, got 'fp8'$"):
        EngineConfig(kv_cache_dtype="fp8").validate()


@pytest.mark.parametrize(("dtype", "head_dim", "multiple"), [(np.dtype(np.float32), 6, 4), (BFLOAT16, 7, 2)])
def test_int8_kv_of_a_head_dim_that_fills_no_numbers_is_refused(dtype, head_dim, multiple):
    of = TensorParallel(dataclasses.replace(load_config(LLAMA), head_dim=head_dim))
    says = (
        f"--kv_cache_dtype int8 needs a head dim that is a multiple of {multiple} beside {dtype}, and that of "
        f"llama is {head_dim}: use --kv_cache_dtype auto"
    )
    with pytest.raises(ValueError, match=says):
        page_layout(of, EngineConfig(kv_cache_dtype="int8"), dtype=dtype)
    page_layout(of, EngineConfig(), dtype=dtype)


def test_int8_kv_that_has_no_room_for_two_pages_states_their_bytes():
    _, (_, small) = layouts(num_layers=500, num_kv_heads=64)
    says = f"--device_kv_mb 1 is less than two pages of {small.page_bytes} bytes"
    with pytest.raises(ValueError, match=says):
        build_module._sizes(EngineConfig(device_kv_mb=1, pool_memory_gb=64), small)


def test_build_engine_takes_no_kv_cache_dtype_that_is_unknown():
    with pytest.raises(ValueError, match="--kv_cache_dtype must be one of auto, int8, got 'int4'"):
        build_engine(EngineConfig(model=str(LLAMA), kv_cache_dtype="int4"))
