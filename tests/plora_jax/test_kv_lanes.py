"""From the pages of sequences to the tables of both sides of the link."""

import types

import jax
import numpy as np
import pytest

from plora_jax.engine.kv_lanes import KvPacker, KvShape
from strategies.lanes import ABSENT

SHAPE = KvShape(groups=3, queries=2, sequences=2, table_pages=8, page_tokens=4, pool_devices=2, device_pages=100)


def sequence(device, pool):
    kv = types.SimpleNamespace(
        device_table=lambda: np.array(device, np.int32),
        pool_table=lambda: np.array(pool, np.int32),
        num_absent=device.count(ABSENT),
    )
    return types.SimpleNamespace(seq_id=1, kv=kv)


def test_pages_on_the_device_need_nothing_of_the_pool():
    packer = KvPacker(SHAPE, lambda _: "distributed")
    packer.place(sequence([4, 5], [ABSENT, ABSENT]), np.array([9, 10, 11], np.int32), group=0, groups=2)
    built = packer.finish()
    assert built.lane.tables[:2, :3].tolist() == [[4, 5, ABSENT]] * 2
    assert built.lane.positions.tolist() == [[9, 10], [11, -1], [-1, -1]]
    assert (built.lane.first, built.lane.end) == (9, 12)
    assert not built.use.any


def test_missing_pages_are_attended_where_they_are():
    packer = KvPacker(SHAPE, lambda _: "distributed")
    packer.place(sequence([ABSENT, 5, ABSENT], [7, ABSENT, 101]), np.array([40, 41, 42], np.int32), group=1, groups=2)
    built = packer.finish()
    assert built.control.tables[0, 1:, :3].tolist() == [[7, ABSENT, ABSENT]] * 2
    assert built.control.tables[1, 1:, :3].tolist() == [[ABSENT, ABSENT, 101]] * 2
    assert (built.control.tables[:, 0] == ABSENT).all()
    assert (built.missing.slots == ABSENT).all()
    assert built.missing.near_groups == 2
    assert built.use.near_queries == (3, 3)


def test_missing_pages_are_streamed_once_for_all_groups_of_a_sequence():
    packer = KvPacker(SHAPE, lambda _: "local")
    packer.place(sequence([5], [ABSENT]), np.array([3], np.int32), group=0, groups=1)
    packer.place(sequence([ABSENT, 6, ABSENT], [7, ABSENT, 101]), np.array([40, 41, 42], np.int32), group=1, groups=2)
    built = packer.finish()
    assert built.control.stream[:3].tolist() == [7, 101, 0]
    assert built.missing.slots[:, :3].tolist() == [[ABSENT] * 3, [0, ABSENT, 1], [0, ABSENT, 1]]
    assert (built.missing.rounds, built.use.streamed_pages, built.missing.near_groups) == (1, 2, 0)
    assert (built.control.tables == ABSENT).all()


@pytest.mark.parametrize("strategy", ["local", "distributed"])
def test_missing_pages_of_one_step_are_not_in_the_next(strategy):
    for device, pool in (([ABSENT], [7]), ([5], [ABSENT])):
        packer = KvPacker(SHAPE, lambda _: strategy)
        packer.place(sequence(device, pool), np.array([3], np.int32), group=0, groups=1)
        built = packer.finish()
    assert (built.missing.slots == ABSENT).all()
    assert (built.control.tables == ABSENT).all()
    assert not built.control.stream.any()


def test_one_query_of_each_sequence_is_placed_as_one_by_one():
    sequences = [sequence([4, ABSENT, 9], [ABSENT, 7, ABSENT]), sequence([5, 6], [ABSENT, ABSENT])]
    positions = np.array([11, 3], np.int32)
    together, alone = (KvPacker(SHAPE._replace(queries=1), lambda _: "distributed") for _ in range(2))
    assert together.place_each(sequences, positions).tolist() == [9, 5]
    for group, each in enumerate(sequences):
        alone.place(each, positions[group : group + 1], group=group, groups=1)
    for got, want in zip(*(jax.tree.leaves(packer.finish()) for packer in (together, alone)), strict=True):
        np.testing.assert_array_equal(got, want)
