"""Steps that are begun while the one before them is under way: when, with which rows, and that no token changes."""

import random

import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.engine import GenerationFailedError, SamplingParams
from plora_jax.engine.batch import StepTokens
from plora_jax.engine.plan import KvLostError
from plora_jax.engine.step import OVERFLOWED, known_tokens
from tests.plora_jax.conformance import deploy, engine_over
from tests.plora_jax.engine_fakes import Rig, hashed_token, make_rig
from tests.plora_jax.scarce import deploy_pages, make_adapter

MODEL = "llama"


def run_ahead(engine) -> None:
    """Has an engine without a thread begin steps as one with a thread does."""
    loop = engine._loop
    loop._may_run_ahead = lambda: not loop._commands and not loop._tasks


def ahead_rig(**options) -> Rig:
    rig = make_rig(**options)
    run_ahead(rig.engine)
    return rig


def greedy(count: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, seed=1, **options)


def kinds(rig: Rig) -> list[tuple[bool, list[int]]]:
    """Of each step: whether it was begun ahead, and its sequences."""
    return [(plan.ahead, [row.sequence.seq_id for row in plan.rows]) for plan in rig.executor.plans]


def finish(rig: Rig, asked: list) -> list:
    while not all(generation.finished for generation in asked):
        rig.step()
    rig.step()  # what was begun for completions that had ended already
    return [generation.collect() for generation in asked]


# --- which steps ---


def test_decode_steps_are_begun_ahead_and_the_last_one_by_length_is_known() -> None:
    rig = ahead_rig()
    asked = [rig.engine.submit([5], greedy(count)) for count in (2, 4)]
    finish(rig, asked)
    assert kinds(rig) == [(False, [1, 2]), (True, [1, 2]), (True, [2]), (True, [2])]
    rig.check_all_given_back()


def test_completion_that_ends_by_its_token_has_one_row_more_whose_token_nobody_gets() -> None:
    rig = ahead_rig(draw=lambda seq: 20 + len(seq.output_ids))
    generation = rig.engine.submit([5], greedy(9, stop_token_ids=(22,)))
    ((completion,),) = finish(rig, [generation])
    assert completion.token_ids == (20, 21, 22)
    assert [ahead for ahead, _ in kinds(rig)] == [False, True, True, True]
    rig.check_all_given_back()


def test_prompts_in_chunks_and_newcomers_are_not_planned_ahead() -> None:
    rig = ahead_rig()
    first = rig.engine.submit([5] * 24, greedy(6))
    rig.step(3)
    second = rig.engine.submit([6], greedy(2))
    finish(rig, [first, second])
    # The third step was begun when the second sequence came in, which starts in the next.
    assert kinds(rig) == [
        (False, [1]),
        (False, [1]),
        (True, [1]),
        (True, [1]),
        (False, [1, 2]),
        (True, [1, 2]),
        (True, [1]),
    ]


def test_waiting_sequence_starts_as_soon_as_one_is_known_to_end() -> None:
    rig = ahead_rig(max_num_seqs=1)
    finish(rig, [rig.engine.submit([5], greedy(3)) for _ in range(2)])
    assert kinds(rig) == [(False, [1]), (True, [1]), (True, [1]), (False, [2]), (True, [2]), (True, [2])]


def test_waiting_sequence_of_higher_priority_is_not_kept_waiting() -> None:
    rig = ahead_rig(max_num_seqs=1)
    first = rig.engine.submit([5], greedy(6))
    rig.step(2)
    second = rig.engine.submit([5], greedy(1), priority=-1)
    finish(rig, [first, second])
    assert [rows for _, rows in kinds(rig)] == [[1], [1], [1], [2], [1], [1], [1]]


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalty_waits_for_the_tokens_that_it_looks_at(penalty: str) -> None:
    rig = ahead_rig()
    finish(rig, [rig.engine.submit([5], greedy(4, **{penalty: 1.5}))])
    assert not any(ahead for ahead, _ in kinds(rig))


def test_lack_of_pages_is_left_to_the_next_plan() -> None:
    rig = ahead_rig(pool_pages=8)
    asked = [rig.engine.submit([s] * 12, greedy(20)) for s in range(2)]
    assert finish(rig, asked) == [make_rig().engine.submit([s] * 12, greedy(20)).collect() for s in range(2)]
    assert rig.engine.stats().preemptions
    rig.check_all_given_back()


def test_functions_between_steps_find_nothing_begun() -> None:
    rig = make_rig()
    loop, seen = rig.engine._loop, []
    rig.engine.start()
    generation = rig.engine.submit([5], SamplingParams(max_tokens=27, ignore_eos=True))
    for _ in generation:
        loop.run_between_steps(lambda: seen.append((rig.executor._begun, loop._ahead.rows, loop.check_integrity())))
    rig.engine.shutdown()
    assert seen
    assert all(begun is None and not rows for begun, rows, _ in seen)


@pytest.mark.parametrize("seed", range(8))
def test_random_load_has_the_tokens_of_steps_one_after_another(seed: int) -> None:
    """The fake executor checks that each row finds the keys and values of its own past, and has a page to write to."""
    rng = random.Random(seed)

    def draw(seq):
        token = hashed_token(seq)
        return 2 if token % 11 == 0 else token  # the end, now and then

    def options() -> SamplingParams:
        stop = (rng.randrange(10, 100),) if rng.random() < 0.3 else ()
        penalty = 0.5 if rng.random() < 0.1 else 0.0
        return greedy(rng.randint(1, 16), stop_token_ids=stop, presence_penalty=penalty, min_tokens=0)

    prompts = [[rng.randrange(10, 100) for _ in range(rng.randint(1, 14))] for _ in range(24)]
    params = [options() for _ in prompts]
    wanted = make_rig(draw=draw).engine.generate(prompts, params)
    rig = ahead_rig(draw=draw, pool_pages=rng.choice([10, 14, 32]), device_pages=rng.choice([8, 12, 32]))
    waiting, asked = list(zip(prompts, params, strict=True)), []
    while waiting or not all(generation.finished for generation in asked):
        while waiting and rng.random() < 0.4:
            prompt, sampling = waiting.pop(0)
            asked.append(rig.engine.submit(prompt, sampling))
        rig.step()
    rig.step()
    assert [generation.collect() for generation in asked] == wanted
    assert sum(ahead for ahead, _ in kinds(rig)) > 5
    rig.check_all_given_back()


# --- when something fails ---


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_lose_keys_and_values_are_computed_again(seed: int) -> None:
    rng = random.Random(seed)
    wanted = make_rig().engine.generate([[s] * 5 for s in range(8)], greedy(12))
    rig = ahead_rig(pool_pages=14, device_pages=12)
    lost = []

    def lose(plan):
        if rng.random() < 0.3:
            lost.append(plan.ahead)
            rig.executor.memory.device.clear()
            raise KvLostError("gone")

    rig.executor.before_step = lose
    assert finish(rig, [rig.engine.submit([s] * 5, greedy(12)) for s in range(8)]) == wanted
    assert any(lost), "no step that was begun ahead lost them"
    rig.check_all_given_back()


def test_step_that_fails_takes_the_one_begun_after_it_along() -> None:
    rig = ahead_rig()
    failing = rig.engine.submit([5], greedy(9))
    rig.step(3)
    rig.executor.fail_with = RuntimeError("device lost")
    rig.step()
    rig.executor.fail_with = None
    assert failing.finished
    (after,) = finish(rig, [rig.engine.submit([6], greedy(3))])
    assert [after] == [make_rig().engine.submit([6], greedy(3)).collect()]
    assert rig.engine.healthy
    rig.check_all_given_back()


# --- in the compiled step ---


@pytest.fixture(scope="module")
def deployed():
    built = deploy_pages(MODEL, pool=200, adapters=24, kv=40, page_tokens=4, lora_strategy="auto")
    for i in range(3):
        built.engine.add_adapter(make_adapter(f"n{i}", seed=i, rank=4 + i, config=built.model, std=0.3))
    return built


def mixed(count: int) -> list[tuple[list[int], SamplingParams, str | None]]:
    """Requests that differ in everything that a row of a step can be told."""
    rng = random.Random(7)
    options = (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": tuple(range(100))},
        {"temperature": 1.0, "seed": 9, "stop_token_ids": tuple(range(0, 256, 16))},
        {"temperature": 0.0, "logit_bias": {7: 3.0}},
    )
    penalised = {"temperature": 0.0, "repetition_penalty": 1.3}
    asked = []
    for i in range(count):
        prompt = [rng.randrange(3, 250) for _ in range(rng.randint(1, 20))]
        chosen = options[i % len(options)] if i < count - 2 else penalised
        params = SamplingParams(max_tokens=rng.randint(6, 20), ignore_eos=i % 3 == 0, **chosen)
        asked.append((prompt, params, (None, "n0", "n1", "n2")[i % 4]))
    return asked


def test_thread_gives_the_tokens_of_steps_one_after_another(deployed) -> None:
    built, asked = deployed, mixed(32)
    wanted = [built.engine.submit(p, s, adapter=a).collect() for p, s, a in asked]
    began = []
    begin = built.executor.begin
    built.executor.begin = lambda plan: began.append(len(plan.rows)) or begin(plan)
    built.engine.start()
    try:
        generations = [built.engine.submit(p, s, adapter=a) for p, s, a in asked]
        found = [generation.collect() for generation in generations]
    finally:
        built.engine.shutdown()
        del built.executor.begin
    for one, other in zip(found, wanted, strict=True):
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
        for mine, theirs in zip(one[0].logprobs or (), other[0].logprobs or (), strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert len(began) > 10
    assert max(began) > 1
    assert built.kv.num_held_pages == 0
    built.kv.check_integrity()
    built.adapters.check_integrity()


class Failures:
    """Has the steps of an executor fail that runs ahead: at their dispatch, or when their results are asked for.

    Args:
        built: the deployment, without a thread.
        takes: what a failed step does to the KV pages of the device: "nothing", or "all": they are gone.
        begun: the first step that is begun ahead fails at its dispatch.
        under_way: a step fails while the one after it is begun, or once that could not be.
        before: called before a step under way fails.
    """

    def __init__(self, built, monkeypatch, *, takes, begun=False, under_way=False, before=lambda: None):
        executor, memory = built.executor, built.memory
        start, unpack = executor._start, executor._unpack
        self.begun = self.under_way = 0

        def fail():
            if takes == "all":
                memory.kv.delete()
            raise RuntimeError("the host's cores are gone")

        def failing_start(plan, bucket, parts, *, drawn=None):
            if begun and plan.ahead and not self.begun:
                self.begun += 1
                fail()
            return start(plan, bucket, parts, drawn=drawn)

        def failing_unpack(flight):
            # The step whose next one took KV with it at its dispatch is planned again, and does not come here.
            due = self.begun and takes == "nothing" if begun else executor._begun is not None
            if under_way and due and not self.under_way:
                self.under_way += 1
                before()
                fail()
            return unpack(flight)

        monkeypatch.setattr(executor, "_start", failing_start)
        monkeypatch.setattr(executor, "_unpack", failing_unpack)


def seeded(count: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=11, max_tokens=count, ignore_eos=True)


def serve(engine, prompts, adapter):
    asked = [engine.submit(prompt, seeded(10), adapter=adapter) for prompt in prompts]
    while not all(generation.finished for generation in asked):
        engine.step()
        engine.check_integrity()
    return [generation.collect()[0].token_ids for generation in asked]


PROMPTS = [[*range(3 + i, 12 + i)] for i in range(4)]
ONCE = [{"begun": True}, {"under_way": True}, {"begun": True, "under_way": True}]


@pytest.mark.parametrize("takes", ["nothing", "all"])
@pytest.mark.parametrize("fails", ONCE, ids=["begun", "under way", "both"])
def test_steps_that_fail_near_the_data_lose_no_token(fails: dict[str, bool], takes: str, monkeypatch) -> None:
    built = deploy(MODEL, lora_strategy="near_data", attention_strategy="local", page_tokens=4)
    built.engine.add_adapter(make_adapter("n0", seed=0, rank=4, config=built.model, std=0.3))
    wanted = serve(built.engine, PROMPTS, "n0")
    run_ahead(built.engine)
    failures = Failures(built, monkeypatch, takes=takes, **fails)
    assert serve(built.engine, PROMPTS, "n0") == wanted
    assert failures.begun == fails.get("begun", False)
    assert failures.under_way == (fails.get("under_way", False) and not (takes == "all" and failures.begun))
    assert built.near_data.failure == "a step that used it failed: RuntimeError: the host's cores are gone"
    assert built.engine.healthy


@pytest.mark.parametrize("takes", ["nothing", "all"])
def test_unit_that_is_reported_while_a_step_uses_it_has_that_step_made_again(takes: str, monkeypatch) -> None:
    built = deploy(MODEL, lora_strategy="near_data", attention_strategy="local", page_tokens=4)
    built.engine.add_adapter(make_adapter("n0", seed=0, rank=4, config=built.model, std=0.3))
    wanted = serve(built.engine, PROMPTS, "n0")
    run_ahead(built.engine)
    begin, reported = built.executor.begin, []

    def report_first(plan):
        if not reported:
            reported.append(plan)
            built.near_data.fail("it is on fire")
        return begin(plan)

    monkeypatch.setattr(built.executor, "begin", report_first)
    failures = Failures(built, monkeypatch, takes=takes, under_way=True)
    assert serve(built.engine, PROMPTS, "n0") == wanted
    assert failures.under_way == 1
    assert built.near_data.failure == "it is on fire"


def test_step_made_again_has_the_one_after_it_planned_again(monkeypatch) -> None:
    """Somebody waits for the end of the step when it is made again, so that the next one is not begun ahead."""
    built = deploy(MODEL, lora_strategy="near_data", attention_strategy="local", page_tokens=4)
    built.engine.add_adapter(make_adapter("n0", seed=0, rank=4, config=built.model, std=0.3))
    wanted = serve(built.engine, PROMPTS, "n0")
    loop = built.engine._loop
    waits: list[bool] = []
    loop._may_run_ahead = lambda: not waits
    failures = Failures(built, monkeypatch, takes="nothing", under_way=True, before=lambda: waits.append(True))
    assert serve(built.engine, PROMPTS, "n0") == wanted
    assert failures.under_way == 1


def test_failed_step_that_takes_keys_and_values_ends_its_requests_alone(monkeypatch, caplog) -> None:
    built = deploy(MODEL, lora_strategy="resident", attention_strategy="local", page_tokens=4)
    wanted = serve(built.engine, PROMPTS, None)
    run_ahead(built.engine)
    Failures(built, monkeypatch, takes="all", under_way=True)
    with pytest.raises(GenerationFailedError, match="the step that computed it failed: RuntimeError: the host's cores"):
        serve(built.engine, PROMPTS[:1], None)
    assert "what the pool does not hold is computed again" in caplog.text
    assert built.near_data.failure is None
    assert serve(built.engine, PROMPTS, None) == wanted
    assert built.engine.healthy


def test_steps_follow_one_another_where_somebody_looks_at_each(deployed) -> None:
    executor, told = deployed.executor, []
    engine = engine_over(deployed, executor, chunk=16)
    run_ahead(engine)
    executor.on_step = told.append
    try:
        engine.submit([5, 6, 7], greedy(6, ignore_eos=True)).collect()
    finally:
        executor.on_step = None
    assert [plan.ahead for plan in told] == [False] * 6


def test_known_tokens_takes_those_of_the_last_step_where_it_is_told() -> None:
    tokens = StepTokens(**dict.fromkeys(StepTokens._fields))._replace(
        tokens=np.array([7, 8, 9, 10, 11], np.int32), drawn_at=np.array([2, -1, 0], np.int32)
    )
    drawn = jnp.array([OVERFLOWED, 5, 6, 4], jnp.int32)
    assert np.asarray(known_tokens(tokens, drawn).tokens).tolist() == [6, 8, 0, 10, 11]
