"""The planner in a real engine: no token changes, nothing leaks, nothing waits, whatever it plans and when."""

import itertools

import numpy as np
import pytest

from memory_pool.ledger import Crossing
from plora_jax.engine import NoPlanError, SamplingParams
from plora_jax.engine.placement import Turn
from strategies.planner import JointPlanner, evaluate
from strategies.strategy_table import ATTENTION, LORA
from tests.plora_jax.conformance import PACK, deploy, engine_over, golden
from tests.plora_jax.planning_rig import AUTO, RandomPolicy, drive
from tests.plora_jax.random_traffic import CONTENTS, MAX_RANK, MOST_TOKENS, PROMPTS, Traffic, adapter_of, greedy
from tests.plora_jax.scarce import deploy_pages, make_adapter
from tests.plora_jax.test_step import ADAPTERS, MODEL, Auditor

SCARCE = {
    "page_tokens": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 32,
    "prefill_chunk_tokens": 16,
    "max_waiting": 8,
    "max_lora_rank": MAX_RANK,
}
HALF = "resident", "split"


def answers_of(built, contents):
    """Tokens of adapters of every content on every prompt, under strategies that stay."""
    for content in contents:
        built.engine.add_adapter(adapter_of(str(content), content, built.model))
    cases = [(content, i) for content in (None, *contents) for i in range(len(PROMPTS))]
    names = [None if content is None else str(content) for content, _ in cases]
    done = built.engine.generate([PROMPTS[i] for _, i in cases], greedy(MOST_TOKENS), adapters=names)
    return {case: completions[0].token_ids for case, completions in zip(cases, done, strict=True)}


@pytest.fixture(scope="module")
def roomy():
    """An engine that plans, with room for everything; pages of 16 tokens."""
    return deploy(MODEL, **AUTO)


@pytest.mark.slow
def test_random_plans_each_step_change_no_token_and_leak_nothing(monkeypatch):
    answers = answers_of(deploy("llama"), CONTENTS)
    built = deploy_pages("llama", pool=100, adapters=30, kv=10, plan_interval_steps=1, **SCARCE, **AUTO)
    policy = RandomPolicy(1)
    planner = drive(built, policy, monkeypatch)
    traffic = Traffic(built, answers, seed=2, preferred=("near_data",))
    traffic.run(400)
    traffic.finish()
    assert policy.chosen == {*LORA, *ATTENTION}
    assert traffic.seen["length"] > 50
    assert max(planner.moved) == built.memory.copy_pages, "a step waits for one copy at most"
    loads = {crossing.strategy for crossing in built.ledger.totals() if crossing.phase == "load"}
    assert loads >= {*HALF, "home"}, "something was moved while it was used"
    assert built.adapters.fallbacks == 0


def test_ledger_equals_audit_for_every_step_under_random_plans(monkeypatch):
    built = deploy(MODEL, page_tokens=4, plan_interval_steps=1, **AUTO)
    policy = RandomPolicy(3)
    planner = drive(built, policy, monkeypatch)
    auditor = Auditor(built)
    engine = engine_over(built, auditor, chunk=8, planner=planner)
    for name in ADAPTERS:
        engine.load_adapter(name, str(PACK / "adapters" / name))
    prompts = [[*golden(None, MODEL)[f"prompt_{i % 4}"].tolist(), 7] for i in range(5)]
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    served = [[c[0].token_ids for c in engine.generate(prompts, asked, adapters=[None, *ADAPTERS])] for _ in range(3)]
    assert served[0] == served[1] == served[2]
    assert {strategy for _, strategy, _ in auditor.seen} >= {"near_data", "split", "fetch", "local", "distributed"}


def test_first_requests_of_many_adapters_start_at_once_without_a_copy():
    built = deploy_pages("llama", pool=400, adapters=30, kv=64, plan_interval_steps=10**6, **SCARCE, **AUTO)
    for i in range(8):
        built.engine.add_adapter(make_adapter(f"n{i}", seed=i, rank=8, config=built.model))
    for i in range(8):
        built.engine.submit(PROMPTS[1], greedy(12), adapter=f"n{i}")
    built.engine._planner.between_steps = lambda running: Turn(0, None)
    for _ in range(6):
        built.engine.step()  # each has room for two prompts at most
    assert built.engine.stats().running == 8
    assert {status.strategy for status in built.engine.adapters()} == {"near_data"}
    assert not [c for c in built.ledger.totals() if (c.object, c.phase) == ("adapter", "load")]


def run_all(engine, generations):
    while not all(generation.finished for generation in generations):
        engine.step()
        engine.check_integrity()
    return [generation.collect()[0].token_ids for generation in generations]


def test_adapters_in_use_are_promoted_and_their_reason_says_so(roomy, monkeypatch):
    drive(roomy, JointPlanner(horizon_steps=1e-6), monkeypatch, always=False)
    roomy.adapters._while_all_fit = ()
    engine = roomy.engine
    for name in ("idle", "used"):
        engine.add_adapter(make_adapter(name, seed=1, rank=8, config=roomy.model))
    with pytest.raises(NoPlanError, match="no plan has been made since adapter 'used' was loaded"):
        engine.explain_adapter("used")
    run_all(engine, [engine.submit(PROMPTS[2], greedy(40), adapter="used")])
    roomy.adapters.check_integrity()
    idle, used = engine.adapters()
    assert (idle.tier, idle.reason) == ("pool", "idle, nothing is expected: no device memory is set aside for it")
    assert (used.tier, used.strategy) == ("device", "resident")
    assert used.reason.startswith("resident is best for a step of")
    text, values = engine.explain_adapter("used")
    assert text.startswith("adapter 'used': resident is best")
    assert "near_data: the step would take" in text
    assert [option["strategy"] for option in values["options"] if option["serves"]] == ["resident"]
    assert values["attention"] in ATTENTION
    assert engine.take_observations().planner_s
    for name in ("idle", "used"):
        engine.unload_adapter(name)


def test_pinned_adapters_take_the_device_as_far_as_it_goes(monkeypatch):
    built = deploy_pages("llama", pool=400, adapters=30, kv=64, plan_interval_steps=1, **SCARCE, **AUTO)
    drive(built, JointPlanner(), monkeypatch)
    for i in range(6):
        built.engine.add_adapter(make_adapter(f"n{i}", seed=i, rank=16, config=built.model), pinned=i < 3)
    run_all(built.engine, [built.engine.submit(PROMPTS[1], greedy(12), adapter=f"n{i}") for i in range(3, 6)])
    statuses = built.engine.adapters()
    pages = {status.name: status.device_bytes // built.memory.page_bytes for status in statuses}
    whole = statuses[0].nbytes // built.memory.page_bytes
    assert [status.pinned for status in statuses] == [True] * 3 + [False] * 3
    assert [status.strategy for status in statuses[:3]] == planned_for_pinned(whole, 30)
    assert all(status.reason.startswith("pinned: ") for status in statuses[:3])
    assert sum(pages.values()) <= 30


def planned_for_pinned(whole, room):
    """Resident, then split, then near the data, one after the other, as room is left; B is about half."""
    found = []
    for _ in range(3):
        needs = {"resident": whole, "split": whole // 2, "near_data": 0}
        strategy = next(name for name, size in needs.items() if size <= room)
        room -= needs[strategy]
        found.append(strategy)
    return found


def test_alternating_load_moves_no_more_bytes_than_its_moves_have_gained(monkeypatch):
    interval = 4
    options = SCARCE | AUTO | {"plan_interval_steps": interval, "link": "20:0"}
    built = deploy_pages("llama", pool=400, adapters=24, kv=64, **options)
    policy = built.engine._planner._worker._policy
    planner = drive(built, policy, monkeypatch)
    groups = [[f"{g}{i}" for i in range(2)] for g in "ab"]
    for seed, name in enumerate(itertools.chain(*groups)):
        built.engine.add_adapter(make_adapter(name, seed=seed, rank=8, config=built.model))
    for turn in range(24):
        # Two choices a turn; a move takes three to pay.
        names = groups[turn % 2]
        run_all(built.engine, [built.engine.submit(PROMPTS[1], greedy(8), adapter=name) for name in names])
    moved = sum(
        total.moved
        for crossing, total in built.ledger.totals().items()
        if (crossing.object, crossing.direction, crossing.phase) == ("adapter", "to_device", "load")
    )
    second = float(planner._worker._model.crossing_s(1.0))
    gained_s = sum(policy.gained_s.values()) * interval
    assert 0 < moved * second <= gained_s * (1 + 1e-9)
    assert moved <= 10 * built.engine.adapters()[0].nbytes, "without accounts they change places every turn: 25 times"


def test_planner_counts_adapters_and_activations_as_they_are_kept(roomy):
    int8 = deploy(MODEL, lora_dtype="int8", **AUTO)
    shapes = [built.engine._planner._worker._model.shape for built in (roomy, int8)]
    assert [(shape.item_bytes, shape.bytes_of_lora) for shape in shapes] == [(4, 4), (4, 1)]


def test_fraction_of_the_plan_is_what_stays_of_the_kv(monkeypatch):
    class Half(RandomPolicy):
        def choose(self, problem):
            columns = np.where(problem.allowed, problem.device_bytes, np.inf).argmin(axis=1)
            return evaluate(problem, columns, "local", max(0.5, problem.kv.min_fraction))

    built = deploy(MODEL, page_tokens=4, plan_interval_steps=1, **AUTO)
    drive(built, Half(0), monkeypatch)
    generation = built.engine.submit(PROMPTS[4], greedy(40))
    shares = []
    while not generation.finished:
        built.engine.step()
        if held := built.kv.num_held_pages:
            shares.append((built.kv.num_device_pages - built.kv._device.num_free) / held)
    assert shares[0] == 1
    assert np.abs(np.array(shares[4:]) - 0.5).max() < 0.1


def test_a_worker_that_fails_leaves_everything_as_it_was(roomy, monkeypatch, caplog):
    class Broken(RandomPolicy):
        def choose(self, problem):
            raise ValueError("no idea")

    drive(roomy, Broken(0), monkeypatch)
    roomy.engine.add_adapter(make_adapter("x", seed=1, rank=8, config=roomy.model))
    (tokens,) = run_all(roomy.engine, [roomy.engine.submit(PROMPTS[2], greedy(60), adapter="x")])
    assert len(tokens) == 60
    assert "no plan could be made, 1 times so far: ValueError('no idea')" in caplog.text
    assert "3 times" not in caplog.text
    roomy.engine.unload_adapter("x")


def test_plans_run_beside_the_steps_in_a_thread_of_their_own():
    built = deploy(MODEL, **AUTO, plan_interval_steps=1)
    built.engine.add_adapter(make_adapter("x", seed=1, rank=8, config=built.model))
    built.engine.start()
    try:
        generation = built.engine.submit(PROMPTS[2], greedy(60), adapter="x")
        assert len(generation.collect()[0].token_ids) == 60
        assert built.engine.take_observations().planner_s
    finally:
        built.engine.shutdown()
    built.adapters.check_integrity()


def test_forced_lora_with_planned_attention_plans_kv_alone(monkeypatch):
    built = deploy(MODEL, **AUTO | {"lora_strategy": "fetch"}, page_tokens=4, device_kv_mb=1, plan_interval_steps=1)
    drive(built, RandomPolicy(5), monkeypatch)
    built.engine.add_adapter(make_adapter("x", seed=1, rank=8, config=built.model))
    run_all(built.engine, [built.engine.submit(PROMPTS[3], greedy(12), adapter="x")])
    (status,) = built.engine.adapters()
    assert (status.strategy, status.reason) == ("fetch", None)
    with pytest.raises(NoPlanError, match="start with auto"):
        built.engine.explain_adapter("x")
    assert {c.strategy for c in built.ledger.totals() if c.object == "kv"} >= {"home"}


def test_both_strategies_forced_plan_nothing():
    assert deploy(MODEL).engine._planner is None


# --- near-data compute that fails ---


@pytest.mark.parametrize("options", [AUTO, {"lora_strategy": "split", "attention_strategy": "distributed"}], ids=str)
def test_near_data_failing_amid_32_streams_changes_no_token(options, monkeypatch, caplog):
    built = deploy(MODEL, **options, page_tokens=4, device_kv_mb=1, plan_interval_steps=1, max_num_seqs=32)
    if options is AUTO:
        drive(built, RandomPolicy(7), monkeypatch)
    else:
        built.kv.keep(0)
    engine, names = built.engine, [None, *(f"n{i}" for i in range(8))]
    for i, name in enumerate(names[1:]):
        engine.add_adapter(make_adapter(name, seed=i, rank=4 + i, config=built.model, std=0.3))

    def stream(fail_at):
        asked = [engine.submit(PROMPTS[i % 5], greedy(24), adapter=names[i % 9]) for i in range(32)]
        step = 0
        while not all(generation.finished for generation in asked):
            if step == fail_at:
                assert engine.stats().running == 32
                built.near_data.fail("injected")
            engine.step()
            engine.check_integrity()
            built.adapters.check_integrity()
            step += 1
        return [generation.collect()[0].token_ids for generation in asked]

    wanted = stream(None)
    before = built.ledger.totals()
    assert stream(18) == wanted
    after = built.ledger.totals()
    computed_near = [c for c in after if c.strategy in ("near_data", "split", "distributed") and c.phase == "decode"]
    assert computed_near, "it was used until then"
    middle = built.ledger.totals()
    assert stream(None) == wanted
    assert {c: built.ledger.totals()[c] for c in computed_near} == {c: middle[c] for c in computed_near}
    assert {status.strategy for status in engine.adapters()} <= {"fetch", "resident"}
    assert built.near_data.failures == 1
    assert caplog.text.count("near-data compute has failed (injected)") == 1
    assert before != after
    nothing = Crossing("adapter", "fetch", "to_device", "decode")
    assert after[nothing].useful > before.get(nothing, after[nothing]._replace(useful=0)).useful


def test_rows_of_adapters_are_used_again_and_follow_the_pool(roomy):
    planner = roomy.engine._planner
    rows = planner._rows
    rows.update()
    before = len(rows.ids)
    first = make_adapter("x", seed=1, rank=8, config=roomy.model)
    roomy.engine.add_adapter(first, pinned=True)
    assert rows.update() == []
    row = rows.row(first.identity)
    assert rows.ids[row] == first.identity
    assert rows.pinned[row]
    kept = rows.features
    stored = kept.stored_a_bytes[row] + kept.stored_b_bytes[row]
    assert stored == roomy.engine.adapters()[0].nbytes
    roomy.adapters.wish(first.identity, "fetch")
    rows.update()
    assert tuple(LORA)[rows.current[row]] == "fetch"
    roomy.engine.unload_adapter("x")
    assert rows.update() == [row]
    assert rows.row(first.identity) is None
    assert not rows.features.ranks[row].any()
    assert kept.ranks[row].any(), "those who hold the arrays keep them"
    roomy.engine.add_adapter(make_adapter("y", seed=1, rank=8, config=roomy.model))
    rows.update()
    assert len(rows.ids) == max(before, row + 1)
    assert np.count_nonzero(rows.ids) == 1
    roomy.engine.unload_adapter("y")
