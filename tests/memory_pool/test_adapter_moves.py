import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool import Crossing, Ledger
from memory_pool.adapter_pool import CapacityError
from memory_pool.pool_pages import PoolPages
from tests.memory_pool.adapters_for_tests import check_matrices, make_adapter, matrices_in, random_ranks
from tests.memory_pool.test_adapter_pool import (
    MAX_RANK,
    NEEDS,
    PAGE,
    POOL_DEVICES,
    SMALL_PAGES,
    make_memory,
    make_pool,
    put_small,
    small,
)

PLANNED = ("near_data",)
LOST = ("near_data", "split")


def serve(pool, identity):
    pool.acquire(identity)
    return pool.placed(identity)


def migrate_all(pool, most=100):
    while pool.migrate(most):
        pool.check_integrity()


def check_content(pool, identity, modules, *, adapter_pages=11):
    """Asserts that the tables of an acquired adapter lead to its matrices."""
    memory, placed = make_memory(adapter_pages, 41, 1), pool.placed(identity)
    for side in ("a", "b"):
        pages = memory.adapters if getattr(NEEDS[placed.strategy], side) else memory.pool
        found = matrices_in(pages, memory.layout, placed, side=side, shard=0)
        check_matrices(found, modules, memory.layout, side=side, shard=0)


def test_wish_in_use_is_served_as_before_until_the_last_page_has_come():
    pool = make_pool(PLANNED)
    put_small(pool, 1)
    before = serve(pool, 1)
    pool.wish(1, "resident")
    for copied in range(1, sum(SMALL_PAGES)):
        assert pool.migrate(1) == 1
        pool.check_integrity()
        assert pool.placed(1) is before, "it changes once, when everything is there"
        assert pool.status(1).missing_bytes == (5 - copied) * PAGE
    assert (pool.status(1).strategy, pool.status(1).moving) == ("near_data", "resident")
    assert pool.migrate(1) == 1
    assert pool.placed(1).strategy == "resident"
    assert (pool.status(1).moving, pool.status(1).missing_bytes) == ("", 0)
    assert pool.migrate(1) == 0
    check_content(pool, 1, small(1).modules)


def test_wish_reserves_all_pages_when_the_first_is_copied():
    pool = make_pool(PLANNED)
    put_small(pool, 1)
    pool.wish(1, "resident")
    assert pool.device_bytes_used == 0
    pool.migrate(1)
    assert pool.device_bytes_used == 5 * PAGE


@pytest.mark.parametrize(("first", "then", "left"), [("resident", "split", 2), ("resident", "fetch", 0)])
def test_wish_down_switches_at_once_and_gives_back_what_it_does_not_read(first, then, left):
    pool = make_pool(PLANNED)
    put_small(pool, 1)
    serve(pool, 1)
    pool.wish(1, first)
    migrate_all(pool)
    pool.wish(1, then)
    assert pool.placed(1).strategy == then
    assert pool.device_bytes_used == left * PAGE
    pool.check_integrity()
    check_content(pool, 1, small(1).modules)


def test_wish_up_from_split_copies_only_a():
    ledger = Ledger()
    pool = make_pool(PLANNED, ledger=ledger)
    put_small(pool, 1)
    serve(pool, 1)
    pool.wish(1, "split")
    migrate_all(pool)
    pool.wish(1, "resident")
    migrate_all(pool)
    a, b = SMALL_PAGES
    totals = ledger.totals()
    assert totals[Crossing("adapter", "split", "to_device", "load")] == (b * PAGE, 8 * 8 * 4)
    assert totals[Crossing("adapter", "resident", "to_device", "load")] == (a * PAGE, 8 * 12 * 4)
    check_content(pool, 1, small(1).modules)


def test_wish_page_by_page_counts_the_useful_bytes_of_the_whole():
    ledger = Ledger()
    pool = make_pool(PLANNED, ledger=ledger)
    put_small(pool, 1)
    pool.wish(1, "resident")
    migrate_all(pool, most=1)
    useful = (8 * 12 + 8 * 8) * 4
    assert ledger.totals()[Crossing("adapter", "resident", "to_device", "load")] == (5 * PAGE, useful)


def test_wish_taken_back_midway_gives_the_pages_back():
    pool = make_pool(PLANNED)
    put_small(pool, 1)
    serve(pool, 1)
    pool.wish(1, "resident")
    pool.migrate(2)
    pool.wish(1, "near_data")
    assert pool.device_bytes_used == 0
    assert pool.migrate(9) == 0
    pool.check_integrity()


def test_wish_without_room_waits_while_others_go_first():
    pool = make_pool(PLANNED)
    put_small(pool, 1, 2, 3)
    pool.put(make_adapter(4, {(0, "q"): 1}))
    for identity in (1, 2):
        pool.wish(identity, "resident")
    migrate_all(pool)
    pool.wish(3, "resident")
    assert pool.migrate(9) == 0
    pool.wish(2, "split")
    pool.wish(4, "resident")
    assert pool.migrate(9) == 2, "the small one fits beside it"
    assert (pool.status(3).moving, pool.status(4).strategy) == ("resident", "resident")
    pool.wish(1, "near_data")
    migrate_all(pool)
    assert pool.status(3).strategy == "resident"
    assert pool.device_bytes_used <= 10 * PAGE


def test_acquire_under_a_wish_copies_nothing_and_evicts_nobody():
    ledger = Ledger()
    pool = make_pool(PLANNED, ledger=ledger)
    put_small(pool, 1, 2, 3)
    pool.wish(1, "resident")
    migrate_all(pool)
    before = ledger.totals()
    for identity in (1, 2, 3):
        assert pool.can_acquire(identity)
        serve(pool, identity)
    assert [pool.placed(i).strategy for i in (1, 2, 3)] == ["resident", "near_data", "near_data"]
    assert ledger.totals() == before
    for identity in (1, 2, 3):
        pool.release(identity)
    assert pool.status(1).tier == "device", "it stays as planned"


def test_retire_midway_gives_everything_back():
    pages = PoolPages(POOL_DEVICES, 41)
    pool = make_pool(PLANNED, pages=pages)
    put_small(pool, 1)
    serve(pool, 1)
    pool.wish(1, "resident")
    pool.migrate(2)
    pool.retire(1)
    pool.migrate(1)
    pool.release(1)
    assert pool.migrate(9) == pool.device_bytes_used == 0
    assert pages.num_free == pages.num_usable
    pool.check_integrity()


def test_pinned_stays_on_the_device_and_is_not_counted_on_by_others():
    pool = make_pool()
    pool.put(small(1), pinned=True)
    put_small(pool, 2, 3)
    for identity in (1, 2):
        serve(pool, identity)
        pool.release(identity)
    serve(pool, 3)
    assert [pool.status(i).tier for i in (1, 2, 3)] == ["device", "pool", "device"]
    assert pool.status(1).pinned
    pool.put(make_adapter(4, {(layer, "q"): 9 for layer in range(3)} | {(0, "o"): 3}))
    assert pool.status(4).strategy == "fetch", "it fits only without the pinned one"
    pool.retire(1)
    assert pool.status(4).strategy == "resident"


def test_lose_serves_by_the_other_from_the_next_step_on():
    pool = make_pool(PLANNED)
    put_small(pool, 1, 2, 3)
    for identity in (1, 2, 3):
        serve(pool, identity)
    pool.wish(1, "split")
    migrate_all(pool)
    pool.wish(2, "resident")
    pool.migrate(1)
    pool.lose(LOST, instead="fetch")
    pool.check_integrity()
    assert [pool.placed(i).strategy for i in (1, 2, 3)] == ["fetch"] * 3
    migrate_all(pool)
    assert pool.placed(2).strategy == "resident", "what needs nothing of the lost goes on"
    pool.wish(2, "split")
    assert pool.placed(2).strategy == "fetch"
    put_small(pool, 4)
    assert serve(pool, 4).strategy == "fetch"
    assert pool.fallbacks == 0
    for identity in (1, 2, 3, 4):
        check_content(pool, identity, small(identity).modules)


@pytest.mark.parametrize("preferred", ["near_data", "split"])
def test_lose_a_forced_strategy_serves_by_the_other(preferred):
    pool = make_pool((preferred,))
    put_small(pool, 1, 2)
    serve(pool, 1)
    pool.lose(LOST, instead="fetch")
    assert pool.placed(1).strategy == serve(pool, 2).strategy == "fetch"
    pool.check_integrity()


def test_changes_name_who_came_went_or_switched():
    pool = make_pool(PLANNED)
    put_small(pool, 1, 2)
    assert pool.take_changes() == {1, 2}
    assert pool.take_changes() == set()
    pool.wish(1, "resident")
    assert (pool.take_changes(), pool.figures(1).strategy) == ({1}, "resident")
    migrate_all(pool)
    pool.lose(LOST, instead="fetch")
    pool.retire(2)
    assert 2 in pool.take_changes()
    assert pool.figures(2) is None


@pytest.mark.parametrize(("placement", "home", "pages"), [("pinned", 0, (3, 2)), ("striped", -1, (5, 3))])
def test_figures_are_those_of_the_adapter(placement, home, pages):
    pool = make_pool(PLANNED, placement=placement)
    put_small(pool, 1)
    figures = pool.figures(1)
    assert (figures.home, figures.pages, figures.strategy, figures.pinned) == (home, pages, "near_data", False)
    assert figures.ranks.tolist() == [8, 0, 0, 0]


OPERATIONS = st.tuples(
    st.sampled_from(["put", "wish", "wish", "wish", "migrate", "migrate", "acquire", "release", "retire", "lose"]),
    st.integers(0, 9),
)


@pytest.mark.parametrize("preferred", [("near_data",), ("fetch",), ("resident",), ("split",)], ids="-".join)
@pytest.mark.parametrize("placement", ["pinned", "striped"])
@settings(max_examples=25, deadline=None)
@given(operations=st.lists(OPERATIONS, min_size=10, max_size=60))
def test_random_wishes_keep_integrity(preferred, placement, operations):
    pages = PoolPages(POOL_DEVICES, 41)
    pool = make_pool(preferred, pages=pages, placement=placement, adapter_pages=21)
    identities, rng = itertools.count(1), np.random.default_rng(len(operations))
    known, held, wished = {}, [], {}
    for operation, pick in operations:
        anyone = list(known)[pick % len(known)] if known else None
        if operation == "put":
            adapter = make_adapter(next(identities), random_ranks(rng, 1 + pick % MAX_RANK))
            try:
                pool.put(adapter, pinned=pick == 7)
                known[adapter.identity] = adapter.modules
            except CapacityError:
                pass
        elif operation == "wish" and anyone:
            wished[anyone] = list(NEEDS)[pick % 4]
            pool.wish(anyone, wished[anyone])
        elif operation == "migrate":
            assert pool.migrate(1 + pick) <= 1 + pick
        elif operation == "acquire" and anyone and pool.can_acquire(anyone):
            pool.acquire(anyone)
            held.append(anyone)
        elif operation == "release" and held:
            pool.release(held.pop(pick % len(held)))
        elif operation == "retire" and anyone and anyone not in held:
            pool.retire(anyone)
            del known[anyone]
        elif operation == "lose" and pick == 0:
            pool.lose(LOST, instead="fetch")
        pool.check_integrity()
        assert pool.device_bytes_used <= 20 * PAGE
        for identity in set(held):
            check_content(pool, identity, known[identity], adapter_pages=21)
    for identity in held:
        pool.release(identity)
    for identity in known:
        pool.retire(identity)
    assert pool.pool_bytes == pool.device_bytes_used == pool.migrate(9) == 0
    assert pages.num_free == pages.num_usable
