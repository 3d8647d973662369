"""Engine over fakes: requests in, pieces out, and everything given back exactly once."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from plora_jax.adapters.adapter import Adapter, AdapterError
from plora_jax.engine import (
    AdapterExistsError,
    EngineDeadError,
    GenerationFailedError,
    OverloadedError,
    RequestError,
    SamplingParams,
    Sequence,
    UnknownAdapterError,
    loop,
)
from tests.plora_jax.engine_fakes import EOS, Rig, make_rig, text_of


def script(*token_ids: int) -> Callable[[Sequence], int]:
    """Draws these tokens one after another, whatever the request."""
    return lambda seq: token_ids[len(seq.output_ids)]


def counting(seq: Sequence) -> int:
    return 20 + len(seq.output_ids)


def steps(rig: Rig, count: int) -> None:
    for _ in range(count):
        rig.engine.step()
        rig.engine.check_integrity()


# --- what a request may be ---


@pytest.mark.parametrize(
    ("prompt", "sampling", "param", "message"),
    [
        ([], SamplingParams(), "prompt", "prompt must hold at least one token"),
        ([100], SamplingParams(), "prompt", "Token id 100 is out of vocabulary: ids are below 100"),
        ([-1], SamplingParams(), "prompt", "Token id -1 is out of vocabulary"),
        (
            [5] * 20,
            SamplingParams(max_tokens=13),
            "max_tokens",
            r"This model's maximum context length is 32 tokens. However, you requested 33 tokens \(20 in the prompt, "
            r"13 in max_tokens\). Please reduce the length of the prompt or max_tokens.",
        ),
        (
            [5] * 32,
            SamplingParams(max_tokens=None),
            "prompt",
            "your prompt holds 32 tokens, and at least 1 is generated",
        ),
        ([5] * 30, SamplingParams(max_tokens=None, min_tokens=3), "min_tokens", "at most the 2 tokens"),
        ([5], SamplingParams(temperature=-1.0), "temperature", "temperature must be between 0 and 100, got -1.0"),
        ([5], SamplingParams(n=10**6), "n", "n must be between 1 and 128"),
        ([5], SamplingParams(n=80), "n", "n must be at most 68, as many as this server holds at once, got 80"),
    ],
)
def test_submit_request_out_of_bounds_names_the_field(
    prompt: list[int], sampling: SamplingParams, param: str, message: str
) -> None:
    rig = make_rig()
    with pytest.raises(RequestError, match=message) as caught:
        rig.engine.submit(prompt, sampling)
    assert caught.value.param == param
    assert not rig.engine.step()


@pytest.mark.parametrize("max_tokens", [12, None])
def test_submit_sum_equal_to_the_context_generates_all_of_it(max_tokens: int | None) -> None:
    rig = make_rig()
    (completion,) = rig.engine.submit([5] * 20, SamplingParams(max_tokens=max_tokens)).collect()
    assert (len(completion.token_ids), completion.finish_reason) == (12, "length")
    rig.check_all_given_back()


def test_submit_beyond_the_waiting_limit_is_overloaded_until_one_ends() -> None:
    rig = make_rig(max_num_seqs=1, max_waiting=1)
    first = rig.engine.submit([5], SamplingParams())
    rig.engine.submit([5], SamplingParams())
    with pytest.raises(OverloadedError, match="2 sequences are in flight and at most 2 are admitted") as caught:
        rig.engine.submit([5], SamplingParams())
    assert caught.value.retry_after_s > 0
    first.collect()
    rig.engine.submit([5], SamplingParams()).collect()
    rig.check_all_given_back()


def test_submit_unknown_adapter_names_it() -> None:
    with pytest.raises(UnknownAdapterError, match="no adapter named 'x' is loaded"):
        make_rig().engine.submit([5], SamplingParams(), adapter="x")


def test_engine_with_more_sequences_than_the_executor_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs 4 is above the 3 decode rows"):
        make_rig(decode_rows=3)


# --- how a completion ends ---


def test_completion_end_token_stops_and_is_not_shown() -> None:
    rig = make_rig(draw=script(20, 21, EOS))
    (completion,) = rig.engine.submit([5], SamplingParams(skip_special_tokens=False)).collect()
    assert completion.text == text_of(20, 21)
    assert completion.token_ids == (20, 21, EOS)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_completion_ignore_eos_goes_on_past_the_end_token() -> None:
    rig = make_rig(draw=script(20, EOS, 21))
    (completion,) = rig.engine.submit([5], SamplingParams(max_tokens=3, ignore_eos=True)).collect()
    assert (completion.token_ids, completion.finish_reason) == ((20, EOS, 21), "length")


@pytest.mark.parametrize(("include", "text"), [(False, text_of(20)), (True, text_of(20, 21))])
def test_completion_stop_token_is_reported_and_shown_only_if_asked(include: bool, text: str) -> None:
    rig = make_rig(draw=counting)
    sampling = SamplingParams(stop_token_ids=(21,), include_stop_str_in_output=include)
    (completion,) = rig.engine.submit([5], sampling).collect()
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", 21)


def test_completion_stop_string_over_tokens_never_leaks() -> None:
    rig = make_rig(draw=counting)
    generation = rig.engine.submit([5], SamplingParams(stop=(text_of(22, 23),)))
    deltas = list(generation)
    assert [delta.text for delta in deltas] == [text_of(20), text_of(21), "", ""]
    assert [delta.token_ids for delta in deltas] == [(20,), (21,), (22,), (23,)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", text_of(22, 23))
    rig.check_all_given_back()


def test_completion_text_held_for_a_stop_string_is_flushed_at_the_end() -> None:
    rig = make_rig(draw=counting)
    (completion,) = rig.engine.submit([5], SamplingParams(stop=(text_of(22, 99),), max_tokens=3)).collect()
    assert (completion.text, completion.finish_reason) == (text_of(20, 21, 22), "length")


def test_completion_min_tokens_bars_stop_strings_and_suppresses_end_tokens() -> None:
    rig = make_rig(draw=lambda seq: 20)
    sampling = SamplingParams(min_tokens=3, stop=(text_of(20),), stop_token_ids=(7,))
    (completion,) = rig.engine.submit([5], sampling).collect()
    assert completion.token_ids == (20,) * 4
    assert rig.executor.plans[0].rows[0].sequence.suppressed_ids == (EOS, 7)


def test_completion_logprobs_are_reported_a_token() -> None:
    rig = make_rig(draw=counting)
    (completion,) = rig.engine.submit([5], SamplingParams(max_tokens=3, logprobs=1)).collect()
    assert completion.logprobs is not None
    assert [entry.token_id for entry in completion.logprobs] == [20, 21, 22]


def test_completion_prompt_logprobs_come_once_though_the_prompt_is_computed_again() -> None:
    rig = make_rig(draw=counting, prefill_chunk_tokens=3, num_pages=9)
    first = rig.engine.submit([5] * 15, SamplingParams(max_tokens=17))
    second = rig.engine.submit(list(range(10, 17)), SamplingParams(max_tokens=20, prompt_logprobs=1))
    (completion,) = second.collect()
    first.collect()
    assert rig.engine.stats().preemptions > 0
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    assert [entry.token_id for entry in completion.prompt_logprobs[1:] if entry] == list(range(11, 17))
    rig.check_all_given_back()


def test_completions_n_have_their_own_seeds_and_indices() -> None:
    rig = make_rig()
    completions = rig.engine.submit([5], SamplingParams(n=3, seed=-1, max_tokens=4)).collect()
    alone = [rig.engine.submit([5], SamplingParams(seed=s, max_tokens=4)).collect()[0] for s in (-1, 0, 1)]
    assert [completion.index for completion in completions] == [0, 1, 2]
    assert [completion.token_ids for completion in completions] == [completion.token_ids for completion in alone]
    assert len({completion.token_ids for completion in completions}) == 3


def test_completions_without_seed_follow_the_engine_seed() -> None:
    runs = [make_rig().engine.generate([[5], [5]], SamplingParams(max_tokens=4)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][0][0].token_ids != runs[0][1][0].token_ids


# --- cancelling ---


@pytest.mark.parametrize(("steps_before", "phase"), [(0, "waiting"), (1, "prefilling"), (4, "decoding")])
def test_cancel_in_each_phase_gives_back_once(steps_before: int, phase: str) -> None:
    rig = make_rig(prefill_chunk_tokens=8)
    rig.engine.add_adapter(Adapter("a", {}, {}))
    generation = rig.engine.submit([5] * 20, SamplingParams(n=2, max_tokens=9), adapter="a")
    steps(rig, steps_before)

    generation.cancel()
    generation.cancel()

    assert generation.finished
    deltas = list(generation)
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["abort", "abort"]
    assert any(delta.token_ids for delta in deltas) == (phase == "decoding")
    assert rig.engine.stats().finished == {"abort": 2}
    rig.check_all_given_back()


def test_cancel_after_the_end_changes_nothing() -> None:
    rig = make_rig()
    generation = rig.engine.submit([5], SamplingParams(max_tokens=2))
    steps(rig, 2)
    generation.cancel()
    assert generation.collect()[0].finish_reason == "length"
    assert rig.engine.stats().finished == {"length": 1}


def test_cancel_leaves_the_text_that_was_held_back() -> None:
    rig = make_rig(draw=counting)
    generation = rig.engine.submit([5], SamplingParams(stop=(text_of(21, 99),)))
    steps(rig, 2)
    generation.cancel()
    assert "".join(delta.text for delta in generation) == text_of(20, 21)


# --- threads and event loops ---


def test_thread_serves_many_submitters_at_once() -> None:
    rig = make_rig(num_pages=12)
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


# --- adapters ---


def test_adapter_is_listed_with_what_is_known_of_it() -> None:
    rig = make_rig()
    rig.engine.load_adapter("b", "/adapters/b")
    rig.engine.load_adapter("a", "/adapters/a")
    rig.clock.time_s = 7.0
    rig.engine.submit([5], SamplingParams(n=2), adapter="b")
    steps(rig, 1)
    first, second = rig.engine.adapters()
    assert (first.name, first.path, first.tier, first.in_flight, first.last_used_s) == (
        "a",
        "/adapters/a",
        "pool",
        0,
        None,
    )
    assert (second.name, second.tier, second.pinned, second.in_flight) == ("b", "device", True, 2)
    assert (second.last_used_s, second.strategy, second.nbytes) == (7.0, "resident", 1000)
    assert rig.engine.stats().running_adapters == ("b",)


def test_unload_while_running_ends_undisturbed_and_frees_after_the_last() -> None:
    rig = make_rig()
    adapter_id = load(rig, "a")
    running = rig.engine.submit([5], SamplingParams(max_tokens=6, seed=1), adapter="a")
    steps(rig, 2)

    rig.engine.unload_adapter("a")

    assert rig.engine.adapters() == []
    with pytest.raises(UnknownAdapterError):
        rig.engine.submit([5], SamplingParams(), adapter="a")
    assert adapter_id in rig.store.kept
    assert len(running.collect()[0].token_ids) == 6
    assert rig.store.kept == set()
    rig.check_all_given_back()


def test_unload_while_only_waiting_keeps_the_load_until_served() -> None:
    rig = make_rig(room=1)
    load(rig, "a")
    load(rig, "b")
    first = rig.engine.submit([5], SamplingParams(max_tokens=6), adapter="a")
    second = rig.engine.submit([5], SamplingParams(max_tokens=2), adapter="b")
    steps(rig, 1)
    assert rig.engine.stats().waiting_adapters == ("b",)
    rig.engine.unload_adapter("b")
    rig.engine.unload_adapter("a")
    assert len(second.collect()[0].token_ids) == 2
    assert first.finished
    assert rig.store.kept == set()


def test_unload_unused_frees_at_once_and_unknown_is_an_error() -> None:
    rig = make_rig()
    load(rig, "a")
    rig.engine.unload_adapter("a")
    assert rig.store.kept == set()
    with pytest.raises(UnknownAdapterError, match="'a'"):
        rig.engine.unload_adapter("a")


@pytest.mark.parametrize(("name", "why"), [("a", "already loaded"), ("base", "base model's name")])
def test_load_under_a_taken_name_is_refused(name: str, why: str) -> None:
    rig = make_rig()
    load(rig, "a")
    with pytest.raises(AdapterExistsError, match=why):
        rig.engine.load_adapter(name, "/other")
    assert len(rig.store.kept) == 1


def test_load_inplace_new_requests_take_the_new_load_and_running_ones_keep_the_old() -> None:
    rig = make_rig()
    old = load(rig, "a")
    running = rig.engine.submit([5], SamplingParams(max_tokens=4), adapter="a")
    steps(rig, 1)
    rig.engine.load_adapter("a", "/new", load_inplace=True)
    (new,) = rig.store.kept - {old}
    later = rig.engine.submit([5], SamplingParams(max_tokens=4), adapter="a")
    steps(rig, 1)
    assert [row.sequence.adapter_id for row in rig.executor.plans[-1].rows] == [old, new]
    running.collect()
    assert rig.store.kept == {new}
    later.collect()
    rig.check_all_given_back()


def test_load_same_name_twice_at_once_reads_it_once() -> None:
    reading, proceed = threading.Event(), threading.Event()
    reads: list[str] = []

    def read(name: str, path: str) -> Adapter:
        reads.append(path)
        reading.set()
        assert proceed.wait(10)
        return Adapter(name, {}, {}, path)

    rig = make_rig(load_adapter=read)
    thread = threading.Thread(target=rig.engine.load_adapter, args=("a", "/1"))
    thread.start()
    assert reading.wait(10)
    with pytest.raises(AdapterExistsError, match="'a' is being loaded by another request"):
        rig.engine.load_adapter("a", "/2", load_inplace=True)
    # A request that runs meanwhile is not held up.
    assert rig.engine.submit([5], SamplingParams(max_tokens=2)).collect()
    proceed.set()
    thread.join()
    assert reads == ["/1"]
    assert [status.path for status in rig.engine.adapters()] == ["/1"]


def test_load_that_fails_leaves_the_name_free_and_the_old_load_in_place() -> None:
    def read(name: str, path: str) -> Adapter:
        if path == "/bad":
            raise AdapterError("tensor x holds NaN")
        return Adapter(name, {}, {}, path)

    rig = make_rig(load_adapter=read)
    with pytest.raises(AdapterError, match="tensor x holds NaN"):
        rig.engine.load_adapter("a", "/bad")
    assert rig.engine.adapters() == []
    rig.engine.load_adapter("a", "/good")
    with pytest.raises(AdapterError, match="tensor x holds NaN"):
        rig.engine.load_adapter("a", "/bad", load_inplace=True)
    assert [status.path for status in rig.engine.adapters()] == ["/good"]


def test_adapter_that_never_fits_fails_its_request_alone() -> None:
    rig = make_rig(room=0)
    load(rig, "a")
    cold = rig.engine.submit([5], SamplingParams(max_tokens=2), adapter="a")
    base = rig.engine.submit([5], SamplingParams(max_tokens=2))
    assert len(base.collect()[0].token_ids) == 2
    with pytest.raises(GenerationFailedError, match="does not fit the device memory set aside for adapters"):
        cold.collect()
    rig.check_all_given_back()


def test_engine_without_a_store_refuses_adapters_and_serves_the_base() -> None:
    engine = make_rig(enable_lora=False).engine
    with pytest.raises(AdapterError, match="enable_lora=false"):
        engine.load_adapter("a", "/a")
    assert len(engine.submit([5], SamplingParams(max_tokens=2), adapter="base").collect()[0].token_ids) == 2


# --- when something fails ---


def test_step_that_fails_ends_its_requests_and_the_next_are_served() -> None:
    rig = make_rig(max_num_seqs=1)
    load(rig, "a")
    failing = rig.engine.submit([5], SamplingParams(max_tokens=2), adapter="a")
    waiting = rig.engine.submit([5], SamplingParams(max_tokens=2))
    rig.executor.fail_with = RuntimeError("device lost")
    steps(rig, 1)
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


def test_token_that_cannot_become_text_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(draw=lambda seq: 66 if seq.prompt_ids == [6] else 20)
    real = rig.engine.tokenizer.decode

    def decode(ids: list[int], skip_special_tokens: bool = True) -> str:
        if 66 in ids:
            raise ValueError("no text for 66")
        return real(ids, skip_special_tokens)

    monkeypatch.setattr(rig.engine.tokenizer, "decode", decode)
    bad = rig.engine.submit([6], SamplingParams(max_tokens=3))
    good = rig.engine.submit([5], SamplingParams(max_tokens=3))
    assert good.collect()[0].text == text_of(20, 20, 20)
    with pytest.raises(GenerationFailedError, match="its text could not be made: ValueError: no text for 66"):
        bad.collect()
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


# --- numbers ---


def test_stats_and_observations_follow_the_clock() -> None:
    rig = make_rig(max_num_seqs=1)

    def take_a_second(plan: object) -> None:
        rig.clock.time_s += 1.0

    rig.executor.before_step = take_a_second
    first = rig.engine.submit([5] * 3, SamplingParams(max_tokens=3))
    second = rig.engine.submit([5] * 7, SamplingParams(max_tokens=1))
    steps(rig, 1)
    assert (rig.engine.stats().running, rig.engine.stats().waiting) == (1, 1)
    assert rig.engine.stats().kv_usage == pytest.approx(1 / 32)
    first.collect()
    second.collect()

    stats, seen = rig.engine.stats(), rig.engine.take_observations()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished) == (10, 4, {"length": 2})
    assert seen.time_to_first_token_s == [1.0, 4.0]
    assert seen.inter_token_s == [1.0, 1.0]
    assert seen.queue_s == [0.0, 3.0]
    assert seen.e2e_s == [3.0, 4.0]
    assert (seen.prompt_tokens, seen.generation_tokens) == ([3, 7], [3, 1])
    assert rig.engine.take_observations().e2e_s == []
    assert (first.times.arrival_s, first.times.first_token_s, first.times.finished_s) == (0.0, 1.0, 3.0)


def load(rig: Rig, name: str) -> int:
    """Loads an adapter; returns its identity."""
    before = set(rig.store.kept)
    rig.engine.load_adapter(name, f"/adapters/{name}")
    (adapter_id,) = rig.store.kept - before
    return adapter_id
