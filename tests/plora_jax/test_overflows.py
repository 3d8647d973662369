"""Adapters whose numbers overflow: their requests end with an error, and nobody else notices."""

import numpy as np
import pytest

from plora_jax.adapters.adapter import HEAD, OUTSIDE, Adapter, LoraMatrices, ModuleId
from plora_jax.engine import GenerationFailedError, SamplingParams
from plora_jax.engine.overflows import Overflows
from plora_jax.engine.plan import RowResult
from tests.plora_jax.conformance import deploy
from tests.plora_jax.engine_fakes import make_rig
from tests.plora_jax.scarce import make_adapter

ASKED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
STRATEGIES = ("resident", "near_data", "split", "fetch")


@pytest.fixture(scope="module")
def built():
    return deploy("llama", page_tokens=4)


def scaled(name, adapter, *, a, b, scale):
    modules = {
        where: LoraMatrices((m.a * a).astype(np.float32), (m.b * b).astype(np.float32), scale=scale)
        for where, m in adapter.modules.items()
    }
    return Adapter(name, modules, adapter.config)


BAD = {
    # The sum is infinite, or NaN after the first attention that reads it.
    "alpha": {"a": 1, "b": 1, "scale": 1e38},
    "products": {"a": 1e19, "b": 1e19, "scale": 2.0},
    # Finite, but its squares in the norms are not: the norms give zeros, and logits that are all alike.
    "squares": {"a": 1e12, "b": 1e12, "scale": 2.0},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", BAD)
def test_requests_of_an_adapter_that_overflows_fail_and_others_get_their_tokens(built, kind, strategy, caplog):
    engine = built.engine
    built.adapters._preferred = (strategy,)
    good = make_adapter(f"good-{kind}-{strategy}", seed=1, rank=5, config=built.model, targets=("o_proj", "down_proj"))
    bad = scaled(f"bad-{kind}-{strategy}", good, **BAD[kind])
    prompts = [[*range(3 + i, 12 + i)] for i in range(4)]
    names = [None, good.name, None, good.name]
    engine.add_adapter(good)
    engine.add_adapter(bad)
    alone = [c[0].token_ids for c in engine.generate(prompts, ASKED, adapters=names)]
    counted = engine.stats().overflowed
    mixed = [engine.submit(p, ASKED, adapter=n) for p, n in zip(prompts, names, strict=True)]
    failing = [engine.submit(p, ASKED, adapter=bad.name) for p in prompts[:2]]
    assert [generation.collect()[0].token_ids for generation in mixed] == alone
    why = f"the logits of adapter '{bad.name}' are not finite: its weights or its lora_alpha are too large for float32"
    for generation in failing:
        with pytest.raises(GenerationFailedError, match=f"^{why}$"):
            generation.collect()
    assert engine.stats().overflowed == counted + 2
    assert caplog.text.count(why) == 1
    engine.check_integrity()
    # Pages that held NaN are taken by others.
    assert [c[0].token_ids for c in engine.generate(prompts, ASKED, adapters=names)] == alone
    engine.unload_adapter(good.name)
    engine.unload_adapter(bad.name)


def test_adapter_of_the_head_that_overflows_fails_though_the_hidden_states_are_finite(built):
    engine = built.engine
    built.adapters._preferred = ("resident",)
    rng = np.random.default_rng(0)
    width, vocab = built.model.hidden_size, built.model.vocab_size
    matrices = LoraMatrices(
        rng.standard_normal((2, width), np.float32) * np.float32(1e19),
        rng.standard_normal((vocab, 2), np.float32) * np.float32(1e20),
        scale=1.0,
    )
    engine.add_adapter(Adapter("head", {ModuleId(OUTSIDE, HEAD): matrices}, {"r": 2}))
    failing, base = engine.submit([3, 4, 5], ASKED, adapter="head"), engine.submit([3, 4, 5], ASKED)
    alone = engine.generate([[3, 4, 5]], ASKED)[0][0].token_ids
    assert base.collect()[0].token_ids == alone
    with pytest.raises(GenerationFailedError, match="the logits of adapter 'head' are not finite"):
        failing.collect()
    engine.unload_adapter("head")


def test_base_model_that_overflows_says_so(caplog):
    rig = make_rig()
    run = rig.executor._run
    rig.executor._run = lambda row: RowResult(None, None, (), overflowed="bfloat16") if row.samples else run(row)
    generations = [rig.engine.submit([5, 6, 7], SamplingParams(max_tokens=4)) for _ in range(2)]
    for generation in generations:
        with pytest.raises(
            GenerationFailedError, match=r"^the logits of the base model are not finite: its numbers overflow bfloat16$"
        ):
            generation.collect()
    rig.engine.check_integrity()
    assert rig.engine.healthy
    assert rig.engine.stats().finished == {"error": 2}
    assert caplog.text.count("requests that meet this end with an error") == 1


def test_reason_is_logged_once_for_each_load_of_an_adapter(caplog):
    overflows = Overflows()
    for adapter_id in (1, 1, 2):
        overflows.reason(adapter_id, "a", dtype="bfloat16")
    assert caplog.text.count("adapter 'a'") == 2
