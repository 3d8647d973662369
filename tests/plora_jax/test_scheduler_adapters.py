"""Scheduler: adapters that take turns."""

from tests.plora_jax.scheduler_bench import Bench


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
