"""One deployment under several policies, each of which begins as in an engine that has just started."""

import pytest

from plora_jax.engine import SamplingParams
from plora_jax.engine.restart import restart
from tests.plora_jax.conformance import deploy
from tests.plora_jax.planning_rig import AUTO
from tests.plora_jax.scarce import make_adapter

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
NAMES = ["n0", "n1", "n2"]


@pytest.fixture(scope="module")
def built():
    built = deploy("llama", plan_interval_steps=1, **AUTO)
    for seed, name in enumerate(NAMES):
        built.engine.add_adapter(make_adapter(name, seed=seed, rank=8, config=built.model))
    return built


def serve(built):
    done = built.engine.generate([[5, 6, 7]] * 3, GREEDY, adapters=NAMES)
    return [completions[0].token_ids for completions in done]


def strategies_of(built):
    return {status.strategy for status in built.engine.adapters()}


def test_restart_takes_another_policy_and_changes_no_token(built):
    tokens = serve(built)
    restart(built, lora_strategy="resident")
    assert built.adapters.device_bytes_used == 0
    assert serve(built) == tokens
    assert strategies_of(built) == {"resident"}
    assert built.adapters.device_bytes_used > 0
    planners = []
    restart(built, lora_strategy="auto", planner="lru", hardware="h100", wrap=lambda p: planners.append(p) or p)
    assert built.adapters.device_bytes_used == 0
    assert planners[0].decision is None
    assert planners[0].about == "lru, for hardware h100, cost model ideal"
    assert strategies_of(built) == {"resident"}, "the device has room for all, though none is on it"
    assert serve(built) == tokens
    assert planners[0].decision is not None
    assert built.adapters.device_bytes_used > 0, "lru keeps on the device what is used"
    built.engine.check_integrity()
    built.adapters.check_integrity()


def test_restart_ends_the_thread_of_the_planner_before(built):
    planners = []
    restart(built, lora_strategy="auto", wrap=lambda p: planners.append(p) or p)
    restart(built, lora_strategy="auto")
    with pytest.raises(RuntimeError, match="after shutdown"):
        planners[0]._thread.submit(int)


def test_restart_is_refused_while_requests_run_and_without_adapters(built):
    generation = built.engine.submit([5, 6, 7], GREEDY, adapter="n0")
    built.engine.step()
    with pytest.raises(ValueError, match="requests are in flight: wait for them before the engine starts over"):
        restart(built, lora_strategy="auto")
    generation.collect()
    with pytest.raises(ValueError, match=r"--planner must be one of joint, paper, lru, got 'oracle'"):
        restart(built, lora_strategy="auto", planner="oracle")
    bare = deploy("llama", enable_lora=False)
    with pytest.raises(ValueError, match="this engine has no adapters to plan for: build it with enable_lora"):
        restart(bare, lora_strategy="auto")
