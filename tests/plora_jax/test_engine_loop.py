"""Engine over fakes: threads and event loops, failures, shutting down, everything at once."""

import asyncio
import random
import threading
import time
from typing import Any

import pytest

from plora_jax.engine import (
    AdapterExistsError,
    EngineDeadError,
    Generation,
    GenerationFailedError,
    OverloadedError,
    RequestError,
    SamplingParams,
    Sequence,
    UnknownAdapterError,
    loop,
)
from plora_jax.engine.plan import RowResult, StepPlan
from tests.plora_jax.engine_fakes import make_rig, text_of


def counting(seq: Sequence) -> int:
    return 20 + len(seq.output_ids)


# --- threads and event loops ---


def test_thread_serves_many_submitters_at_once() -> None:
    rig = make_rig(pool_pages=11)
    rig.engine.start()
    results: dict[int, tuple[int, ...]] = {}

    def ask(seed: int) -> None:
        generation = rig.engine.submit([seed] * 5, SamplingParams(seed=seed, max_tokens=10))
        results[seed] = tuple(token for delta in generation for token in delta.token_ids)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.engine.shutdown()
    rig.check_all_given_back()
    alone = make_rig().engine
    expected = alone.generate([[s] * 5 for s in range(16)], [SamplingParams(seed=s, max_tokens=10) for s in range(16)])
    assert [results[seed] for seed in range(16)] == [of_one[0].token_ids for of_one in expected]


def test_async_consumers_in_one_loop_get_all_pieces_and_may_cancel() -> None:
    rig = make_rig()
    rig.engine.start()

    async def first_piece_only() -> str | None:
        generation = rig.engine.submit([5], SamplingParams(max_tokens=30))
        async for _ in generation:
            generation.cancel()
            break
        return [delta async for delta in generation][-1].finish_reason

    async def main() -> list[object]:
        whole = [rig.engine.submit([s], SamplingParams(seed=s, max_tokens=8)).acollect() for s in range(8)]
        return list(await asyncio.gather(*whole, first_piece_only()))

    *completions, reason = asyncio.run(main())
    rig.engine.shutdown()
    assert reason in ("abort", "length")
    alone = make_rig().engine
    assert completions == [alone.submit([s], SamplingParams(seed=s, max_tokens=8)).collect() for s in range(8)]
    rig.check_all_given_back()


def test_deliver_to_a_closed_loop_does_not_disturb_the_engine() -> None:
    rig = make_rig()
    reached, proceed = threading.Event(), threading.Event()

    def hold(plan: object) -> None:
        reached.set()
        proceed.wait(10)

    rig.executor.before_step = hold
    rig.engine.start()
    generation = rig.engine.submit([5], SamplingParams(max_tokens=3))

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(generation), 0.01)

    asyncio.run(give_up())
    assert reached.wait(10)
    proceed.set()
    assert len(generation.collect()[0].token_ids) == 3
    rig.engine.shutdown()
    rig.check_all_given_back()


def test_generate_more_prompts_than_are_admitted_serves_all_in_order() -> None:
    rig = make_rig(max_num_seqs=2, max_waiting=1)
    completions = rig.engine.generate([[s] for s in range(9)], SamplingParams(max_tokens=3, seed=1))
    expected = [make_rig().engine.submit([s], SamplingParams(max_tokens=3, seed=1)).collect() for s in range(9)]
    assert completions == expected
    rig.check_all_given_back()


def test_generate_bad_prompt_cancels_those_before_it() -> None:
    rig = make_rig()
    with pytest.raises(RequestError, match="at least one token"):
        rig.engine.generate([[5], []], SamplingParams())
    rig.check_all_given_back()


# --- while the next step runs ---


def test_token_reaches_its_client_while_the_next_step_runs() -> None:
    rig = make_rig()
    first_seen, in_time = threading.Event(), []
    execute = rig.executor.execute

    def slowly(plan: StepPlan) -> list[RowResult]:
        results = execute(plan)
        if len(rig.executor.plans) == 2:
            in_time.append(first_seen.wait(10))
        return results

    rig.executor.execute = slowly
    rig.engine.start()
    generation = rig.engine.submit([5], SamplingParams(max_tokens=3))
    next(generation)
    first_seen.set()
    generation.collect()
    rig.engine.shutdown()
    assert in_time == [True]


@pytest.mark.parametrize(
    ("ends", "steps"), [({"stop": text_of(22)}, 4), ({"stop_token_ids": (22,)}, 4), ({"max_tokens": 3}, 3)]
)
def test_completion_that_ends_has_at_most_a_row_in_the_step_that_was_begun(ends: dict[str, Any], steps: int) -> None:
    rig = make_rig(draw=counting)
    rig.engine.start()
    generation = rig.engine.submit([5], SamplingParams(**{"max_tokens": 9, **ends}))
    assert sum(len(delta.token_ids) for delta in generation) == 3
    rig.engine.shutdown()
    assert len(rig.executor.plans) == steps
    rig.check_all_given_back()


# --- when something fails ---


def test_step_that_fails_ends_its_requests_and_the_next_are_served() -> None:
    rig = make_rig(max_num_seqs=1)
    rig.load("a")
    failing = rig.engine.submit([5], SamplingParams(max_tokens=2), adapter="a")
    waiting = rig.engine.submit([5], SamplingParams(max_tokens=2))
    rig.executor.fail_with = RuntimeError("device lost")
    rig.step(1)
    rig.executor.fail_with = None

    with pytest.raises(GenerationFailedError, match="the step that computed it failed: RuntimeError: device lost"):
        failing.collect()
    assert len(waiting.collect()[0].token_ids) == 2
    assert rig.engine.healthy
    rig.check_all_given_back()


def test_step_that_fails_three_times_in_a_row_kills_the_engine() -> None:
    rig = make_rig(max_num_seqs=1)
    generations = [rig.engine.submit([5], SamplingParams()) for _ in range(5)]
    rig.executor.fail_with = RuntimeError("device lost")
    rig.engine.start()
    ends = [list(generation)[-1] for generation in generations]
    assert [end.finish_reason for end in ends] == ["error"] * 5
    assert "the engine is dead: 3 steps in a row failed" in (ends[-1].error or "")
    assert not rig.engine.healthy
    with pytest.raises(EngineDeadError, match="device lost"):
        rig.engine.submit([5], SamplingParams())
    rig.engine.shutdown()
    rig.check_all_given_back()


def test_step_that_fails_now_and_then_does_not_kill_the_engine() -> None:
    rig = make_rig()
    for _ in range(4):
        rig.executor.fail_with = RuntimeError("hiccup")
        assert list(rig.engine.submit([5], SamplingParams()))[-1].finish_reason == "error"
        rig.executor.fail_with = None
        assert len(rig.engine.submit([5], SamplingParams(max_tokens=2)).collect()[0].token_ids) == 2
    assert rig.engine.healthy


@pytest.mark.parametrize("in_thread", [False, True])
def test_token_that_cannot_become_text_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, in_thread: bool
) -> None:
    rig = make_rig(draw=lambda seq: 66 if seq.prompt_ids == [6] else 20)
    real = rig.engine.tokenizer.decode

    def decode(ids: list[int], skip_special_tokens: bool = True) -> str:
        if 66 in ids:
            raise ValueError("no text for 66")
        return real(ids, skip_special_tokens)

    monkeypatch.setattr(rig.engine.tokenizer, "decode", decode)
    if in_thread:
        rig.engine.start()
    bad = rig.engine.submit([6], SamplingParams(max_tokens=3))
    good = rig.engine.submit([5], SamplingParams(max_tokens=3))
    assert good.collect()[0].text == text_of(20, 20, 20)
    with pytest.raises(GenerationFailedError, match="its text could not be made: ValueError: no text for 66"):
        bad.collect()
    assert rig.engine.healthy
    if in_thread:
        rig.engine.shutdown()
    rig.check_all_given_back()


def test_loop_that_fails_fails_everything_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()

    def broken(*_: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(rig.engine._scheduler, "schedule", broken)
    rig.engine.start()
    generation = rig.engine.submit([5], SamplingParams())
    with pytest.raises(GenerationFailedError, match="its loop failed: KeyError"):
        generation.collect()
    with pytest.raises(EngineDeadError):
        rig.engine.submit([5], SamplingParams())


def test_request_on_its_way_in_when_the_engine_dies_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    reached, proceed = threading.Event(), threading.Event()

    def hold(plan: object) -> None:
        reached.set()
        assert proceed.wait(10)

    monkeypatch.setattr(loop, "MAX_FAILED_STEPS", 1)
    rig.executor.before_step, rig.executor.fail_with = hold, RuntimeError("device lost")
    rig.engine.start()
    generations = [rig.engine.submit([5], SamplingParams())]
    assert reached.wait(10)
    generations.append(rig.engine.submit([5], SamplingParams()))
    proceed.set()
    for generation in generations:
        with pytest.raises(GenerationFailedError, match="device lost"):
            generation.collect()
    rig.engine.shutdown()
    rig.check_all_given_back()


def test_step_whose_pages_cannot_be_written_to_the_pool_ends_its_requests_alone() -> None:
    rig = make_rig(max_num_seqs=1)
    failing = rig.engine.submit([5] * 4, SamplingParams(max_tokens=2))
    rig.executor.memory.fail_with = RuntimeError("link down")
    rig.step(1)
    rig.executor.memory.fail_with = None
    with pytest.raises(GenerationFailedError, match="the step that computed it failed: RuntimeError: link down"):
        failing.collect()
    assert len(rig.engine.submit([5] * 4, SamplingParams(max_tokens=2)).collect()[0].token_ids) == 2
    rig.check_all_given_back()


# --- shutting down ---


@pytest.mark.parametrize("threaded", [False, True])
def test_shutdown_lets_requests_finish_within_the_drain(threaded: bool) -> None:
    rig = make_rig()
    generation = rig.engine.submit([5], SamplingParams(max_tokens=20))
    if threaded:
        rig.engine.start()
    rig.engine.shutdown(drain_s=5.0)
    assert generation.collect()[0].finish_reason == "length"
    assert not rig.engine.healthy
    with pytest.raises(EngineDeadError, match="shutting down"):
        rig.engine.submit([5], SamplingParams())
    rig.check_all_given_back()


@pytest.mark.parametrize("threaded", [False, True])
def test_shutdown_cancels_what_outlasts_the_drain(threaded: bool) -> None:
    rig = make_rig()

    def take_a_second(plan: object) -> None:
        while not rig.engine._loop._closing:
            time.sleep(0.001)
        rig.clock.time_s += 1.0

    rig.executor.before_step = take_a_second
    generation = rig.engine.submit([5], SamplingParams(max_tokens=20))
    if threaded:
        rig.engine.start()
    rig.engine.shutdown(drain_s=4.0)
    (completion,) = generation.collect()
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == 4
    rig.check_all_given_back()


def test_shutdown_of_an_idle_thread_returns_and_may_be_repeated() -> None:
    rig = make_rig()
    rig.engine.start()
    rig.engine.shutdown(drain_s=60.0)
    rig.engine.shutdown()
    assert not rig.engine.healthy
    with pytest.raises(RuntimeError, match="was shut down"):
        rig.engine.start()


# --- everything at once ---


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_cancels_loads_and_failures_leave_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    rig = make_rig(
        pool_pages=rng.randint(8, 19),
        device_pages=rng.randint(2, 5),
        keep_copies=rng.choice([None, 0, 1]),
        room=rng.randint(1, 2),
        prefill_chunk_tokens=5,
        max_waiting=12,
        max_adapter_passes=3,
    )
    generations: list[Generation] = []
    for _ in range(300):
        name = rng.choice("abcd")
        action = rng.random()
        try:
            if action < 0.35:
                prompt = [5] * rng.randint(1, 20)
                sampling = SamplingParams(n=rng.randint(1, 2), max_tokens=rng.randint(1, 12), stop=(text_of(30),))
                adapter = name if rng.random() < 0.7 else None
                generations.append(rig.engine.submit(prompt, sampling, adapter=adapter, priority=rng.randint(0, 1)))
            elif action < 0.45 and generations:
                rng.choice(generations).cancel()
            elif action < 0.55:
                rig.engine.load_adapter(name, "/x", load_inplace=rng.random() < 0.5)
            elif action < 0.6:
                rig.engine.unload_adapter(name)
        except (OverloadedError, UnknownAdapterError, AdapterExistsError):
            pass
        rig.executor.fail_with = RuntimeError("hiccup") if rng.random() < 0.02 else None
        rig.engine.step()
        rig.engine.check_integrity()
    rig.executor.fail_with = None
    ends = [[d.finish_reason for d in g if d.finish_reason] for g in generations]

    assert [len(reasons) for reasons in ends] == [generation.n for generation in generations]
    assert len(generations) > 50
    assert {reason for reasons in ends for reason in reasons} >= {"length", "abort"}
    rig.check_all_given_back()
    for status in rig.engine.adapters():
        rig.engine.unload_adapter(status.name)
    assert rig.store.kept == set()
