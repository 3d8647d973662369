import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_pool.layout import Cut, PageLayout, whole

DEFAULT = {
    "q_proj": (576, 576),
    "k_proj": (192, 576),
    "v_proj": (192, 576),
    "o_proj": (576, 576),
    "gate_proj": (1536, 576),
    "up_proj": (1536, 576),
    "down_proj": (576, 1536),
}


def make_layout(projections, **sizes):
    sizes = {"num_layers": 30, "page_tokens": 16, "kv_heads": 3, "head_dim": 64, "dtype": np.dtype(np.uint16)} | sizes
    return PageLayout(projections=projections, **sizes)


def test_layout_of_the_default_model_wastes_nothing():
    layout = make_layout({name: whole(size) for name, size in DEFAULT.items()})
    assert (layout.page_width, layout.unit, layout.units_per_page) == (6144, 192, 32)
    assert layout.page_bytes == 30 * 6144 * 2
    assert layout.a_units == (3, 3, 3, 3, 3, 3, 8)
    assert layout.b_units == (3, 1, 1, 3, 8, 8, 3)
    assert (layout.in_width("down_proj"), layout.out_width("k_proj")) == (1536, 192)
    # A component of all seven is 26 units of A and 27 of B.
    assert (layout.a_pages([16] * 7), layout.b_pages([16] * 7)) == (13, 14)


def test_layout_of_int8_keys_and_values_holds_them_and_a_scale_of_each_token_and_head():
    layout = make_layout({name: whole(size) for name, size in DEFAULT.items()}, int8_kv=True)
    assert layout.page_bytes == 30 * 2 * 3 * 16 * (64 + 4), "a byte a number, four bytes a token and head"
    assert (layout.page_width, layout.head_width, layout.kv_item_bytes) == (3264, 16 * 34, 68 / 64)
    assert (layout.unit, layout.units_per_page) == (192, 17), "adapters are of the model's dtype, in smaller pages"
    wide = make_layout({"q": whole((192, 192))}, dtype=np.dtype(np.float32), int8_kv=True)
    assert wide.page_bytes == layout.page_bytes
    plain = make_layout({"q": whole((192, 192))})
    assert (plain.kv_item_bytes, plain.page_bytes / layout.page_bytes) == (2, 128 / 68)


def test_layout_rank_zero_takes_no_page_and_one_unit_takes_one():
    layout = make_layout({"q": whole((192, 192)), "o": whole((192, 192))})
    assert layout.a_pages([0, 0]) == 0
    assert layout.a_pages([1, 0]) == layout.a_pages([16, 16]) == 1
    assert layout.a_pages([16, 17]) == 2


def test_spread_rows_take_a_share_of_every_layer():
    layout = make_layout({"q": whole((192, 192)), "head": whole((49152, 192), spread=True)})
    assert layout.unit == 192, "widths of spread projections do not make units smaller"
    # 49152 numbers over 30 layers are 1639 in each: 9 units. 192 are 7: one unit.
    assert (layout.out_width("head"), layout.in_width("head")) == (9 * 192, 192)


def test_layout_of_a_shard_has_the_widths_of_the_shard():
    cut = Cut(out=((0, 96), (96, 192)), inputs=((0, 192), (0, 192)))
    layout = make_layout({"q": cut}, kv_heads=1)
    assert layout.num_shards == 2
    assert (layout.unit, layout.in_width("q"), layout.out_width("q")) == (32, 192, 96)


def test_index_follows_the_order_of_projections():
    layout = make_layout({name: whole(size) for name, size in DEFAULT.items()})
    assert layout.names == tuple(DEFAULT)
    assert [layout.index(name) for name in layout.names] == list(range(7))
    with pytest.raises(ValueError, match="tuple"):
        layout.index("c_attn")


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.booleans()), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 8),
)
def test_units_divide_pages_and_hold_every_row(sizes, layers, heads):
    projections = {f"p{i}": whole((o, i_), spread=spread) for i, (o, i_, spread) in enumerate(sizes)}
    layout = make_layout(projections, num_layers=layers, page_tokens=4, kv_heads=heads, head_dim=4)
    assert layout.page_width % layout.unit == 0
    for name, cut in layout.projections.items():
        for width, share in ((layout.in_width(name), cut.inputs[0]), (layout.out_width(name), cut.out[0])):
            held = layers * width if cut.spread else width
            assert held >= share[1] - share[0]
            assert cut.spread or held == share[1] - share[0]
