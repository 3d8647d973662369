"""The conformance pack: every model and served adapter, mixed in one batch, against transformers + PEFT goldens."""

import gc
import itertools

import jax
import numpy as np
import pytest

from plora_jax.adapters import AdapterError
from plora_jax.engine import SamplingParams
from strategies import ATTENTION, LORA
from tests.plora_jax.conformance import (
    GREEDY,
    INDEX,
    MODELS,
    NOT_SERVED,
    PACK,
    SERVED,
    LogitsRecorder,
    adapters_of,
    deploy,
    engine_over,
    golden,
)

LOGITS_TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=MODELS)
def deployment(request):
    """One model's programs, compiled once for all tests of the module that use it."""
    built = deploy(request.param, page_tokens=4)
    yield request.param, built, LogitsRecorder(built)
    del built
    jax.clear_caches()
    gc.collect()


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_model_and_adapters_mixed_in_one_batch_match_the_goldens(deployment, chunk):
    model, built, recorder = deployment
    recorder.by_sequence.clear()
    engine = engine_over(built, recorder, chunk=chunk)
    names = [None, *adapters_of(model)]
    identities = {None: 0}
    for name in names[1:]:
        engine.load_adapter(name, str(PACK / "adapters" / name))
        identities[name] = engine._table.use(name, 0)
    cases = [(name, i) for i in range(4) for name in names]
    prompts = [golden(name, model)[f"prompt_{i}"].tolist() for name, i in cases]
    outputs = engine.generate(prompts, GREEDY, adapters=[name for name, _ in cases])
    for (name, i), prompt, output in zip(cases, prompts, outputs, strict=True):
        wanted = golden(name, model)
        assert list(output[0].token_ids) == wanted[f"greedy_{i}"].tolist(), (name, i)
        seen = recorder.by_sequence[identities[name], tuple(prompt)]
        rows = wanted[f"logits_{i}"]
        got = np.stack([seen[p] for p in range(len(prompt) - len(rows), len(prompt))])
        np.testing.assert_allclose(got, rows, atol=LOGITS_TOLERANCE, err_msg=f"{name} prompt {i}")
    engine.check_integrity()
    for name in names[1:]:
        engine.unload_adapter(name)
    engine.step()
    assert built.adapters.pool_bytes == 0


PAIRS = [(lora, attention) for lora in LORA for attention in ATTENTION]


@pytest.fixture
def scarce(deployment):
    """The deployment with all full KV pages in the pool alone, its strategies free to be forced."""
    _, built, _ = deployment
    preferred, copies, attention = built.adapters._preferred, built.kv._most_copies, built.executor._attention_of
    built.kv._most_copies = 0
    yield built
    built.adapters._preferred, built.kv._most_copies, built.executor._attention_of = preferred, copies, attention
    vars(built.adapters).pop("_strategy_now", None)


def test_tokens_are_those_of_peft_under_every_pair_of_strategies_forced_and_mixed(deployment, scarce):
    model = deployment[0]
    engine = engine_over(scarce, scarce.executor, chunk=16)
    names = adapters_of(model)
    for name in names:
        engine.load_adapter(name, str(PACK / "adapters" / name))
    identities = [engine._table.use(name, 0) for name in names]
    cases = [(name, i) for i in range(4) for name in [None, *names]]
    prompts = [golden(name, model)[f"prompt_{i}"].tolist() for name, i in cases]
    wanted = [golden(name, model)[f"greedy_{i}"].tolist() for name, i in cases]
    turns = itertools.count()
    for lora, attention in [*PAIRS, ("mixed", "mixed")]:
        for identity in identities:
            scarce.adapters._leave_device(identity, scarce.adapters._entries[identity])
        if lora == "mixed":
            scarce.adapters._strategy_now = lambda *_: tuple(LORA)[next(turns) % len(LORA)]
            scarce.executor._attention_of = lambda seq: tuple(ATTENTION)[seq.seq_id % len(ATTENTION)]
        else:
            scarce.adapters._preferred = (lora,)
            scarce.executor._attention_of = lambda seq, chosen=attention: chosen
        outputs = engine.generate(prompts, GREEDY, adapters=[name for name, _ in cases])
        got = [list(output[0].token_ids) for output in outputs]
        assert got == wanted, [case for case, a, b in zip(cases, got, wanted, strict=True) if a != b]
    objects = {crossing.object for crossing in scarce.ledger.totals()}
    assert objects >= {"activation", "kv", "control"}
    engine.check_integrity()
    for name in names:
        engine.unload_adapter(name)
    engine.step()
    assert scarce.adapters.pool_bytes == 0


def test_every_pack_adapter_is_either_served_or_refused_by_name():
    assert len(SERVED) == 19
    assert len(SERVED) + len(NOT_SERVED) == 23


def test_base_rows_beside_adapters_are_bit_equal_to_a_run_without():
    built = deploy("llama")
    recorder = LogitsRecorder(built)
    engine = engine_over(built, recorder, chunk=64)
    prompts = [golden(None, "llama")[f"prompt_{i}"].tolist() for i in range(4)]
    others = [[*prompt, 5] for prompt in prompts]
    alone = engine.generate(prompts + others, GREEDY)
    expected = {key: dict(rows) for key, rows in recorder.by_sequence.items()}
    recorder.by_sequence.clear()
    engine.load_adapter("rslora", str(PACK / "adapters" / "rslora"))
    mixed = engine.generate(prompts + others, GREEDY, adapters=[None] * 4 + ["rslora"] * 4)
    assert [c[0].token_ids for c in mixed[:4]] == [c[0].token_ids for c in alone[:4]]
    for prompt in prompts:
        key = (0, tuple(prompt))
        assert len(expected[key]) >= len(prompt) + 11
        for position, logits in expected[key].items():
            np.testing.assert_array_equal(recorder.by_sequence[key][position], logits)


def test_pages_under_pressure_change_no_token():
    """Few KV pages in the pool (preemption) and room for two or three adapters at a time (eviction)."""
    built = deploy(
        "llama", device_adapter_mb=1, device_kv_mb=1, max_model_len=64, page_tokens=4, lora_strategy="resident"
    )
    engine = engine_over(built, built.executor, chunk=16)
    names = ["all_linear", "rslora", "rank_alpha_pattern", "rank48", "plain_qv"]
    for name in names:
        engine.load_adapter(name, str(PACK / "adapters" / name))
    pool = built.kv._pool
    pool.alloc(pool.num_free - 20)  # leaves 20 pages of 4 tokens
    cases = [(name, i) for i in (3, 2, 1) for name in names]
    prompts = [golden(name, "llama")[f"prompt_{i}"].tolist() for name, i in cases]
    outputs = engine.generate(prompts, GREEDY, adapters=[name for name, _ in cases])
    for (name, i), output in zip(cases, outputs, strict=True):
        assert list(output[0].token_ids) == golden(name, "llama")[f"greedy_{i}"].tolist(), (name, i)
    assert engine.stats().preemptions > 0
    built.adapters.check_integrity()


@pytest.mark.parametrize("name", NOT_SERVED)
def test_feature_not_served_is_refused_by_name_and_leaves_nothing(name):
    built = deploy_once(INDEX["adapters"][name]["base"])
    with pytest.raises(AdapterError, match=NOT_SERVED[name]):
        built.engine.load_adapter(name, str(PACK / "adapters" / name))
    assert built.engine.adapters() == []
    assert built.adapters.pool_bytes == 0


_deployed = {}


def deploy_once(model):
    if model not in _deployed:
        _deployed[model] = deploy(model)
    return _deployed[model]


def test_seeded_request_alone_and_in_a_mix_draws_the_same_tokens():
    engine = deploy_once("llama").engine
    prompt = golden(None, "llama")["prompt_2"].tolist()
    seeded = SamplingParams(temperature=1.2, top_p=0.95, seed=11, max_tokens=20, ignore_eos=True, frequency_penalty=0.3)
    alone = engine.generate([prompt], seeded)[0][0].token_ids
    others = [SamplingParams(temperature=0.7, top_k=k, max_tokens=9, ignore_eos=True) for k in (0, 3, 50)]
    mixed = engine.generate([prompt[:5], prompt, prompt[:9], prompt], [others[0], seeded, others[1], others[2]])
    assert mixed[1][0].token_ids == alone
    assert len(set(alone)) > 3, "the draw must not be greedy"


def test_prompt_logprobs_over_chunks_equal_the_golden_logits():
    engine = engine_over(deploy_once("llama"), deploy_once("llama").executor, chunk=4)
    wanted = golden(None, "llama")
    prompt = wanted["prompt_3"].tolist()
    asked = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=5, logprobs=2, ignore_eos=True)
    completion = engine.generate([prompt], asked)[0][0]
    assert completion.prompt_logprobs[0] is None
    assert [e.token_id for e in completion.prompt_logprobs[1:]] == prompt[1:]
    rows = wanted["logits_3"].astype(np.float64)
    logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    for row, entry in zip(logprobs[:-1], completion.prompt_logprobs[-7:], strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=LOGITS_TOLERANCE)
        assert [t for t, _ in entry.top] == np.argsort(-row)[:5].tolist()
    assert completion.logprobs[0].logprob == pytest.approx(logprobs[-1].max(), abs=LOGITS_TOLERANCE)
