"""Scheduler: budgets, order, preemption, adapters that take turns, and that nothing waits forever."""

import collections
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora_jax.engine import SamplingParams, Scheduler, SchedulerConfig, Sequence
from tests.plora_jax.engine_fakes import FakeExecutor, FakeStore, hashed_token, make_config, make_kv


class Bench:
    """A scheduler that steps over fakes until sequences have their tokens."""

    def __init__(
        self,
        *,
        pool_pages: int = 32,
        device_pages: int | None = None,
        pool_devices: int = 1,
        keep_copies: int | None = None,
        room: int = 100,
        sizes: dict[int, int] | None = None,
        **limits: int | None,
    ) -> None:
        self.config, self.store = make_config(**limits), FakeStore(room, sizes)
        self.store.kept.update(range(1, 100))
        self.executor = FakeExecutor(self.config)
        self.kv = make_kv(
            self.executor,
            page_tokens=self.config.page_tokens,
            pool_pages=pool_pages,
            device_pages=device_pages,
            pool_devices=pool_devices,
            keep_copies=keep_copies,
        )
        self.scheduler = Scheduler(self.config, self.kv.kv, self.store)
        self.finished: list[int] = []

    def add(self, seq_id: int, prompt: int, output: int, *, adapter_id: int = 0, priority: int = 0) -> Sequence:
        seq = make_sequence(seq_id, prompt, output, adapter_id=adapter_id, priority=priority)
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[tuple[int, int, bool]]:
        """Runs a step; returns (seq_id, count, decode) of its rows."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        for row, _ in self.scheduler.complete(plan, self.executor.execute(plan)):
            seq = row.sequence
            if len(seq.output_ids) == seq.sampling.max_tokens:
                self.finished.append(seq.seq_id)
                self.scheduler.remove(seq.seq_id)
        self.scheduler.check_integrity()
        held = {seq.adapter_id for seq in self.scheduler.running} - {0}
        assert set(+self.store.references) == held
        return [(row.sequence.seq_id, row.count, row.decode) for row in plan.rows]

    def run(self, most_steps: int = 2000) -> None:
        for _ in range(most_steps):
            if not self.step():
                return
        raise AssertionError(f"still {self.scheduler.stats()} after {most_steps} steps")


def make_sequence(seq_id: int, prompt: int, output: int, *, adapter_id: int = 0, priority: int = 0) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        prompt_ids=[(seq_id + i) % 90 for i in range(prompt)],
        sampling=SamplingParams(max_tokens=output),
        seed=seq_id,
        adapter_id=adapter_id,
        arrival_s=float(seq_id),
        priority=priority,
    )


def solo_output(seq_id: int, prompt: int, output: int, *, adapter_id: int = 0) -> list[int]:
    """What a sequence generates when it is alone."""
    seq = make_sequence(seq_id, prompt, output, adapter_id=adapter_id)
    while len(seq.output_ids) < output:
        seq.output_ids.append(hashed_token(seq))
    return seq.output_ids


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


# --- device pages ---


def test_schedule_conversation_of_many_times_the_device_is_served_and_every_page_is_written_once() -> None:
    bench = Bench(device_pages=2, prefill_chunk_tokens=4)
    seq = bench.add(1, 20, 12)
    bench.run()
    assert seq.output_ids == solo_output(1, 20, 12)
    assert sum(bench.executor.memory.saves) == 31 // 4
    assert bench.executor.memory.loads == []
    assert bench.scheduler.stats().preemptions == 0


def test_schedule_chunk_shrinks_to_the_device_pages_that_others_leave() -> None:
    bench = Bench(device_pages=5)
    bench.add(1, 3, 9)
    bench.add(2, 3, 9)
    bench.step()
    bench.add(3, 24, 1)
    assert bench.step() == [(1, 1, True), (2, 1, True), (3, 12, False)]
    assert bench.scheduler.stats().preemptions == 0


def test_schedule_second_prefill_waits_for_the_pages_of_the_first_rather_than_suspend() -> None:
    bench = Bench(device_pages=5, prefill_chunk_tokens=14, max_num_batched_tokens=64, max_prefill_tokens=64)
    bench.add(1, 31, 1)
    bench.add(2, 8, 9)
    bench.add(3, 3, 9)
    assert bench.step() == [(1, 14, False), (2, 4, False)]
    assert bench.step() == [(1, 14, False), (2, 4, False)]
    bench.run()
    assert bench.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("limits", [{"device_pages": 2, "prefill_chunk_tokens": 4}, {"max_num_seqs": 2}])
def test_schedule_higher_priority_suspends_the_last_which_goes_on_where_it_was(limits: dict[str, Any]) -> None:
    bench = Bench(**limits)
    seqs = [bench.add(1, 3, 13), bench.add(2, 4, 9, adapter_id=7)]
    counts = collections.Counter(seq_id for _ in range(2) for seq_id, count, _ in bench.step() for _ in range(count))
    seqs.append(bench.add(0, 8, 9, priority=-1))
    counts.update(seq_id for seq_id, count, _ in bench.step() for _ in range(count))
    assert bench.scheduler.running == (seqs[2], seqs[0])
    assert bench.scheduler.waiting == (seqs[1],)
    assert seqs[1].computed == 5
    assert not +bench.store.references
    while rows := bench.step():
        counts.update(seq_id for seq_id, count, _ in rows for _ in range(count))
    stats = bench.scheduler.stats()
    assert (stats.preemptions, stats.suspensions) == (1, 1)
    assert counts == {0: 16, 1: 15, 2: 12}
    assert stats.restores == sum(bench.executor.memory.loads) == ("device_pages" in limits)
    assert [seq.output_ids for seq in seqs] == [
        solo_output(1, 3, 13),
        solo_output(2, 4, 9, adapter_id=7),
        solo_output(0, 8, 9),
    ]


def test_schedule_equal_priority_never_suspends() -> None:
    bench = Bench(device_pages=2, prefill_chunk_tokens=4)
    bench.add(2, 3, 9)
    bench.add(3, 3, 9)
    bench.step()
    bench.add(1, 3, 9)
    bench.run()
    assert bench.finished == [2, 3, 1]
    assert bench.scheduler.stats().preemptions == 0


def test_schedule_suspended_sequence_is_not_passed_by_those_behind_it() -> None:
    bench = Bench(max_num_seqs=1)
    for seq_id in (1, 2):
        bench.add(seq_id, 3, 3, priority=1)
    bench.step()
    bench.add(3, 3, 3)
    bench.run()
    assert bench.finished == [3, 1, 2]


def test_schedule_fewer_device_pages_than_running_sequences_suspends_the_last() -> None:
    bench = Bench(device_pages=3, prefill_chunk_tokens=4)
    first, second = bench.add(1, 4, 9), bench.add(2, 2, 9)
    bench.step()
    bench.kv.kv.extend(bench.kv.kv.open(), 2 * 4)
    plan = bench.scheduler.schedule()
    assert [row.sequence for row in plan.rows] == [first]
    assert bench.scheduler.waiting == (second,)
    assert second.computed == 2
    assert bench.scheduler.stats().suspensions == 1


def test_schedule_pool_full_drops_what_waits_before_it_preempts_what_runs() -> None:
    bench = Bench(pool_pages=8, max_num_seqs=2, max_num_batched_tokens=32, max_prefill_tokens=32)
    first, last = bench.add(1, 4, 20), bench.add(2, 12, 12, priority=2)
    bench.step()
    between = bench.add(3, 8, 8, priority=1)
    bench.step()
    assert bench.scheduler.running == (first, between)
    assert last.computed == 12
    while last.computed:
        bench.step()
    assert bench.scheduler.running == (first, between)
    assert bench.scheduler.stats().preemptions == 1
    bench.run()
    assert [seq.output_ids for seq in (first, last, between)] == [
        solo_output(1, 4, 20),
        solo_output(2, 12, 12),
        solo_output(3, 8, 8),
    ]


def test_remove_of_a_suspended_sequence_gives_back_its_pages() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(1, 9, 9, priority=1)
    bench.step()
    bench.add(2, 3, 2)
    bench.step()
    assert bench.scheduler.remove(1)
    bench.run()
    bench.kv.check_all_given_back()


def test_adapters_of_suspended_sequences_do_not_make_others_unservable() -> None:
    bench = Bench(room=1, device_pages=2, prefill_chunk_tokens=4)
    bench.add(1, 2, 9, priority=1)
    bench.add(2, 2, 9, adapter_id=1, priority=1)
    bench.step()
    for seq_id, adapter_id in [(3, 2), (4, 0), (5, 2)]:
        bench.add(seq_id, 2, 2, adapter_id=adapter_id)
    bench.run()
    assert sorted(bench.finished) == [1, 2, 3, 4, 5]
    assert bench.scheduler.stats().suspensions > 0
    assert bench.scheduler.take_unservable() == []


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


def test_adapters_without_room_wait_and_others_pass() -> None:
    bench = Bench(room=1)
    bench.add(1, 2, 4, adapter_id=1)
    bench.add(2, 2, 4, adapter_id=2)
    bench.add(3, 2, 4, adapter_id=1)
    bench.add(4, 2, 4)
    assert [seq_id for seq_id, _, _ in bench.step()] == [1, 3, 4]
    bench.run()
    assert sorted(bench.finished) == [1, 2, 3, 4]


def test_adapters_blocked_sequence_is_passed_a_bounded_number_of_times() -> None:
    bench = Bench(room=1, max_adapter_passes=3)
    bench.add(1, 1, 4, adapter_id=1)
    bench.step()
    blocked = bench.add(2, 1, 1, adapter_id=2)
    for seq_id in range(3, 40):
        bench.add(seq_id, 1, 4, adapter_id=1)
    started: set[int] = set()
    while not blocked.output_ids:
        started.update(seq_id for seq_id, _, _ in bench.step())
    assert len(started - {1, 2}) == 2 * 3
    bench.run()
    assert len(bench.finished) == 39


def test_adapters_blocked_sequence_is_passed_by_held_adapters_longer_than_by_new_ones() -> None:
    bench = Bench(room=3, sizes={9: 3}, max_adapter_passes=1, max_num_seqs=8)
    bench.add(1, 1, 9, adapter_id=1)
    bench.step()
    bench.add(2, 1, 1, adapter_id=9)
    bench.add(3, 1, 9)
    bench.add(4, 1, 9, adapter_id=2)
    bench.add(5, 1, 9, adapter_id=1)
    bench.add(6, 1, 9, adapter_id=1)
    assert [seq_id for seq_id, _, _ in bench.step()] == [1, 3, 5]
    bench.run()
    assert len(bench.finished) == 6


def test_adapters_gate_follows_the_sequence_that_is_blocked_longest() -> None:
    bench = Bench(room=2, sizes={8: 2, 9: 2}, max_adapter_passes=2, max_num_seqs=8)
    bench.add(1, 1, 9, adapter_id=1)
    bench.step()
    bench.add(2, 1, 1, adapter_id=8)
    bench.add(3, 1, 9)
    assert [seq_id for seq_id, _, _ in bench.step()] == [1, 3]
    bench.add(4, 1, 1, adapter_id=9)
    bench.add(5, 1, 9)
    bench.add(6, 1, 1, adapter_id=2)
    assert [seq_id for seq_id, _, _ in bench.step()] == [1, 3, 5]


def test_adapters_base_sequences_pass_a_blocked_one_for_as_long_as_they_like() -> None:
    bench = Bench(room=1, max_adapter_passes=1)
    bench.add(1, 1, 25, adapter_id=1)
    bench.step()
    blocked = bench.add(2, 1, 1, adapter_id=2)
    for seq_id in range(3, 15):
        bench.add(seq_id, 1, 1)
    for _ in range(6):
        bench.step()
    assert len(bench.finished) == 12
    assert not blocked.output_ids


def test_adapters_one_that_never_fits_is_handed_back_as_unservable() -> None:
    bench = Bench(room=0)
    seq = bench.add(1, 1, 1, adapter_id=1)
    bench.add(2, 1, 1)
    assert bench.step() == [(2, 1, False)]
    assert bench.scheduler.take_unservable() == [seq]
    assert bench.scheduler.take_unservable() == []
    assert bench.scheduler.stats().waiting == 0


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
