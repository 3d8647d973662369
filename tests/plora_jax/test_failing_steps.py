"""Steps that fail while they compute near the data: tried once more without, and no request is lost."""

import random
from collections.abc import Callable

import pytest

from plora_jax.engine import GenerationFailedError, SamplingParams
from plora_jax.engine.plan import KvLostError
from tests.plora_jax.conformance import deploy
from tests.plora_jax.engine_fakes import make_rig
from tests.plora_jax.scarce import make_adapter

MODEL = "llama"
LOCAL = {"lora_strategy": "near_data", "attention_strategy": "local"}
DISTRIBUTED = {"lora_strategy": "resident", "attention_strategy": "distributed"}


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


class Break:
    """Has the programs of an executor fail from some step on.

    Args:
        executor: real.
        when: number of the first step that fails.
        takes: what a failed step does to the KV pages that it was given: "nothing", or "all": they are gone.
    """

    def __init__(self, executor, monkeypatch, *, when, takes="nothing"):
        self.steps, self.failed, self._when, self._takes = 0, 0, when, takes
        self._patch = monkeypatch
        self.bad: Callable[[], bool] = lambda: True
        for program in executor.programs.values():
            self._break(executor, program)

    def _break(self, executor, program):
        def run(params, pool, adapters, kv, drawn, parcels):
            self.steps += 1
            if self.steps < self._when or not self.bad():
                return program.run(params, pool, adapters, kv, drawn, parcels)
            self.failed += 1
            if self._takes != "nothing":
                kv.delete()
            raise RuntimeError("the host's cores are gone")

        self._patch.setitem(executor.programs, program.builder.bucket, program._replace(run=run))


@pytest.fixture(params=[LOCAL, DISTRIBUTED], ids=["adapters", "attention"])
def deployed(request):
    built = deploy(MODEL, **request.param, page_tokens=4)
    built.kv.keep(0)
    for i in range(3):
        built.engine.add_adapter(make_adapter(f"n{i}", seed=i, rank=4 + i, config=built.model, std=0.3))
    return built


def serve(engine):
    prompts = [[*range(3 + i, 12 + i)] for i in range(6)]
    asked = [engine.submit(p, greedy(10), adapter=f"n{i % 3}") for i, p in enumerate(prompts)]
    while not all(generation.finished for generation in asked):
        engine.step()
        engine.check_integrity()
    return [generation.collect()[0].token_ids for generation in asked]


@pytest.mark.parametrize("takes", ["nothing", "all"])
def test_step_that_fails_near_the_data_is_made_again_without(deployed, takes, monkeypatch, caplog):
    built = deployed
    wanted = serve(built.engine)
    broken = Break(built.executor, monkeypatch, when=6, takes=takes)
    broken.bad = lambda: built.near_data.failure is None
    assert serve(built.engine) == wanted
    assert broken.failed == 1
    assert built.near_data.failure == "a step that used it failed: RuntimeError: the host's cores are gone"
    assert caplog.text.count("near-data compute has failed (a step that used it failed: RuntimeError: the host's") == 1
    lost = "the step took the KV pages of the device with it: what the pool does not hold is computed again"
    assert (lost in caplog.text) == (takes == "all")
    assert built.engine.healthy


def test_step_that_fails_again_without_near_data_compute_fails_its_requests(monkeypatch):
    built = deploy(MODEL, **LOCAL, page_tokens=4)
    built.engine.add_adapter(make_adapter("n0", seed=0, rank=4, config=built.model))
    broken = Break(built.executor, monkeypatch, when=3)
    generation = built.engine.submit([5, 6, 7], greedy(10), adapter="n0")
    while not generation.finished:
        built.engine.step()
    assert broken.failed == 2
    with pytest.raises(GenerationFailedError, match="the step that computed it failed: RuntimeError: the host's cores"):
        generation.collect()
    broken.bad = lambda: False
    assert len(built.engine.generate([[5, 6, 7]], greedy(4), adapters=["n0"])[0][0].token_ids) == 4


def test_step_that_computes_nothing_near_the_data_is_not_blamed_on_it(monkeypatch):
    built = deploy(MODEL, **DISTRIBUTED, page_tokens=4)
    broken = Break(built.executor, monkeypatch, when=3)
    generation = built.engine.submit([5, 6, 7], greedy(10))
    while not generation.finished:
        built.engine.step()
    assert broken.failed == 1
    assert built.near_data.failure is None


@pytest.mark.parametrize("seed", range(4))
def test_rewound_sequences_compute_again_what_the_pool_does_not_hold(seed):
    """The fake executor checks that each row finds the keys and values of its own past."""
    rng = random.Random(seed)
    wanted = make_rig().engine.generate([[s] * 5 for s in range(8)], SamplingParams(temperature=0, max_tokens=12))
    rig = make_rig(pool_pages=14, device_pages=12)
    lost = 0

    def lose(plan):
        nonlocal lost
        if rng.random() < 0.3:
            lost += 1
            rig.executor.memory.device.clear()
            raise KvLostError("gone")

    rig.executor.before_step = lose
    asked = [rig.engine.submit([s] * 5, SamplingParams(temperature=0, max_tokens=12)) for s in range(8)]
    while not all(generation.finished for generation in asked):
        rig.step()
    assert lost > 3
    assert [generation.collect() for generation in asked] == wanted
    rig.check_all_given_back()
