"""Scheduler: device pages, suspended sequences and those that take their place."""

import collections
from typing import Any

import pytest

from tests.plora_jax.scheduler_bench import Bench, solo_output


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
