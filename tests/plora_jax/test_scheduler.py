"""Scheduler: budgets, order, preemption, and that nothing waits forever."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora_jax.engine import SchedulerConfig, Sequence
from tests.plora_jax.engine_fakes import make_config
from tests.plora_jax.scheduler_bench import Bench, solo_output


def test_schedule_long_prompt_is_cut_into_chunks() -> None:
    bench = Bench(prefill_chunk_tokens=8)
    bench.add(1, 19, 2)
    assert [bench.step() for _ in range(4)] == [[(1, 8, False)], [(1, 8, False)], [(1, 3, False)], [(1, 1, True)]]
    assert bench.step() == []


def test_schedule_decodes_come_first_and_prefill_fills_the_rest() -> None:
    bench = Bench()
    bench.add(1, 3, 5)
    bench.step()
    bench.add(2, 30, 1)
    assert bench.step() == [(1, 1, True), (2, 15, False)]


def test_schedule_rows_take_whole_blocks_of_prefill_slots() -> None:
    bench = Bench(max_prefill_tokens=8)
    bench.add(1, 5, 1)
    bench.add(2, 5, 1)
    assert bench.step() == [(1, 5, False)]
    assert bench.step() == [(2, 5, False)]


def test_schedule_leftover_slots_below_a_block_are_not_used() -> None:
    bench = Bench(max_prefill_tokens=10)
    bench.add(1, 20, 1)
    assert bench.step() == [(1, 8, False)]


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_schedule_output_does_not_depend_on_the_chunk(chunk: int) -> None:
    bench = Bench(prefill_chunk_tokens=chunk)
    seqs = [bench.add(i, prompt=3 + 4 * i, output=6) for i in range(1, 6)]
    bench.run()
    assert [seq.output_ids for seq in seqs] == [solo_output(i, 3 + 4 * i, 6) for i in range(1, 6)]


def test_schedule_takes_pages_only_as_tokens_need_them() -> None:
    bench = Bench()
    seq = bench.add(1, 4, 20)
    bench.step()
    assert seq.kv
    assert seq.kv.num_pages == 1
    bench.step()
    assert seq.kv.num_pages == 2


def test_schedule_order_is_priority_then_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    for seq_id, priority in [(1, 5), (2, 0), (3, -1), (4, 0)]:
        bench.add(seq_id, 2, 2, priority=priority)
    bench.run()
    assert bench.finished == [3, 2, 4, 1]


def test_schedule_without_pages_preempts_the_last_of_lowest_priority() -> None:
    bench = Bench(pool_pages=8)
    first, second = bench.add(1, 15, 17), bench.add(2, 14, 4, priority=1)
    bench.step()
    bench.step()
    assert bench.scheduler.running == (first, second)
    bench.add(3, 1, 1)
    bench.run()
    assert bench.scheduler.stats().preemptions == 1
    assert [s.output_ids for s in (first, second)] == [solo_output(1, 15, 17), solo_output(2, 14, 4)]


def test_schedule_preempted_sequence_gives_back_pages_and_adapter() -> None:
    bench = Bench(pool_pages=8, room=1, max_num_batched_tokens=32, max_prefill_tokens=32)
    first = bench.add(1, 15, 17)
    second = bench.add(2, 15, 4, adapter_id=7)
    bench.step()
    while second in bench.scheduler.running:
        bench.step()
    assert 2 not in bench.finished
    assert bench.scheduler.running == (first,)
    assert bench.scheduler.waiting == (second,)
    assert (second.kv, second.computed) == (None, 0)
    assert second.output_ids
    assert not +bench.store.references


def test_schedule_sequence_behind_waits_with_its_pages_rather_than_preempt_itself() -> None:
    bench = Bench(pool_pages=8, max_num_batched_tokens=32, max_prefill_tokens=32)
    bench.add(1, 16, 2)
    bench.add(2, 16, 4)
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.running, stats.preemptions, stats.kv_usage) == (2, 0, 1.0)


def test_schedule_short_of_pages_shortens_a_chunk_rather_than_preempt() -> None:
    bench = Bench(pool_pages=9, prefill_chunk_tokens=8, max_num_batched_tokens=32, max_prefill_tokens=32)
    bench.add(1, 16, 1)
    for seq_id in (2, 3, 4):
        bench.add(seq_id, 4, 3)
    bench.step()
    assert bench.step() == [(2, 1, True), (3, 1, True), (4, 1, True), (1, 4, False)]
    assert bench.scheduler.stats().preemptions == 0


def test_schedule_without_pages_a_chunk_takes_what_preemption_freed() -> None:
    bench = Bench(pool_pages=8, prefill_chunk_tokens=8, max_num_batched_tokens=32, max_prefill_tokens=32)
    bench.add(1, 16, 1)
    for seq_id in (2, 3, 4):
        bench.add(seq_id, 4, 3)
    bench.step()
    assert bench.step() == [(2, 1, True), (3, 1, True), (1, 8, False)]
    assert [seq.seq_id for seq in bench.scheduler.waiting] == [4]


def test_schedule_alone_always_reaches_the_context_limit() -> None:
    bench = Bench(pool_pages=8)
    seq = bench.add(1, 1, 31)
    bench.run()
    assert len(seq.output_ids) == 31
    assert bench.scheduler.stats().preemptions == 0


def test_schedule_does_not_admit_what_would_preempt_at_once() -> None:
    bench = Bench(pool_pages=8)
    bench.add(1, 31, 1)
    bench.add(2, 16, 1)
    bench.step()
    assert [seq.seq_id for seq in bench.scheduler.running] == [1]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_remove_gives_back_everything_in_each_phase(steps: int) -> None:
    bench = Bench(prefill_chunk_tokens=8)
    seq = bench.add(1, 20, 5, adapter_id=3)
    for _ in range(steps):
        bench.step()
    assert (len(seq.output_ids), seq.computed) == {0: (0, 0), 1: (0, 8), 4: (2, 21)}[steps]
    assert bench.scheduler.remove(1)
    assert not bench.scheduler.remove(1)
    bench.scheduler.check_integrity()
    bench.kv.check_all_given_back()
    assert not +bench.store.references


def run_random_load(rng: random.Random, *, pool_pages: int, spare_pages: int) -> Bench:
    """Sequences that come, go and end in random steps; each that ends has the tokens of its solo run."""
    chunk = rng.choice([1, 3, 4, 5, None])
    bench = Bench(
        pool_pages=pool_pages,
        device_pages=make_config(prefill_chunk_tokens=chunk).max_step_pages + spare_pages,
        pool_devices=rng.choice([1, 2]),
        keep_copies=rng.choice([None, 0, 2]),
        room=rng.randint(1, 3),
        max_num_seqs=rng.randint(1, 8),
        prefill_chunk_tokens=chunk,
        max_adapter_passes=rng.choice([1, 4, 64]),
    )
    most_steps_between = rng.choice([3, 12])
    shapes: dict[int, tuple[int, int, int]] = {}
    seqs: dict[int, Sequence] = {}
    aborted: set[int] = set()
    for seq_id in range(1, 61):
        prompt = rng.randint(1, 31)
        shapes[seq_id] = (prompt, rng.randint(1, 32 - prompt), rng.randint(0, 6))
        seqs[seq_id] = bench.add(
            seq_id, shapes[seq_id][0], shapes[seq_id][1], adapter_id=shapes[seq_id][2], priority=rng.randint(0, 2)
        )
        for _ in range(rng.randint(0, most_steps_between)):
            bench.step()
        if rng.random() < 0.1:
            victim = rng.randint(1, seq_id)
            if bench.scheduler.remove(victim):
                aborted.add(victim)
            bench.scheduler.check_integrity()
    bench.run(most_steps=20_000)

    assert set(bench.finished) | aborted == set(shapes)
    assert len(bench.finished) == len(set(bench.finished))
    for seq_id in bench.finished:
        prompt, output, adapter_id = shapes[seq_id]
        assert seqs[seq_id].output_ids == solo_output(seq_id, prompt, output, adapter_id=adapter_id)
    bench.kv.check_all_given_back()
    assert not +bench.store.references
    return bench


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pool_pages=st.integers(8, 32), spare_pages=st.integers(0, 5))
def test_scheduler_random_load_finishes_everything_with_solo_outputs(
    seed: int, pool_pages: int, spare_pages: int
) -> None:
    run_random_load(random.Random(seed), pool_pages=pool_pages, spare_pages=spare_pages)


def test_scheduler_random_load_takes_every_way_back() -> None:
    stats = [
        run_random_load(random.Random(seed), pool_pages=pool_pages, spare_pages=0).scheduler.stats()
        for seed in range(3)
        for pool_pages in (8, 32)
    ]
    assert sum(s.suspensions for s in stats) > 10
    assert sum(s.preemptions - s.suspensions for s in stats) > 10
    assert sum(s.restores for s in stats) > 5


@pytest.mark.parametrize("seed", range(4))
def test_scheduler_endless_stream_for_other_adapters_starves_nobody(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(room=rng.randint(1, 2), max_adapter_passes=5, pool_pages=16)
    lonely = bench.add(1, 8, 8, adapter_id=50)
    for seq_id in range(2, 500):
        if len(bench.scheduler.waiting) < 6:
            bench.add(seq_id, rng.randint(1, 10), rng.randint(1, 10), adapter_id=rng.randint(0, 4))
        bench.step()
        if len(lonely.output_ids) == 8:
            return
    pytest.fail("one sequence waited for 500 steps")


def test_scheduler_pool_below_one_sequence_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"holds 7 KV pages of 4 tokens.*max_model_len 32.*raise --pool_memory_gb"):
        Bench(pool_pages=7)


@pytest.mark.parametrize(("chunk", "pages"), [(None, 5), (4, 2), (5, 2), (6, 3)])
def test_scheduler_device_below_one_step_of_a_sequence_is_refused_with_advice(chunk: int | None, pages: int) -> None:
    Bench(device_pages=pages, prefill_chunk_tokens=chunk)
    with pytest.raises(ValueError, match=rf"holds {pages - 1} KV pages of 4 tokens.*write to {pages}.*--device_kv_mb"):
        Bench(device_pages=pages - 1, prefill_chunk_tokens=chunk)


def test_config_every_problem_is_named_at_once() -> None:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=4,
        max_prefill_tokens=16,
        prefill_block=32,
        page_tokens=0,
        max_model_len=32,
        max_waiting=-1,
    )
    with pytest.raises(ValueError, match="page_tokens must be at least 1, got 0") as caught:
        config.validate(pool_pages=100, device_pages=100)
    for problem in ("max_waiting must be at least 0, got -1", "below max_num_seqs 8", "below prefill_block 32"):
        assert problem in str(caught.value)
