"""Engines with int8 adapters: tokens of what the integers stand for by any strategy, bytes, shards; what is refused."""

import dataclasses
import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from memory_pool.int8_adapters import quantize_matrices
from plora_jax.adapters import LoraMatrices, load_adapter
from plora_jax.checkpoints import load_config
from plora_jax.engine import SamplingParams
from plora_jax.engine.build import EngineConfig, page_layout
from plora_jax.parallel import TensorParallel
from strategies.strategy_table import LORA
from tests.conftest import PACK, ROOT
from tests.plora_jax import conformance
from tests.plora_jax.conformance import deploy, engine_over, golden
from tests.plora_jax.test_step import Auditor

NAMES = ("all_linear", "rank48", "embed_head_lora", "plain_qv")
ASKED = (None, *NAMES)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
PROMPTS = [golden(name, "llama")["prompt_3"].tolist() for name in ASKED]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def built():
    return deploy("llama", page_tokens=4, lora_dtype="int8", lora_strategy="resident")


@pytest.fixture(scope="module")
def expected():
    """What the float32 numbers that the integers stand for give, and what those of the files do."""
    plain = deploy("llama", page_tokens=4)
    of_files = answers(plain, engine_over(plain, plain.executor, chunk=16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformance, "load_adapter", load_rounded)
        return answers(plain, engine_over(plain, plain.executor, chunk=16)), of_files


def load_rounded(*args, **kwargs):
    adapter = load_adapter(*args, **kwargs)
    return dataclasses.replace(adapter, modules={key: rounded(m) for key, m in adapter.modules.items()})


def rounded(m):
    q = quantize_matrices(m)
    return LoraMatrices(q.a.astype(np.float32), q.b.astype(np.float32), q.scale)


def answers(built, engine, *, preferred=None):
    """Completions of a prompt for each adapter, which are loaded anew and leave again."""
    if preferred:
        built.adapters._preferred = preferred
    for name in NAMES:
        engine.load_adapter(name, str(PACK / "adapters" / name))
    found = [completion for (completion,) in engine.generate(PROMPTS, GREEDY, adapters=list(ASKED))]
    for name in NAMES:
        engine.unload_adapter(name)
    return found


def logprobs(completions):
    return np.array([entry.logprob for c in completions for entry in c.prompt_logprobs[1:]])


@pytest.mark.parametrize("strategy", LORA)
def test_every_strategy_serves_what_the_integers_stand_for(built, expected, strategy):
    found = answers(built, engine_over(built, built.executor, chunk=16), preferred=(strategy,))
    exact, files = expected
    assert [c.token_ids for c in found] == [c.token_ids for c in exact]
    np.testing.assert_allclose(logprobs(found), logprobs(exact), atol=2e-4)
    apart = np.abs(logprobs(found) - logprobs(files))
    assert 2e-4 < apart.max() < 0.2, "as far from the files' numbers as rounding takes them"
    assert built.precision == "float32, int8 adapters"
    assert built.adapters.fallbacks == 0


def test_ledger_equals_audit_for_every_step_over_int8_adapters(built, expected):
    auditor = Auditor(built)
    engine = engine_over(built, auditor, chunk=16)
    for strategy in LORA:
        assert [c.token_ids for c in answers(built, engine, preferred=(strategy,))] == [
            c.token_ids for c in expected[0]
        ]
    for strategy in ("fetch", "near_data", "split"):
        assert {phase for _, own, phase in auditor.seen if own == strategy} >= {"decode", "prefill", "embed", "head"}


@pytest.mark.slow
def test_engine_with_int8_adapters_over_shards_equals_one_device():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    result = subprocess.run(
        [sys.executable, "-m", "tests.plora_jax.int8_adapters_program"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert found["2"] == found["1"]
    assert len(set(map(tuple, found["1"]))) == len(found["1"]), "the adapters must answer differently"


def layouts(dtype):
    of = TensorParallel(load_config(PACK / "models" / "llama"))
    return [page_layout(of, EngineConfig(lora_dtype=kind), dtype=dtype) for kind in ("auto", "int8")]


@pytest.mark.parametrize(("dtype", "times"), [(np.dtype(np.float32), 4), (BFLOAT16, 2)])
def test_int8_adapters_take_a_byte_a_number(dtype, times):
    plain, small = layouts(dtype)
    assert plain.page_bytes == small.page_bytes, "pages are those of KV"
    ranks = [64] * len(plain.names)
    assert plain.a_pages(ranks) / small.a_pages(ranks) == pytest.approx(times, rel=0.1)
    for name, cut in plain.projections.items():
        if not cut.spread:
            assert small.in_width(name) == plain.in_width(name)
            assert small.out_width(name) == plain.out_width(name)


def test_lora_dtype_that_is_none_of_the_choices_is_refused():
    with pytest.raises(ValueError, match=r"^--lora_dtype must be one of auto, int8, got 'int4'$"):
        EngineConfig(lora_dtype="int4").validate()


def test_int8_adapters_of_projections_that_fill_no_numbers_are_refused():
    config = dataclasses.replace(load_config(PACK / "models" / "llama"), intermediate_size=113)
    says = (
        "--lora_dtype int8 needs widths that are multiples of 2 beside bfloat16, and projections of llama on a shard "
        "have 113: use --lora_dtype auto"
    )
    with pytest.raises(ValueError, match=says):
        page_layout(TensorParallel(config), EngineConfig(lora_dtype="int8"), dtype=BFLOAT16)
    page_layout(TensorParallel(config), EngineConfig(), dtype=BFLOAT16)
