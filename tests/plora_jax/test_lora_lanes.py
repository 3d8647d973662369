"""From owners of tokens to lanes by strategy."""

import numpy as np
import pytest

from memory_pool.adapter_pool import PlacedAdapter
from memory_pool.adapter_streams import AdapterFacts
from plora_jax.engine.lora_lanes import LanePacker, LaneShape
from strategies.lanes import BASE

SHAPE = LaneShape(tokens=6, entries=3, stripes=1, layers=2, projections=3, a_pages=4, b_pages=4)
STRATEGIES = ("resident", "near_data")


def adapter(strategy, *, rank=2, page=1):
    ranks = np.array([[rank, 0, 1]], np.int32)
    pages = np.array([[page, page + 1]], np.int32)
    return PlacedAdapter(
        strategy, ranks, np.full((2, 3), 0.5, np.float32), pages, pages + 10, AdapterFacts(0, 0, 0, 0, 0)
    )


PLACED = {7: adapter("resident"), 8: adapter("near_data", page=3), 9: adapter("resident", page=5)}


def test_tokens_go_to_the_lane_of_their_adapters_strategy():
    lanes = LanePacker(SHAPE, STRATEGIES).lanes(np.array([9, 0, 8, 7, 9, 0]), PLACED.__getitem__)
    assert lanes.tokens["resident"].owner.tolist() == [1, BASE, BASE, 0, 1, BASE]
    assert lanes.tokens["near_data"].owner.tolist() == [BASE, BASE, 0, BASE, BASE, BASE]
    assert (lanes.tokens["resident"].count, lanes.tokens["near_data"].count) == (2, 1)
    assert lanes.tables["resident"].a_pages[0].tolist() == [[1, 2, 0, 0], [5, 6, 0, 0], [0, 0, 0, 0]]
    assert lanes.tables["near_data"].ranks[0].tolist() == [[2, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert [use.tokens for use in lanes.use["resident"]] == [1, 2]


def test_tables_are_the_same_object_and_key_while_the_adapters_are():
    packer = LanePacker(SHAPE, STRATEGIES)
    first = packer.lanes(np.array([9, 0, 8, 7, 9, 0]), PLACED.__getitem__)
    again = packer.lanes(np.array([7, 9, 9, 8, 0, 0]), PLACED.__getitem__)
    assert again.key == first.key
    assert again.tables["resident"] is first.tables["resident"]
    assert packer.lanes(np.array([7, 9, 9, 8, 0, 0]), PLACED.__getitem__) is again
    moved = {**PLACED, 9: adapter("resident", page=8)}
    other = packer.lanes(np.array([7, 9, 9, 8, 0, 0]), moved.__getitem__)
    assert other.key != first.key
    assert other.tables["resident"].a_pages[0, 1].tolist() == [8, 9, 0, 0]


def test_no_adapter_gives_the_empty_lanes():
    packer = LanePacker(SHAPE, STRATEGIES)
    lanes = packer.lanes(np.zeros(6, np.int64), PLACED.__getitem__)
    assert lanes is packer.empty
    assert not lanes.use


@pytest.mark.parametrize(("projection", "owners"), [(2, [0, BASE]), (1, [BASE, BASE])])
def test_only_adapters_that_change_a_projection_are_taken(projection, owners):
    lanes = LanePacker(SHAPE._replace(tokens=2), STRATEGIES).lanes(
        np.array([7, 0]), PLACED.__getitem__, changes=projection
    )
    assert lanes.tokens["resident"].owner.tolist() == owners
