"""Engine over fakes: what a request may be, how its completions end, what is counted."""

from collections.abc import Callable

import pytest

from plora_jax.adapters.adapter import Adapter
from plora_jax.engine import (
    OverloadedError,
    RequestError,
    SamplingParams,
    Sequence,
    UnknownAdapterError,
)
from tests.plora_jax.engine_fakes import EOS, make_rig, text_of


def script(*token_ids: int) -> Callable[[Sequence], int]:
    """Draws these tokens one after another, whatever the request."""
    return lambda seq: token_ids[len(seq.output_ids)]


def counting(seq: Sequence) -> int:
    return 20 + len(seq.output_ids)


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
    rig = make_rig(draw=counting, prefill_chunk_tokens=3, pool_pages=8)
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
    rig.step(steps_before)

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
    rig.step(2)
    generation.cancel()
    assert generation.collect()[0].finish_reason == "length"
    assert rig.engine.stats().finished == {"length": 1}


def test_cancel_leaves_the_text_that_was_held_back() -> None:
    rig = make_rig(draw=counting)
    generation = rig.engine.submit([5], SamplingParams(stop=(text_of(21, 99),)))
    rig.step(2)
    generation.cancel()
    assert "".join(delta.text for delta in generation) == text_of(20, 21)


# --- numbers ---


def test_stats_count_suspensions_and_pages_brought_back() -> None:
    rig = make_rig(device_pages=2, prefill_chunk_tokens=4)
    sampling = SamplingParams(max_tokens=9)
    slow = [rig.engine.submit([5, 6], sampling, priority=1) for _ in range(2)]
    rig.step(2)
    rig.engine.submit([7] * 8, sampling).collect()
    for generation in slow:
        assert len(generation.collect()[0].token_ids) == 9
    stats = rig.engine.stats()
    assert (stats.preemptions, stats.suspensions, stats.restores) == (1, 1, 1)
    rig.check_all_given_back()


def test_stats_and_observations_follow_the_clock() -> None:
    rig = make_rig(max_num_seqs=1)

    def take_a_second(plan: object) -> None:
        rig.clock.time_s += 1.0

    rig.executor.before_step = take_a_second
    first = rig.engine.submit([5] * 3, SamplingParams(max_tokens=3))
    second = rig.engine.submit([5] * 7, SamplingParams(max_tokens=1))
    rig.step(1)
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
