"""A pool that starts over: nothing on the device, nobody under a wish, and everything told to who plans."""

import pytest

from tests.memory_pool.test_adapter_pool import make_pool, small


def test_start_over_empties_the_device_and_takes_other_strategies():
    pool = make_pool(("resident",))
    for identity in (1, 2, 3):
        pool.put(small(identity))
    assert pool.take_changes() == {1, 2, 3}
    pool.acquire(1)
    pool.release(1)
    pool.wish(2, "split")
    pool.migrate(1)
    assert pool.device_bytes_used > 0
    pool.take_changes()
    pool.start_over(("near_data",))
    pool.check_integrity()
    assert pool.device_bytes_used == 0
    assert pool.migrate(10) == 0, "the wish is forgotten"
    assert [pool.figures(identity).strategy for identity in (1, 2, 3)] == ["near_data"] * 3
    assert pool.take_changes() == {1, 2, 3}, "a planner of another run knows none of them"
    pool.acquire(1)
    assert pool.placed(1).strategy == "near_data"


def test_start_over_takes_the_strategy_of_while_all_fit():
    pool = make_pool(("split",))
    pool.put(small(1))
    pool.start_over(("near_data",), while_all_fit="resident")
    pool.acquire(1)
    assert pool.placed(1).strategy == "resident"


def test_start_over_keeps_what_was_lost_lost():
    pool = make_pool(("split",))
    pool.put(small(1))
    pool.lose(("near_data", "split"), instead="fetch")
    pool.start_over(("near_data",))
    pool.acquire(1)
    assert pool.placed(1).strategy == "fetch"


def test_start_over_while_an_adapter_is_used_is_refused():
    pool = make_pool()
    pool.put(small(7))
    pool.acquire(7)
    with pytest.raises(AssertionError, match="adapter 7 is in use: start over while nothing runs"):
        pool.start_over(("near_data",))
