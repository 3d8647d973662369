"""How many copies stay on the device, and copies that come back."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool.ledger import LinkBytes
from tests.memory_pool.test_kv_pool import TO_DEVICE, TOKEN_BYTES, G, absent, make_bench


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_keep_drops_what_is_over_at_once_and_moves_nothing(keep: int) -> None:
    bench = make_bench(device_pages=8)
    handle = bench.kv.open()
    bench.compute(handle, count=4 * G + 1)
    bench.kv.keep(keep)
    assert bench.kv.num_copies == keep
    assert bench.memory.loads == []
    bench.check()


def test_keep_holds_for_the_steps_that_follow() -> None:
    bench = make_bench(device_pages=8)
    handle = bench.kv.open()
    bench.kv.keep(1)
    bench.compute(handle, count=4 * G + 1)
    assert bench.kv.num_copies == 1
    bench.kv.keep(None)
    bench.compute(handle, count=G)
    assert bench.kv.num_copies == 2


def test_bring_copies_pages_back_up_to_those_to_keep() -> None:
    bench = make_bench(device_pages=8)
    handle = bench.kv.open()
    bench.compute(handle, count=4 * G + 1)
    bench.kv.keep(0)
    assert bench.kv.bring(9) == 0
    bench.kv.keep(3)
    assert [bench.kv.bring(2), bench.kv.bring(2), bench.kv.bring(2)] == [2, 1, 0]
    assert bench.kv.num_copies == 3
    assert bench.ledger.totals()[TO_DEVICE] == LinkBytes(3 * G * TOKEN_BYTES, 3 * G * TOKEN_BYTES)
    bench.check()


def test_bring_leaves_a_free_page_for_each_sequence() -> None:
    bench = make_bench(device_pages=5)
    handle, other = bench.kv.open(), bench.kv.open()
    bench.compute(handle, count=3 * G + 1)
    bench.compute(other, count=1)
    bench.kv.keep(0)
    bench.kv.keep(None)
    assert bench.kv.bring(9) == 1
    assert bench.device.num_free == 2
    bench.check()


def test_bring_leaves_those_that_wait_in_the_pool() -> None:
    bench = make_bench(device_pages=8)
    handle = bench.kv.open()
    bench.compute(handle, count=2 * G)
    bench.kv.suspend(handle)
    bench.kv.keep(0)
    bench.kv.keep(None)
    assert bench.kv.bring(9) == 0
    assert absent(handle.device_table().tolist()) == [True, True]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pool_pages=st.integers(4, 24), device_pages=st.integers(2, 10))
def test_random_keeps_and_copies_back_never_lose_a_token(seed: int, pool_pages: int, device_pages: int) -> None:
    rng = random.Random(seed)
    bench = make_bench(pool_pages=pool_pages, device_pages=device_pages)
    handles = [bench.kv.open() for _ in range(3)]
    keep = None
    for _ in range(80):
        handle, action, count = rng.choice(handles), rng.random(), rng.randint(1, 9)
        if action < 0.4:
            if bench.kv.lack(handle, handle.computed + count) is None:
                bench.kv.extend(handle, handle.computed + count)
                bench.step([handle], count)
        elif action < 0.5:
            bench.kv.suspend(handle)
        elif action < 0.6:
            bench.close(handle)
        elif action < 0.8:
            keep = rng.choice([None, 0, 1, 3, 9])
            bench.kv.keep(keep)
        else:
            assert bench.kv.bring(count) <= count
        bench.check()
        assert keep is None or bench.kv.num_copies <= keep
    for handle in handles:
        bench.close(handle)
    assert (bench.pool.num_free, bench.device.num_free) == (bench.pool.num_usable, bench.device.num_usable)
