"""Cold pages: how many, in which order, and what the streaming read reads."""

from __future__ import annotations

import numpy as np
import pytest

from launch.benchmarks import cold_pages
from launch.benchmarks.cold_pages import ColdPages, cold_size
from memory_pool.layout import PageLayout, whole

LAYOUT = PageLayout(
    num_layers=2,
    page_tokens=4,
    kv_heads=1,
    head_dim=8,
    projections={"q_proj": whole((8, 16))},
    dtype=np.dtype(np.float32),
)


@pytest.fixture(scope="module")
def cold() -> ColdPages:
    return ColdPages(LAYOUT, num_bytes=70 * LAYOUT.page_bytes)


def test_cold_pages_are_dealt_once_a_round_and_never_the_reserved_one(cold):
    for space in ("pool", "device"):
        rounds = [np.concatenate([cold.take(space, 30), cold.take(space, 40)]) for _ in range(2)]
        assert sorted(rounds[0]) == list(range(1, 71))
        np.testing.assert_array_equal(rounds[0], rounds[1])
        # Shuffled: neighbours in the round are not neighbours in memory.
        assert np.mean(np.diff(rounds[0]) == 1) < 0.2


def test_cold_pages_that_are_fewer_than_asked_for_come_again(cold):
    taken = cold.take("pool", 150)
    np.testing.assert_array_equal(taken[:70], taken[70:140])
    cold.take("pool", 60)


def test_cold_pages_hold_finite_numbers_in_both_memories(cold):
    for pages in (cold.memory.pool, cold.memory.adapters):
        numbers = np.asarray(pages).view(np.float32)
        assert np.isfinite(numbers).all()
        assert (np.abs(numbers[:, 1:]).max(axis=-1) > 0).all()


def test_streaming_read_covers_the_pool(cold):
    assert cold.num_bytes == cold.memory.pool.nbytes == 71 * LAYOUT.page_bytes
    assert cold.stream_s() > 0


@pytest.mark.parametrize(
    ("cache", "memory", "wanted", "size", "says"),
    [
        (100, 6000, None, 400, ""),
        (100, 600, None, 100, "1 times the last-level cache (a sixth of the memory), not 4: part is cached"),
        (100, 6000, 50, 50, "0.5 times the last-level cache (as asked for), not 4: part is cached"),
        (100, 6000, 900, 900, ""),
        (None, 6 * 2**40, None, 256 * 2**20, "the size of the last-level cache is not known"),
    ],
)
def test_cold_size_is_four_caches_or_says_why_not(monkeypatch, cache, memory, wanted, size, says):
    monkeypatch.setattr(cold_pages, "last_level_cache_bytes", lambda: cache)
    monkeypatch.setattr(cold_pages, "memory_bytes", lambda: memory)
    got = cold_size(wanted)
    assert got.num_bytes == size
    assert says in got.note
    assert bool(got.note) == bool(says)
