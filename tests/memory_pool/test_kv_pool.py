"""KV pages at home in the pool: where they are, when they move, what is dropped, what is counted."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool.kv_pool import ABSENT, KvHandle, KvPool, Lack
from memory_pool.layout import PageLayout, whole
from memory_pool.ledger import Crossing, Ledger, LinkBytes
from memory_pool.link import one_device_mesh
from memory_pool.page_memory import PageMemory
from memory_pool.pages import PageAllocator
from memory_pool.pool_pages import PoolPages

G = 4
TOKEN_BYTES = 10
TO_POOL = Crossing("kv", "home", "to_pool", "load")
TO_DEVICE = Crossing("kv", "home", "to_device", "load")


class Memory:
    """Numbers instead of keys and values."""

    def __init__(self) -> None:
        self.pool: dict[int, list[int]] = {}
        self.device: dict[int, list[int]] = {}
        self.saves: list[int] = []
        self.loads: list[int] = []
        self.broken = False

    def save_kv(self, pool_ids: Sequence[int], device_ids: Sequence[int]) -> int:
        if self.broken:
            raise RuntimeError("device lost")
        self.saves.append(len(pool_ids))
        self.pool.update({to: list(self.device[page]) for to, page in zip(pool_ids, device_ids, strict=True)})
        return len(pool_ids) * G * TOKEN_BYTES

    def load_kv(self, device_ids: Sequence[int], pool_ids: Sequence[int]) -> int:
        self.loads.append(len(pool_ids))
        self.device.update({to: list(self.pool[page]) for to, page in zip(device_ids, pool_ids, strict=True)})
        return len(pool_ids) * G * TOKEN_BYTES


@dataclasses.dataclass
class Bench:
    """A pool with one writer; every token written is a number of its own."""

    kv: KvPool
    memory: Memory
    pool: PoolPages
    device: PageAllocator
    ledger: Ledger
    content: dict[KvHandle, list[int]]
    numbers: Iterator[int]

    def compute(self, *handles: KvHandle, count: int = 1) -> None:
        """A step that computes `count` tokens of each."""
        for handle in handles:
            self.kv.extend(handle, handle.computed + count)
            self.kv.check_integrity()
        self.step(handles, count)

    def step(self, handles: Sequence[KvHandle], count: int) -> None:
        for handle in handles:
            for position in range(handle.computed, handle.computed + count):
                page = int(handle.device_table()[position // G])
                number = next(self.numbers)
                self.memory.device.setdefault(page, [0] * G)[position % G] = number
                self.content.setdefault(handle, []).append(number)
        self.kv.commit([(handle, handle.computed + count) for handle in handles])
        self.check()

    def check(self) -> None:
        """Every token that was computed is where the tables say."""
        self.kv.check_integrity()
        for handle, numbers in self.content.items():
            device, pool = handle.device_table(), handle.pool_table()
            assert handle.computed == len(numbers)
            for position, number in enumerate(numbers):
                page, offset = divmod(position, G)
                here, home = int(device[page]), int(pool[page])
                assert (here == ABSENT) != (home == ABSENT)
                found = self.memory.pool[home] if here == ABSENT else self.memory.device[here]
                assert found[offset] == number, f"position {position}"

    def lose_device(self) -> None:
        """Whatever the device held is gone; the sequences are as long as the pool knows them."""
        self.memory.device.clear()
        self.kv.lose_device()
        for handle, numbers in self.content.items():
            assert len(numbers) - G < handle.computed == handle.written <= len(numbers)
            del numbers[handle.computed :]
        self.check()
        assert self.device.num_free == self.device.num_usable

    def close(self, handle: KvHandle) -> None:
        self.content.pop(handle, None)
        self.kv.close(handle)


def make_bench(
    *, pool_pages: int = 16, device_pages: int = 4, pool_devices: int = 1, keep_copies: int | None = None
) -> Bench:
    memory, ledger = Memory(), Ledger()
    pool, device = PoolPages(pool_devices, pool_pages // pool_devices + 1), PageAllocator(device_pages + 1)
    kv = KvPool(pool, device, memory, page_tokens=G, token_bytes=TOKEN_BYTES, keep_copies=keep_copies, ledger=ledger)
    return Bench(kv, memory, pool, device, ledger, {}, iter(range(1, 10**9)))


def absent(table: Sequence[int]) -> list[bool]:
    return [page == ABSENT for page in table]


def test_extend_gives_pages_in_both_memories_for_the_tokens_to_come() -> None:
    bench = make_bench()
    handle = bench.kv.open()
    bench.kv.extend(handle, 6)
    assert absent(handle.device_table().tolist()) == [False, False]
    assert absent(handle.pool_table().tolist()) == [True, True]
    assert absent(handle.home_table().tolist()) == [False, False]
    assert (bench.pool.num_free, bench.device.num_free) == (14, 2)
    assert bench.kv.usage == pytest.approx(2 / 16)
    bench.kv.check_integrity()


def test_extend_again_to_fewer_tokens_takes_nothing() -> None:
    bench = make_bench()
    handle = bench.kv.open()
    bench.kv.extend(handle, 6)
    before = handle.device_table().tolist()
    bench.kv.extend(handle, 3)
    assert handle.device_table().tolist() == before


def test_extend_spreads_pages_over_pool_devices() -> None:
    bench = make_bench(pool_devices=4)
    handle = bench.kv.open()
    bench.kv.extend(handle, 4 * G)
    assert sorted(bench.pool.device_of(page) for page in handle.home_table().tolist()) == [0, 1, 2, 3]


def test_tables_of_a_long_sequence_grow_with_it() -> None:
    bench = make_bench(pool_pages=64, device_pages=2)
    handle = bench.kv.open()
    for _ in range(40):
        bench.compute(handle, count=G)
    assert len(handle.device_table()) == len(handle.pool_table()) == 40
    assert absent(handle.device_table().tolist()) == [True] * 38 + [False] * 2
    assert absent(handle.pool_table().tolist()) == [False] * 38 + [True] * 2


def test_extend_without_room_is_an_assertion() -> None:
    bench = make_bench()
    with pytest.raises(AssertionError, match="no room to extend to 17 tokens: ask lack first"):
        bench.kv.extend(bench.kv.open(), 4 * G + 1)


# --- writing to the pool ---


def test_commit_writes_full_pages_of_all_handles_in_one_go_and_once() -> None:
    bench = make_bench()
    first, second = bench.kv.open(), bench.kv.open()
    bench.compute(first, second, count=3)
    assert bench.memory.saves == []
    bench.compute(first, second, count=3)
    assert bench.memory.saves == [2]
    bench.compute(first)
    assert bench.memory.saves == [2]
    assert bench.ledger.totals() == {TO_POOL: LinkBytes(moved=80, useful=80)}
    assert (first.computed, first.written) == (7, 4)


def test_commit_that_fails_changes_nothing() -> None:
    bench = make_bench()
    handle = bench.kv.open()
    bench.compute(handle, count=3)
    bench.kv.extend(handle, 4)
    bench.memory.broken = True
    with pytest.raises(RuntimeError, match="device lost"):
        bench.kv.commit([(handle, 4)])
    assert (handle.computed, handle.written, bench.kv.num_copies) == (3, 0, 0)
    bench.check()
    bench.close(handle)
    assert (bench.pool.num_free, bench.device.num_free) == (16, 4)


def test_suspend_writes_the_page_being_filled_and_counts_its_tokens() -> None:
    bench = make_bench()
    handle = bench.kv.open()
    bench.compute(handle, count=6)
    bench.kv.suspend(handle)
    bench.check()
    assert bench.memory.saves == [1, 1]
    assert bench.ledger.totals() == {TO_POOL: LinkBytes(moved=80, useful=60)}
    assert bench.kv.num_copies == 2
    bench.kv.suspend(handle)
    assert bench.memory.saves == [1, 1]


def test_suspend_gives_back_pages_of_tokens_that_were_not_computed() -> None:
    bench = make_bench()
    handle = bench.kv.open()
    bench.compute(handle, count=2)
    bench.kv.extend(handle, 11)
    assert handle.num_pages == 3
    bench.kv.suspend(handle)
    bench.check()
    assert (handle.num_pages, bench.pool.num_free, bench.device.num_free) == (1, 15, 3)


# --- copies ---


def test_copies_stay_while_there_is_room_and_the_oldest_leave_first() -> None:
    bench = make_bench(device_pages=3)
    handle = bench.kv.open()
    for _ in range(3):
        bench.compute(handle, count=G)
    assert bench.kv.num_copies == 3
    bench.compute(handle)
    assert absent(handle.device_table().tolist()) == [True, False, False, False]
    assert bench.memory.loads == []


def test_copies_of_a_suspended_sequence_leave_before_those_that_are_read() -> None:
    bench = make_bench(device_pages=3)
    running, waiting = bench.kv.open(), bench.kv.open()
    bench.compute(running, count=G)
    bench.compute(waiting, count=G)
    bench.kv.suspend(waiting)
    bench.compute(running, count=G + 1)
    assert absent(waiting.device_table().tolist()) == [True]
    assert absent(running.device_table().tolist()) == [False] * 3


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_copies_beyond_those_to_keep_are_dropped_after_the_step(keep: int) -> None:
    bench = make_bench(keep_copies=keep)
    handle = bench.kv.open()
    bench.compute(handle, count=G * 3 + 1)
    assert bench.kv.num_copies == keep
    assert bench.device.num_free == 4 - 1 - keep
    bench.kv.suspend(handle)
    bench.check()
    assert bench.device.num_free == 4 - keep


def test_resume_with_its_copy_moves_nothing() -> None:
    bench = make_bench()
    handle = bench.kv.open()
    bench.compute(handle, count=6)
    bench.kv.suspend(handle)
    bench.compute(handle)
    assert (bench.memory.loads, bench.kv.restores) == ([], 0)


def test_resume_without_its_copy_brings_one_page_back_and_counts_its_tokens() -> None:
    bench = make_bench(device_pages=2)
    handle, other = bench.kv.open(), bench.kv.open()
    bench.compute(handle, count=6)
    bench.kv.suspend(handle)
    bench.compute(other, count=2 * G)
    assert absent(handle.device_table().tolist()) == [True, True]
    bench.compute(handle, count=2)
    assert absent(handle.device_table().tolist()) == [True, False]
    assert (bench.memory.loads, bench.kv.restores) == ([1], 1)
    assert bench.ledger.totals()[TO_DEVICE] == LinkBytes(moved=40, useful=20)


def test_resume_at_a_page_boundary_brings_nothing_back() -> None:
    bench = make_bench(keep_copies=0)
    handle = bench.kv.open()
    bench.compute(handle, count=G)
    bench.kv.suspend(handle)
    bench.compute(handle)
    assert bench.memory.loads == []


# --- room ---


def test_lack_tells_pool_and_device_apart() -> None:
    bench = make_bench(pool_pages=6, device_pages=2)
    handle, other = bench.kv.open(), bench.kv.open()
    assert bench.kv.lack(handle, 2 * G) is None
    assert bench.kv.lack(handle, 2 * G + 1) is Lack.DEVICE
    for _ in range(5):
        bench.compute(handle, count=G)
    assert bench.kv.lack(other, G) is None
    assert bench.kv.lack(other, G + 1) is Lack.POOL


def test_lack_never_counts_pages_that_are_written_to_as_room() -> None:
    bench = make_bench(device_pages=2)
    first, second = bench.kv.open(), bench.kv.open()
    bench.compute(first, second)
    assert bench.kv.lack(bench.kv.open(), 1) is Lack.DEVICE
    assert bench.kv.lack(first, G) is None
    bench.kv.suspend(second)
    assert bench.kv.lack(bench.kv.open(), 1) is None


def test_room_is_what_extend_can_take() -> None:
    bench = make_bench(pool_pages=3, device_pages=2)
    handle = bench.kv.open()
    assert bench.kv.room(handle) == 2 * G
    bench.compute(handle, count=5)
    assert bench.kv.room(handle) == 7
    other = bench.kv.open()
    bench.kv.extend(other, 1)
    assert (bench.kv.room(handle), bench.kv.room(other)) == (3, 4)
    bench.kv.suspend(handle)
    assert bench.kv.room(handle) == 3
    bench.check()


def test_close_gives_everything_back_and_leaves_an_open_handle() -> None:
    bench = make_bench()
    handle = bench.kv.open()
    bench.compute(handle, count=6)
    bench.close(handle)
    assert (bench.pool.num_free, bench.device.num_free, bench.kv.num_held_pages) == (16, 4, 0)
    assert (handle.computed, handle.num_pages) == (0, 0)
    bench.compute(handle, count=2)
    bench.close(handle)
    bench.kv.check_integrity()


def test_check_integrity_finds_a_copy_that_the_pool_does_not_hold() -> None:
    bench = make_bench()
    handle = bench.kv.open()
    bench.compute(handle, count=G)
    handle.written = 0
    with pytest.raises(AssertionError, match="counts as a copy but is not in the pool"):
        bench.kv.check_integrity()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    pool_pages=st.integers(2, 24),
    device_pages=st.integers(1, 8),
    keep=st.sampled_from([None, 0, 1, 3]),
)
def test_random_steps_suspends_losses_and_closes_never_lose_a_token(
    seed: int, pool_pages: int, device_pages: int, keep: int | None
) -> None:
    rng = random.Random(seed)
    bench = make_bench(pool_pages=pool_pages, device_pages=device_pages, keep_copies=keep)
    handles = [bench.kv.open() for _ in range(4)]
    for _ in range(80):
        handle, action = rng.choice(handles), rng.random()
        count, room = rng.randint(1, 9), bench.kv.room(handle)
        lack = bench.kv.lack(handle, handle.computed + count)
        assert (lack is None) == (count <= room)
        if action < 0.6:
            if lack is None:
                others = [h for h in rng.sample(handles, 2) if h is not handle]
                bench.kv.extend(handle, handle.computed + count)
                for other in others:
                    if bench.kv.lack(other, other.computed + 1) is None:
                        bench.kv.extend(other, other.computed + 1)
                        if rng.random() < 0.3:
                            bench.kv.suspend(other)
                bench.check()
                bench.step([handle], count)
        elif action < 0.8:
            bench.kv.suspend(handle)
        elif action < 0.85:
            bench.lose_device()
        else:
            bench.close(handle)
        bench.check()
    for handle in handles:
        bench.close(handle)
    bench.kv.check_integrity()
    assert (bench.pool.num_free, bench.device.num_free) == (bench.pool.num_usable, bench.device.num_usable)


def test_lost_device_pages_leave_what_the_pool_has_and_what_was_suspended_goes_on() -> None:
    bench = make_bench()
    runs, waits, young = (bench.kv.open() for _ in range(3))
    bench.compute(runs, count=2 * G + 3)
    bench.compute(waits, count=3)
    bench.kv.suspend(waits)
    bench.compute(waits, count=2)
    bench.kv.suspend(waits)
    bench.kv.extend(young, 2)
    bench.lose_device()
    assert (runs.computed, waits.computed, young.computed) == (2 * G, G + 1, 0)
    assert not young.num_pages
    bench.compute(runs, waits, young, count=2)


def test_pages_of_the_real_memory_come_back_as_they_were() -> None:
    layout = PageLayout(
        num_layers=2, page_tokens=G, kv_heads=1, head_dim=8, projections={"q": whole((8, 8))}, dtype=np.dtype("float32")
    )
    memory = PageMemory(layout, one_device_mesh(), pool_devices=2, pool_pages=9, adapter_pages=2, kv_pages=3)
    ledger = Ledger()
    kv = KvPool(
        PoolPages(2, 9), PageAllocator(3), memory, page_tokens=G, token_bytes=layout.page_bytes // G, ledger=ledger
    )
    handle, other = kv.open(), kv.open()
    kv.extend(handle, 6)
    memory.kv = memory.kv.at[:, int(handle.device_table()[1])].set(7)
    kv.commit([(handle, 6)])
    kv.suspend(handle)
    kv.extend(other, 2 * G)
    memory.kv = memory.kv.at[:].set(0)
    kv.commit([(other, 2 * G)])

    kv.extend(handle, 7)

    assert np.all(np.asarray(memory.kv)[:, int(handle.device_table()[1])] == 7)
    page = layout.page_bytes
    assert ledger.totals() == {TO_POOL: LinkBytes(4 * page, 14 * page // 4), TO_DEVICE: LinkBytes(page, page // 2)}
