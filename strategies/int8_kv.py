"""Keys and values as int8: 127 stands for the largest magnitude of a token and head, whose scale lies in the same page.

They are rounded once, when they are written; whoever attends reads the integers and multiplies scores by the scales of
keys, and weights by those of values. Nothing makes an array of the numbers that they stand for.

Letters: L layers, P pages, W numbers of a page in one layer, G tokens of a page, K KV heads, H head dim, T packed
tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memory_pool.layout import PageLayout
from memory_pool.raw import recast

LARGEST = 127
_TINY = 1e-30
"""A row whose numbers are all below is one of zeros."""

_ROWS = lax.ScatterDimensionNumbers(
    update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
)
"""A part of a row of a matrix at (row, column) for each of [T, K]."""


class Int8Rows(NamedTuple):
    """Rows of numbers as integers.

    Attributes:
        ints: [..., H] int8, or as floats.
        scales: [...] float32; a number is its integer times the scale of its row.
    """

    ints: Any
    scales: Any


def quantize_rows(x: jax.Array) -> Int8Rows:
    """Rounds rows [..., H] to the nearest of 255 steps; a NaN or infinity makes the scale of its row one."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    factor = jnp.where(largest < _TINY, 0.0, LARGEST / largest)
    ints = jnp.round(wide * factor[..., None]).astype(jnp.int8)
    return Int8Rows(ints, largest * (1 / LARGEST))


def open_pages(parts: jax.Array, *, layout: PageLayout) -> Int8Rows:
    """Keys or values of heads in pages, as they lie: [..., head_width] raw to [..., G, H] and [..., G].

    Works near the data as well.
    """
    numbers = layout.page_tokens * layout.head_dim // layout.dtype.itemsize
    ints, scales = recast(parts[..., :numbers], jnp.int8), recast(parts[..., numbers:], jnp.float32)
    return Int8Rows(ints.reshape(*parts.shape[:-1], layout.page_tokens, layout.head_dim), scales)


def write_rows(
    pages_LPW: jax.Array,
    layer: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pages_T: jax.Array,
    offsets_T: jax.Array,
    *,
    layout: PageLayout,
) -> jax.Array:
    """The XLA version of `strategies.kv_write.write_kv` for int8; arguments as there."""
    heads, item = layout.kv_heads, layout.dtype.itemsize
    matrix = pages_LPW.reshape(-1, layout.page_width)
    row_TK = jnp.broadcast_to((layer * pages_LPW.shape[1] + pages_T)[:, None], k_TKH.shape[:2])
    offset_T1 = offsets_T[:, None]
    for part, new_TKH in enumerate((k_TKH, v_TKH)):
        first_K = (part * heads + jnp.arange(heads, dtype=jnp.int32)) * layout.head_width
        ints, scales = quantize_rows(new_TKH)
        for values, before in ((ints, 0), (scales[..., None], layout.page_tokens * layout.head_dim // item)):
            words = recast(values, pages_LPW.dtype)
            column_TK = first_K[None, :] + before + offset_T1 * words.shape[-1]
            at_TK2 = jnp.stack([row_TK, column_TK], axis=-1)
            matrix = lax.scatter(matrix, at_TK2, words, _ROWS, mode="promise_in_bounds")
    return matrix.reshape(pages_LPW.shape)
