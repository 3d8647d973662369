import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool.pool_pages import PoolPages


def test_alloc_spread_takes_from_the_device_with_most_room():
    pages = PoolPages(3, 5)
    pages.alloc(2, device=0)
    taken = [pages.device_of(page) for page in pages.alloc(7)]
    assert sorted(taken) == [0, 1, 1, 1, 2, 2, 2]
    assert pages.free_by_device == [1, 1, 1]
    assert taken[:2] == [1, 2]


def test_pages_of_one_device_come_in_order_whatever_order_they_were_freed_in():
    pages = PoolPages(2, 9)
    taken = pages.alloc(6, device=1)
    pages.free(taken[::2])
    pages.free(taken[1::2])
    assert pages.alloc(6, device=1) == taken == list(range(10, 16))


def test_alloc_on_one_device_gives_pages_of_its_range_but_its_first():
    pages = PoolPages(2, 4)
    assert sorted(pages.alloc(3, device=1)) == [5, 6, 7]
    assert not pages.can_alloc(1, device=1)
    assert pages.can_alloc(3)
    assert pages.roomiest() == 0
    assert (pages.num_usable, pages.usable_per_device, pages.num_free) == (6, 3, 3)


def test_alloc_more_than_free_is_our_own_error():
    pages = PoolPages(2, 3)
    with pytest.raises(AssertionError, match="5 pages asked for, 4 free"):
        pages.alloc(5)
    assert pages.num_free == 4


@pytest.mark.parametrize("device", [None, 1])
def test_can_alloc_keeps_pages_free_over_all_devices(device):
    pages = PoolPages(2, 4)
    assert pages.can_alloc(3, device=device, keep_free=3)
    assert not pages.can_alloc(3, device=device, keep_free=4)


def test_free_shared_page_is_given_out_after_its_last_holder():
    pages = PoolPages(2, 3)
    [page] = pages.alloc(1, device=1)
    pages.retain([page])
    pages.free([page])
    assert pages.references(page) == 1
    assert pages.free_by_device == [2, 1]
    pages.free([page])
    assert pages.free_by_device == [2, 2]


def test_pool_without_devices_or_pages_is_refused():
    with pytest.raises(ValueError, match="at least one device, got 0"):
        PoolPages(0, 4)
    with pytest.raises(ValueError, match="1 pages, 1 of them reserved, has none to give out"):
        PoolPages(2, 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["alloc", "retain", "free"]), st.integers(0, 8), st.integers(-1, 2))))
def test_pool_random_operations_keep_integrity(operations):
    pages = PoolPages(3, 6)
    held = []
    for operation, n, device in operations:
        if operation == "alloc" and pages.can_alloc(n, device=None if device < 0 else device):
            held += pages.alloc(n, device=None if device < 0 else device)
        elif operation == "retain" and held:
            pages.retain([held[n % len(held)]])
            held.append(held[n % len(held)])
        elif operation == "free" and held:
            pages.free([held.pop(n % len(held))])
        pages.check_integrity()
        assert pages.num_usable - pages.num_free == len(set(held))
        assert all(pages.references(page) == held.count(page) for page in held)
