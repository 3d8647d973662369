import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool.adapter_pool import PlacedAdapter
from memory_pool.adapter_streams import OUTSIDE, AdapterFacts, facts, pack, scales, stripe_ranks, true_numbers
from tests.memory_pool.adapters_for_tests import (
    GROUPS,
    check_matrices,
    make_adapter,
    make_layout,
    matrices_in,
    random_ranks,
)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 9), st.sampled_from([1, 2]), st.sampled_from([1, 3]))
def test_pack_random_adapters_can_be_read_back(seed, most, shards, stripes):
    layout = make_layout(shards)
    modules = make_adapter(seed, random_ranks(np.random.default_rng(seed), most)).modules
    ranks = stripe_ranks(modules, layout, stripes)
    pages = [pack(modules, layout, ranks[s], stripe=s, stripes=stripes) for s in range(stripes)]
    a_counts = [layout.a_pages(r) for r in ranks.tolist()]
    b_counts = [layout.b_pages(r) for r in ranks.tolist()]
    assert [p.shape[1] for p in pages] == [a + b for a, b in zip(a_counts, b_counts, strict=True)]
    ends = np.cumsum([0, *(p.shape[1] for p in pages)])
    a_tables = [range(start, start + a) for start, a in zip(ends[:-1], a_counts, strict=True)]
    b_tables = [range(stop - b, stop) for stop, b in zip(ends[1:], b_counts, strict=True)]
    placed = PlacedAdapter(
        "near_data", ranks, scales(modules, layout), [[*t] for t in a_tables], [[*t] for t in b_tables], None
    )
    for side in ("a", "b"):
        for shard in range(shards):
            found = matrices_in(np.concatenate(pages, axis=1), layout, placed, side=side, shard=shard)
            check_matrices({k: m for k, m in found.items() if m.size}, modules, layout, side=side, shard=shard)


def test_stripe_ranks_are_the_largest_over_layers_dealt_out_in_turn():
    modules = make_adapter(1, {(0, "q"): 2, (2, "q"): 5, (OUTSIDE, "head"): 1}).modules
    assert stripe_ranks(modules, make_layout(), 1).tolist() == [[5, 0, 0, 1]]
    assert stripe_ranks(modules, make_layout(), 3).tolist() == [[2, 0, 0, 1], [2, 0, 0, 0], [1, 0, 0, 0]]


def test_scales_of_the_head_are_in_every_layer():
    modules = make_adapter(1, {(1, "o"): 2, (OUTSIDE, "head"): 3}).modules
    assert scales(modules, make_layout()).tolist() == [[0, 0, 0, 1.5], [0, 0.5, 0, 1.5], [0, 0, 0, 1.5]]


def test_pack_bfloat16_rounds_to_nearest():
    layout = make_layout(1, "bfloat16")
    modules = make_adapter(3, {(0, "q"): 2}).modules
    pages = pack(modules, layout, stripe_ranks(modules, layout, 1)[0])
    row = pages[0, 0, :12].view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(row, modules[0, "q"].a[0].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("shards", "wanted"),
    [
        (1, AdapterFacts(12 + 12 + 8, 8 + 8 + 12, 9, 2 * 12 + 4 * 12 + 3 * 8, 2 * 8 + 4 * 8 + 3 * 12)),
        (2, AdapterFacts(12 + 12 + 4, 4 + 4 + 12, 9, 2 * 12 + 4 * 12 + 3 * 4, 2 * 4 + 4 * 4 + 3 * 12)),
    ],
)
def test_facts_are_sums_over_the_layers_on_one_shard(shards, wanted):
    modules = make_adapter(1, {(0, "q"): 2, (1, "q"): 4, (1, "o"): 3, (OUTSIDE, "head"): 7}).modules
    assert facts(modules, make_layout(shards), GROUPS) == wanted


def test_facts_projections_with_one_input_count_it_once():
    modules = make_adapter(1, {(0, "q"): 2, (1, "q"): 4, (1, "o"): 3}).modules
    assert facts(modules, make_layout(), (("q", "o"),)).inputs == 12 + 8


def test_true_numbers_have_no_padding_and_include_the_head():
    modules = make_adapter(1, {(0, "q"): 2, (OUTSIDE, "head"): 1}).modules
    assert true_numbers(modules, make_layout()) == (2 * 12 + 12, 2 * 8 + 50)
    assert true_numbers(modules, make_layout(2)) == (2 * 12 + 12, 2 * 4 + 25)
