"""Page allocator: reserved pages, reference counts, integrity."""

import random

import pytest

from memory_pool.pages import PageAllocator


def test_alloc_takes_every_page_but_the_reserved() -> None:
    pages = PageAllocator(6, reserved=2)

    taken = pages.alloc(4)

    assert sorted(taken) == [2, 3, 4, 5]
    assert (pages.num_total, pages.num_usable, pages.num_free) == (6, 4, 0)
    assert not pages.can_alloc(1)
    pages.check_integrity()


def test_alloc_without_reserved_pages_gives_out_page_zero() -> None:
    assert PageAllocator(1, reserved=0).alloc(1) == [0]


def test_alloc_of_nothing_is_empty() -> None:
    pages = PageAllocator(2)
    assert pages.can_alloc(0)
    assert pages.alloc(0) == []


def test_alloc_gives_neighbours_in_order_whatever_order_they_were_freed_in() -> None:
    pages = PageAllocator(8)
    taken = pages.alloc(7)
    pages.free([taken[i] for i in (2, 0, 3, 1)])
    assert pages.alloc(4) == taken[:4]


def test_alloc_beyond_free_pages_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="3 pages asked for, 2 free"):
        PageAllocator(3).alloc(3)


def test_free_of_a_shared_page_keeps_it_until_the_last_holder() -> None:
    pages = PageAllocator(2)
    taken = pages.alloc(1)
    pages.retain(taken)

    pages.free(taken)
    assert pages.num_free == 0
    assert pages.references(taken[0]) == 1
    pages.free(taken)

    assert pages.num_free == 1
    pages.check_integrity()


def test_free_twice_is_an_assertion() -> None:
    pages = PageAllocator(3)
    taken = pages.alloc(1)
    pages.free(taken)
    with pytest.raises(AssertionError, match="is freed but nobody holds it"):
        pages.free(taken)


def test_retain_of_a_free_page_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="page 1 is retained but nobody holds it"):
        PageAllocator(3).retain([1])


@pytest.mark.parametrize(("num_pages", "reserved"), [(1, 1), (0, 0), (4, -1)])
def test_allocator_without_a_page_to_give_is_refused(num_pages: int, reserved: int) -> None:
    with pytest.raises(ValueError, match=f"a page space of {num_pages} pages, {reserved} of them reserved"):
        PageAllocator(num_pages, reserved)


def test_check_integrity_finds_a_page_that_was_lost() -> None:
    pages = PageAllocator(3)
    pages._free.pop()
    with pytest.raises(AssertionError, match="page 1 has 0 references"):
        pages.check_integrity()


def test_random_alloc_retain_free_keeps_integrity() -> None:
    rng = random.Random(0)
    pages = PageAllocator(40, reserved=3)
    held: list[list[int]] = []
    for _ in range(2000):
        action = rng.random()
        wanted = rng.randrange(6)
        if action < 0.45 and pages.can_alloc(wanted):
            held.append(pages.alloc(wanted))
        elif action < 0.6 and held:
            shared = list(rng.choice(held))
            pages.retain(shared)
            held.append(shared)
        elif held:
            pages.free(held.pop(rng.randrange(len(held))))
        pages.check_integrity()
        assert len({page for some in held for page in some}) + pages.num_free == 37
