"""The native kernels as JAX functions, with the contracts of the XLA versions.

They run on the device and near the data: results are in the memory space of the pages. bfloat16 goes in and out as it
is: XLA on the CPU makes a bitcast to raw numbers a pass of its own over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from memory_pool.layout import PageLayout
from strategies import paged_attention
from strategies.lanes import AttentionLane, Stripe
from strategies.low_rank import CHUNK_ROWS, fill
from strategies.paged_attention import HeadMaths, Partial

_TILE_SIDE, _TILE_INPUTS = 16, 32


def shrink(
    x_TI: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: Stripe,
    *,
    layout: PageLayout,
    group: tuple[str, ...],
    max_rank: int,
    out_dtype: Any = None,
    on_tiles: bool = False,
) -> jax.Array:
    """As strategies.low_rank.shrink; with `on_tiles` on the processor's matrix unit, where dtypes and widths fit it.

    Cost:
        Reads each rank component in use once, whatever the number of tokens.
    """
    on_tiles = on_tiles and _fits_tiles(x_TI, pages_LPW, inputs=_width_of(layout.in_width, group))
    result = _like(pages_LPW, (len(group), x_TI.shape[0], max_rank), out_dtype or x_TI.dtype)
    return jax.ffi.ffi_call("plora_tile_shrink" if on_tiles else "plora_shrink", result)(
        _checked(x_TI),
        pages_LPW,
        layer,
        lane.owner,
        lane.ranks,
        lane.scale,
        lane.a_pages,
        group=_indices(layout, group),
        int8=layout.int8_adapters,
        a_widths=_widths(layout, layout.in_width),
    )


def expand(
    m_GTR: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: Stripe,
    *,
    layout: PageLayout,
    group: tuple[str, ...],
    on_tiles: bool = False,
) -> tuple[jax.Array, ...]:
    """As strategies.low_rank.expand; with `on_tiles` on the processor's matrix unit, where dtypes and widths fit it.

    Cost:
        Reads each rank component in use once, whatever the number of tokens.
    """
    on_tiles = on_tiles and _fits_tiles(m_GTR, pages_LPW, outputs=_width_of(layout.out_width, group))
    target = "plora_tile_expand" if on_tiles else "plora_expand"
    call = jax.ffi.ffi_call(target, _deltas(pages_LPW, m_GTR.shape[1], layout, group))
    return tuple(
        call(
            _checked(m_GTR),
            pages_LPW,
            layer,
            lane.owner,
            lane.ranks,
            lane.b_pages,
            group=_indices(layout, group),
            int8=layout.int8_adapters,
            b_widths=_widths(layout, layout.out_width),
        )
    )


def delta(
    x_TI: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: Stripe,
    *,
    layout: PageLayout,
    group: tuple[str, ...],
    max_rank: int,
    out_dtype: Any = None,
    on_tiles: bool = False,
) -> tuple[jax.Array, ...]:
    """As strategies.low_rank.delta; with `on_tiles` on the processor's matrix unit, where dtypes and widths fit it.

    Cost:
        Reads each rank component in use once, whatever the number of tokens.
    """
    widths = {"inputs": _width_of(layout.in_width, group), "outputs": _width_of(layout.out_width, group)}
    on_tiles = on_tiles and _fits_tiles(x_TI, pages_LPW, **widths)
    target = "plora_tile_delta" if on_tiles else "plora_delta"
    call = jax.ffi.ffi_call(target, _deltas(pages_LPW, x_TI.shape[0], layout, group, dtype=out_dtype))
    return tuple(
        call(
            _checked(x_TI),
            pages_LPW,
            layer,
            lane.owner,
            lane.ranks,
            lane.scale,
            lane.a_pages,
            lane.b_pages,
            group=_indices(layout, group),
            int8=layout.int8_adapters,
            a_widths=_widths(layout, layout.in_width),
            b_widths=_widths(layout, layout.out_width),
            max_rank=np.int64(max_rank),
        )
    )


def add(
    sums: Sequence[jax.Array],
    x_NI: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: Stripe,
    *,
    layout: PageLayout,
    group: tuple[str, ...],
    max_rank: int,
    first: int = 0,
    on_tiles: bool = False,
) -> tuple[jax.Array, ...]:
    """As strategies.low_rank.add, in place; with `on_tiles` as `delta`.

    Products are added to a sum one by one, or some together, in the order of the rank components, so the last bits are
    not those of `delta` added to the sum.

    Cost:
        Reads each rank component in use once; reads and writes the rows of tokens that have an adapter.
    """
    widths = {"inputs": _width_of(layout.in_width, group), "outputs": _width_of(layout.out_width, group)}
    on_tiles = on_tiles and _fits_tiles(x_NI, pages_LPW, **widths)
    operands = (_checked(x_NI), pages_LPW, layer, lane.owner, lane.ranks, lane.scale, lane.a_pages, lane.b_pages)
    call = jax.ffi.ffi_call(
        "plora_tile_add" if on_tiles else "plora_add",
        [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in sums],
        input_output_aliases={len(operands) + i: i for i in range(len(sums))},
    )
    return tuple(
        call(
            *operands,
            *sums,
            group=_indices(layout, group),
            int8=layout.int8_adapters,
            a_widths=_widths(layout, layout.in_width),
            b_widths=_widths(layout, layout.out_width),
            max_rank=np.int64(max_rank),
            first=np.int64(first),
        )
    )


def rows(
    pages_LPW: jax.Array, layer: jax.Array, lane: Stripe, chunk: jax.Array, *, layout: PageLayout, name: str, side: str
) -> jax.Array:
    """As strategies.low_rank.rows; zeros beyond the last component."""
    units, tables_EM = (layout.a_units, lane.a_pages) if side == "a" else (layout.b_units, lane.b_pages)
    index = layout.index(name)
    result = _like(pages_LPW, (CHUNK_ROWS, units[index] * layout.unit), pages_LPW.dtype)
    return jax.ffi.ffi_call("plora_rows", result)(
        pages_LPW,
        layer,
        lane.ranks,
        tables_EM,
        chunk,
        widths=np.array(units, np.int32) * np.int32(layout.unit),
        projection=np.int32(index),
    )


def partial_attention(
    q_NKSH: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: AttentionLane,
    maths: HeadMaths,
    *,
    layout: PageLayout,
) -> Partial:
    """As strategies.paged_attention.partial_attention.

    Weights are rounded to bfloat16 where queries and pages are bfloat16 and heads whole vectors; else not at all. On a
    processor with a matrix unit for bfloat16 it multiplies groups of more than four rows a head. The integers of int8
    pages are multiplied as numbers of the pages' width, which hold them exactly.

    Cost:
        Reads each page that a group sees once.
    """
    shape = q_NKSH.shape[:3]
    results = [_like(pages_LPW, s, jnp.float32) for s in (q_NKSH.shape, shape, shape)]
    window = maths.window
    if not isinstance(window, jax.Array):
        window = fill(lane.tables, (1,), jnp.int32, window)
    target = "plora_int8_partial_attention" if layout.int8_kv else "plora_partial_attention"
    return Partial(
        *jax.ffi.ffi_call(target, results)(
            _checked(q_NKSH),
            pages_LPW,
            layer,
            lane.tables,
            lane.positions,
            window,
            scale=np.float32(maths.scale),
            cap=np.float32(maths.soft_cap or 0.0),
            page_tokens=np.int32(layout.page_tokens),
        )
    )


def block_attention(
    q_NKSH: jax.Array,
    pages_LPW: jax.Array,
    layer: jax.Array,
    lane: AttentionLane,
    maths: HeadMaths,
    *,
    layout: PageLayout,
) -> Partial:
    """As strategies.paged_attention.partial_attention, for many rows a head: by XLA where the unit cannot serve."""
    fits = q_NKSH.dtype == jnp.bfloat16 and pages_LPW.dtype == jnp.uint16
    fits &= q_NKSH.shape[-1] % _TILE_INPUTS == 0 and layout.page_tokens % _TILE_SIDE == 0
    attend = partial_attention if fits else paged_attention.partial_attention
    return attend(q_NKSH, pages_LPW, layer, lane, maths, layout=layout)


def products(
    x_TI: jax.Array, tiles: Sequence[jax.Array], layer: jax.Array, *, used: jax.Array | None
) -> tuple[jax.Array, ...]:
    """x times base weights that share it, on the processor's matrix unit.

    Args:
        x_TI: [T, I] bfloat16.
        tiles: [L, O / 16, I / 32, 512] uint16 each, as `strategies.products.pack` leaves them.
        layer: [] int32.
        used: [] int32, how many rows to multiply; None for all.

    Returns:
        [T, O] float32 for each, 0 for the rows that are not used; an element depends on its row and weights alone.

    Cost:
        Reads each weight once, whatever the number of rows.
    """
    results = [jax.ShapeDtypeStruct((x_TI.shape[0], w.shape[1] * 16), jnp.float32) for w in tiles]
    used = jnp.int32(x_TI.shape[0]) if used is None else used
    return tuple(jax.ffi.ffi_call("plora_products", results)(layer, used, x_TI, *tiles))


def int8_products(
    x_TI: jax.Array,
    weights: Sequence[tuple[jax.Array, jax.Array]],
    layer: jax.Array,
    *,
    largest_T: jax.Array | None,
    used: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """As strategies.quantized.xla_products, with the same bits, on the processor's matrix unit.

    Args:
        x_TI: [T, I] bfloat16 or float32.
        weights: tiles [L, O / 16, I / 64, 1024] int8 and scales [L, O] float32 each, as `strategies.quantized.quantize`
            leaves them.
        layer: [] int32.
        largest_T: [T] float32, the magnitude that a row's integers are scaled by; None for that of the row.
        used: [] int32, how many rows to multiply; None for all.

    Returns:
        [T, O] float32 for each, 0 for the rows that are not used.

    Cost:
        Reads each weight once from memory, whatever the number of rows.
    """
    results = [jax.ShapeDtypeStruct((x_TI.shape[0], tiles.shape[1] * 16), jnp.float32) for tiles, _ in weights]
    largest = jnp.zeros((0,), jnp.float32) if largest_T is None else largest_T
    operands = [operand for pair in weights for operand in pair]
    used = jnp.int32(x_TI.shape[0]) if used is None else used
    return tuple(jax.ffi.ffi_call("plora_int8_products", results)(layer, used, _checked(x_TI), largest, *operands))


def block_products(
    x_TI: jax.Array, tiles: Sequence[jax.Array], layer: jax.Array, *, used: jax.Array | None
) -> tuple[jax.Array, ...]:
    """As strategies.block_weights.xla_products, of weights in tiles, by products of 8-bit integers.

    Args:
        x_TI: [T, I] bfloat16 or float32.
        tiles: [L, O / 16, I / 32, 320] uint8 each, as `strategies.block_weights.pack` leaves them.
        layer: [] int32.
        used: [] int32, how many rows to multiply; None for all.

    Returns:
        [T, O] float32 for each, 0 for the rows that are not used; an element depends on its row and weights alone.

    Cost:
        Reads each weight once from memory, whatever the number of rows.
    """
    results = [jax.ShapeDtypeStruct((x_TI.shape[0], w.shape[1] * 16), jnp.float32) for w in tiles]
    used = jnp.int32(x_TI.shape[0]) if used is None else used
    return tuple(jax.ffi.ffi_call("plora_block_products", results)(layer, used, _checked(x_TI), *tiles))


def _like(pages_LPW: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result in the memory space of the pages."""
    of_pages = jax.typeof(pages_LPW)
    sharding = of_pages.sharding.update(spec=PartitionSpec(*(None for _ in shape)))
    return of_pages.update(shape=tuple(shape), dtype=np.dtype(dtype), sharding=sharding)


def _deltas(
    pages_LPW: jax.Array, tokens: int, layout: PageLayout, group: tuple[str, ...], *, dtype: Any = None
) -> list[Any]:
    return [_like(pages_LPW, (tokens, layout.out_width(name)), dtype or jnp.float32) for name in group]


def _width_of(width: Callable[[str], int], group: tuple[str, ...]) -> int:
    """What divides the widths of all projections of a group."""
    return math.gcd(*map(width, group))


def _fits_tiles(rows: jax.Array, pages_LPW: jax.Array, *, inputs: int = 0, outputs: int = 0) -> bool:
    """Whether bfloat16 rows and pages with these widths, or multiples of them, are whole tiles."""
    fits = rows.dtype == jnp.bfloat16 and pages_LPW.dtype == jnp.uint16
    return fits and inputs % _TILE_INPUTS == 0 and outputs % _TILE_SIDE == 0


def _checked(array: jax.Array) -> jax.Array:
    if array.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(
            f"the native kernels take bfloat16 and float32, not {array.dtype}: cast it, or set PLORA_NATIVE=0"
        )
    return array


def _indices(layout: PageLayout, group: tuple[str, ...]) -> np.ndarray:
    return np.array([layout.index(name) for name in group], np.int32)


def _widths(layout: PageLayout, width: Callable[[str], int]) -> np.ndarray:
    return np.array([width(name) for name in layout.names], np.int32)
