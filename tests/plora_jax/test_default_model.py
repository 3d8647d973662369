"""The default model end to end in the engine: golden answer, many streams over several adapters, no compilation."""

import numpy as np
import pytest

from plora_jax.engine import SamplingParams
from plora_jax.engine.build import EngineConfig, build_engine
from plora_jax.engine.compile import counter
from plora_jax.tokenizer import render_chat

GOLDEN = (504, 3575, 282, 4649, 314, 7042, 30, 2)  # "The capital of France is Paris." (SmolLM2-135M-Instruct)
SHIPPED = ("concise", "json", "pirate")


def deploy(dtype, *, rows):
    config = EngineConfig(
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=rows,
        max_num_batched_tokens=64,
        device_adapter_mb=64,
        pool_memory_gb=0.5,
    )
    built = build_engine(config)
    from launch.startup import shipped_adapters

    for name, path in shipped_adapters(config).items():
        built.engine.load_adapter(name, path)
    return built.engine


@pytest.fixture(scope="module")
def engine():
    return deploy("float32", rows=32)


def chat(engine, text):
    prompt = render_chat(engine.tokenizer, [{"role": "user", "content": text}])
    return engine.tokenizer.encode(prompt, add_special_tokens=False)


def check_golden(engine):
    ids = chat(engine, "What is the capital of France?")
    assert len(ids) == 37
    completion = engine.generate([ids], SamplingParams(temperature=0, max_tokens=30))[0][0]
    assert completion.token_ids == GOLDEN
    assert completion.text == "The capital of France is Paris."
    assert completion.finish_reason == "stop"


@pytest.mark.slow
def test_default_model_float32_gives_the_golden_answer(engine):
    check_golden(engine)


@pytest.mark.slow
def test_default_model_bfloat16_gives_the_golden_answer():
    check_golden(deploy("bfloat16", rows=8))


@pytest.mark.slow
def test_seeded_sampling_with_the_whole_vocabulary_is_the_same_in_any_mix(engine):
    ids = chat(engine, "Tell me a story.")
    seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=16)
    alone = engine.generate([ids], seeded)[0][0].token_ids
    others = [SamplingParams(temperature=1.0, max_tokens=10, n=2, top_k=40) for _ in range(5)]
    mixed = engine.generate([ids] * 6, [*others[:2], seeded, *others[2:]], adapters=[None, "pirate"] + [None] * 4)
    assert mixed[2][0].token_ids == alone
    compiled = counter.count
    engine.generate([ids] * 3, others[:3])
    assert counter.count == compiled
    assert len({tuple(np.asarray(c.token_ids)) for completions in mixed for c in completions}) > 6


@pytest.mark.slow
def test_thirty_two_streams_over_base_and_adapters_equal_their_solo_runs(engine):
    questions = ("Name a fruit.", "How do I boil an egg?")
    cases = [(chat(engine, q), name) for name in (None, *SHIPPED) for q in questions] * 4
    asked = SamplingParams(temperature=0, max_tokens=8)
    solo = {}
    for ids, name in cases[:8]:
        solo[tuple(ids), name] = engine.generate([ids], asked, adapters=[name])[0][0].token_ids
    assert len({solo[tuple(cases[0][0]), name] for name in (None, *SHIPPED)}) > 2, "adapters must change the answer"
    engine.start()
    try:
        generations = [engine.submit(ids, asked, adapter=name) for ids, name in cases]
        for (ids, name), generation in zip(cases, generations, strict=True):
            assert generation.collect()[0].token_ids == solo[tuple(ids), name], (name, len(ids))
    finally:
        engine.shutdown(drain_s=5)
