"""Writes keys and values of a step's tokens into their pages, in place; the XLA version is the reference.

XLA on the CPU scatters row by row, which takes eight times as long in a prefill step.

Letters: L layers, P pages, W numbers of a page in one layer, [2, K, G, H] or as int8 (`strategies.int8_kv`), G tokens
of a page, K KV heads, H head dim, T packed tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from memory_pool.layout import PageLayout
from memory_pool.raw import to_raw
from strategies import int8_kv, native
from strategies.rowwise import native_serves


class KvWrite(NamedTuple):
    """Where the step's keys and values go: page and offset of each token, [T] int32; page 0 for padding."""

    pages: Any
    offsets: Any


def write_kv(
    pages_LPW: jax.Array,
    layer: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    where: KvWrite,
    *,
    layout: PageLayout,
    used: jax.Array | None = None,
) -> jax.Array:
    """Writes the step's keys and values of one layer into their pages, in place when the pages are donated.

    Args:
        pages_LPW: raw numbers.
        layer: [] int32.
        k_TKH, v_TKH: of the dtype of the layout, or float32, which is first rounded to it; for int8 pages it is not.
        where: page and offset of each token; of tokens that go to one place the last stays.
        layout: of pages.
        used: [] int32, how many of the tokens there are; the others may be written or not. None for all.

    Returns:
        The pages.
    """
    of_kernel = (layout.dtype, np.float32) if layout.dtype == jnp.bfloat16 else (layout.dtype,)
    if k_TKH.dtype in of_kernel and v_TKH.dtype in of_kernel and native_serves():
        return native.write_kv(
            pages_LPW,
            layer,
            k_TKH,
            v_TKH,
            pages_T=where.pages,
            offsets_T=where.offsets,
            used=used,
            layout=layout,
        )
    return xla_write_kv(pages_LPW, layer, k_TKH, v_TKH, where, layout=layout)


def xla_write_kv(
    pages_LPW: jax.Array, layer: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, where: KvWrite, *, layout: PageLayout
) -> jax.Array:
    """The reference of `write_kv`."""
    if layout.int8_kv:
        return int8_kv.write_rows(pages_LPW, layer, k_TKH, v_TKH, where.pages, where.offsets, layout=layout)
    num_pages, heads, tokens = pages_LPW.shape[1], layout.kv_heads, layout.page_tokens
    # The index is made flat so that one token of one head is one contiguous row.
    rows = pages_LPW.reshape(-1, layout.head_dim)
    first_T = (layer * num_pages + where.pages) * 2
    head_K = jnp.arange(heads, dtype=jnp.int32)
    for part, new_TKH in enumerate((k_TKH, v_TKH)):
        index_TK = ((first_T + part)[:, None] * heads + head_K) * tokens + where.offsets[:, None]
        rows = rows.at[index_TK].set(to_raw(new_TKH.astype(layout.dtype)), mode="promise_in_bounds")
    return rows.reshape(pages_LPW.shape)
