"""Shrink and expand for projections outside the layers, whose rows are spread over the layers of a page.

Embedding and head are wide and there is one of each, so layer l of a page holds the l-th piece of a row
(`memory_pool.layout`). Shrink adds up what the layers give, in float32; expand sets side by side what they give. The
input of the embedding is token ids: its shrink is a look-up of one number of each row of A. All of it runs on the
device as well as near the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memory_pool.layout import PageLayout
from memory_pool.raw import from_raw
from strategies.lanes import Stripe
from strategies.low_rank import count_up, fill
from strategies.setting import LoraSetting

Shrink = Callable[..., jax.Array]
"""(x, pages [L, P, W], layer, lane, layout=, group=, max_rank=, out_dtype=) to [1, T, R], of one layer of the pages."""
Take = Callable[..., jax.Array]
"""(pages [L, P, W], layer [T, 1], page [T, R], place [T, R]) to [T, R] raw numbers."""
Expand = Callable[..., tuple[jax.Array, ...]]
"""(m [1, T, R], pages, layer, lane, layout=, group=) to ([T, width],), of one layer of the pages."""


def numbers(pages_LPW: jax.Array, layer: jax.Array, page: jax.Array, place: jax.Array) -> jax.Array:
    """Single numbers of pages, gathered where the pages are."""
    return pages_LPW.at[layer, page, place].get(mode="promise_in_bounds")


def lookup(
    tokens_T: jax.Array,
    pages_LPW: jax.Array,
    lane: Stripe,
    *,
    layout: PageLayout,
    name: str,
    max_rank: int,
    take: Take = numbers,
) -> jax.Array:
    """Number t of each row of A, for token t: shrink of a one-hot vector. Works near the data as well.

    Args:
        tokens_T: [T] int32, below the width of A.
        pages_LPW: [L, P, W] raw numbers.
        lane: tokens and adapters; only its `a_pages` are read.
        layout: where rows lie in an adapter's pages.
        name: of the projection, which is spread over the layers; its scale is the same in all of them.
        max_rank: R; no adapter has more components.
        take: gives the numbers.

    Returns:
        [T, R] in the dtype of the pages, scaled; 0 beyond the rank of a token's adapter and for tokens of the base.

    Cost:
        T * R numbers gathered.
    """
    index, per_page, together = layout.index(name), layout.units_per_page, layout.adapter_numbers
    unit = layout.unit * together
    owner_T, rank_R = jnp.maximum(lane.owner, 0), count_up(lane.owner, max_rank)
    starts_E = _of_projection(lane.ranks, index) * 0
    for before in range(index):
        starts_E = starts_E + _of_projection(lane.ranks, before) * layout.a_units[before]
    at_T = tokens_T % layout.in_width(name)
    unit_TR = (_take(starts_E, owner_T) + at_T // unit)[:, None] + rank_R[None, :] * layout.a_units[index]
    entry_TR = jnp.minimum(unit_TR // per_page, lane.a_pages.shape[1] - 1)
    page_TR = lane.a_pages.at[owner_T[:, None], entry_TR].get(mode="promise_in_bounds")
    layer_T1 = (tokens_T // layout.in_width(name))[:, None]
    place_TR = unit_TR % per_page * layout.unit + (at_T % unit // together)[:, None]
    raw_TR = take(pages_LPW, layer_T1, page_TR, place_TR)
    if together > 1:
        shift_T = (8 * (at_T % together)).astype(raw_TR.dtype)
        raw_TR = lax.shift_right_logical(raw_TR, jnp.broadcast_to(shift_T[:, None], raw_TR.shape)).astype(jnp.uint8)
    a_TR = from_raw(raw_TR, layout.adapter_dtype)
    own_TR = (lane.owner[:, None] >= 0) & (rank_R[None, :] < _take(_of_projection(lane.ranks, index), owner_T)[:, None])
    m_TR = a_TR.astype(jnp.float32) * _take(_of_projection(lane.scale[:, 0], index), owner_T)[:, None]
    return lax.select(own_TR, m_TR, fill(lane.owner, m_TR.shape, jnp.float32)).astype(layout.dtype)


def shrink_spread(
    x_TI: jax.Array, pages_LPW: jax.Array, lane: Stripe, *, setting: LoraSetting, shrink: Shrink
) -> jax.Array:
    """scale * (x A) for a projection whose rows are spread over the layers. Works near the data as well.

    Args:
        x_TI: [T, I].
        pages_LPW: [L, P, W] raw numbers; what rows do not fill of their last units is finite.
        lane: tokens and adapters.
        setting: its group is the projection.
        shrink: of one layer.

    Returns:
        [T, R] in the dtype of x; the sum over the layers is float32.
    """
    layout, (name,) = setting.layout, setting.group
    num_layers, width, num_tokens = layout.num_layers, layout.in_width(name), x_TI.shape[0]
    room = fill(lane.owner, (num_tokens, num_layers * width - x_TI.shape[1]), x_TI.dtype)
    x_TI = jnp.concatenate([x_TI, room], axis=1)
    x_LTI = x_TI.reshape(num_tokens, num_layers, width).transpose(1, 0, 2)

    def one(m_TR: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, x_TI = layer
        m_GTR = shrink(
            x_TI,
            pages_LPW,
            index,
            lane,
            layout=layout,
            group=setting.group,
            max_rank=setting.max_rank,
            out_dtype=jnp.float32,
        )
        return m_TR + m_GTR[0], None

    nothing = fill(lane.owner, (num_tokens, setting.max_rank), jnp.float32)
    return lax.scan(one, nothing, (count_up(lane.owner, num_layers), x_LTI))[0].astype(x_TI.dtype)


def expand_spread(
    m_TR: jax.Array,
    pages_LPW: jax.Array,
    lane: Stripe,
    *,
    setting: LoraSetting,
    expand: Expand,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """m B for a projection whose columns are spread over the layers. Works near the data as well.

    Args:
        m_TR: [T, R].
        pages_LPW: [L, P, W] raw numbers.
        lane: tokens and adapters.
        setting: its group is the projection.
        expand: of one layer.
        out_dtype: of the result; float32 by default.

    Returns:
        [T, O], the O of this shard.
    """
    layout = setting.layout
    m_GTR = m_TR[None]

    def one(nothing: None, layer: jax.Array) -> tuple[None, jax.Array]:
        (y_TO,) = expand(m_GTR, pages_LPW, layer, lane, layout=layout, group=setting.group)
        return nothing, y_TO.astype(out_dtype)

    y_LTO = lax.scan(one, None, count_up(lane.owner, layout.num_layers))[1]
    y_TO = y_LTO.transpose(1, 0, 2).reshape(m_TR.shape[0], -1)
    return lax.slice_in_dim(y_TO, 0, out_size(setting), axis=1)


def out_size(setting: LoraSetting) -> int:
    """O of a setting's one projection, on one shard."""
    (name,) = setting.group
    start, stop = setting.layout.projections[name].out[0]
    return stop - start


def _of_projection(table_EJ: jax.Array, index: int) -> jax.Array:
    return lax.index_in_dim(table_EJ, index, axis=1, keepdims=False)


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    return array.at[index].get(mode="promise_in_bounds")
