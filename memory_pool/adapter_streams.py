"""An adapter's matrices as pages: the A stream and the B stream of `memory_pool.layout`, in numpy.

A projection has the largest rank that any layer has of it; where a layer has less, the rest of its rows are zeros. Over
S pool devices rank component c of every projection lies on device c mod S, so each has a pair of streams of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from memory_pool.layout import PageLayout
from memory_pool.raw import raw_dtype

OUTSIDE = -1
"""Layer of a projection outside the layers."""


class Matrices(Protocol):
    """One low-rank change: a [R, I], b [O, R], and the factor on their product."""

    @property
    def a(self) -> np.ndarray: ...
    @property
    def b(self) -> np.ndarray: ...
    @property
    def scale(self) -> float: ...


Modules = Mapping[Any, Matrices]
"""Matrices by (layer, projection); the layer of a spread projection is OUTSIDE."""


class AdapterFacts(NamedTuple):
    """Sums over the modules of an adapter inside the layers, on one shard: what useful bytes are made of.

    Attributes:
        inputs: I, over layers and those groups of projections with one input that have a module there.
        outputs: O, over modules.
        ranks: R, over modules.
        a_numbers: R * I, over modules.
        b_numbers: R * O, over modules.
    """

    inputs: int
    outputs: int
    ranks: int
    a_numbers: int
    b_numbers: int


def stripe_ranks(modules: Modules, layout: PageLayout, stripes: int) -> np.ndarray:
    """Rank components of each projection by stripe: [S, J] int32."""
    ranks = np.zeros(len(layout.names), np.int32)
    for (_, name), m in modules.items():
        ranks[layout.index(name)] = max(ranks[layout.index(name)], len(m.a))
    return np.stack([share_of(ranks, stripe, stripes) for stripe in range(stripes)])


def share_of(ranks: np.ndarray, stripe: int, stripes: int) -> np.ndarray:
    """How many of `ranks` components lie on a stripe."""
    return -((stripe - ranks) // stripes)


def scales(modules: Modules, layout: PageLayout) -> np.ndarray:
    """Factors [L, J] float32, 0 without a module; a spread projection has its factor in every layer."""
    table = np.zeros((layout.num_layers, len(layout.names)), np.float32)
    for (layer, name), m in modules.items():
        table[slice(None) if layer == OUTSIDE else layer, layout.index(name)] = m.scale
    return table


def facts(modules: Modules, layout: PageLayout, groups: Sequence[tuple[str, ...]]) -> AdapterFacts:
    """What `AdapterFacts` says of an adapter.

    Args:
        modules: its matrices.
        layout: of a page on one shard.
        groups: projections that share an input; one that is in none has an input of its own.
    """
    group_of = {name: group for group in groups for name in group}
    inputs, sums = {}, np.zeros(4, np.int64)
    for (layer, name), m in modules.items():
        if layer != OUTSIDE:
            cut, rank = layout.projections[name], len(m.a)
            width_in, width_out = (stop - start for start, stop in (cut.inputs[0], cut.out[0]))
            inputs[layer, group_of.get(name, name)] = width_in
            sums += (width_out, rank, rank * width_in, rank * width_out)
    return AdapterFacts(sum(inputs.values()), *sums.tolist())


def true_numbers(modules: Modules, layout: PageLayout) -> tuple[int, int]:
    """Numbers of A and of B on one shard without any padding, spread projections included."""
    a = b = 0
    for (_, name), m in modules.items():
        cut, rank = layout.projections[name], len(m.a)
        a += rank * (cut.inputs[0][1] - cut.inputs[0][0])
        b += rank * (cut.out[0][1] - cut.out[0][0])
    return a, b


def pack(modules: Modules, layout: PageLayout, ranks: np.ndarray, *, stripe: int = 0, stripes: int = 1) -> np.ndarray:
    """The pages of one stripe of an adapter.

    Args:
        modules: its matrices, in integers where the layout keeps adapters as int8.
        layout: of a page on one shard.
        ranks: [J] rank components of this stripe.
        stripe: which one.
        stripes: S.

    Returns:
        [n L, pages, W] raw bits for n shards: the pages of A, then those of B.
    """
    counts = layout.a_pages(ranks.tolist()), layout.b_pages(ranks.tolist())
    pages = np.zeros((layout.num_shards, layout.num_layers, sum(counts) * layout.page_width), raw_dtype(layout.dtype))
    numbers = pages.view(raw_dtype(layout.adapter_dtype))
    b_start = counts[0] * layout.page_width * layout.adapter_numbers
    a_blocks = dict(_blocks(numbers, layout, ranks, units=layout.a_units, start=0))
    b_blocks = dict(_blocks(numbers, layout, ranks, units=layout.b_units, start=b_start))
    for (layer, name), m in modules.items():
        cut = layout.projections[name]
        for blocks, rows, shares in (
            (a_blocks, _raw(m.a, layout)[stripe::stripes], cut.inputs),
            (b_blocks, _raw(m.b, layout).T[stripe::stripes], cut.out),
        ):
            for block, (start, stop) in zip(blocks[name], shares, strict=True):
                _write_rows(block, rows[:, start:stop], layer)
    return pages.reshape(layout.num_shards * layout.num_layers, sum(counts), layout.page_width)


def _blocks(
    numbers: np.ndarray, layout: PageLayout, ranks: np.ndarray, *, units: tuple[int, ...], start: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Views [n, L, R, width] of each projection's rows in a stream that starts at number `start`."""
    for name, rank, count in zip(layout.names, ranks.tolist(), units, strict=True):
        width = count * layout.unit * layout.adapter_numbers
        yield name, numbers[..., start : start + rank * width].reshape(*numbers.shape[:2], rank, width)
        start += rank * width


def _write_rows(block_LRW: np.ndarray, rows: np.ndarray, layer: int) -> None:
    if layer != OUTSIDE:
        block_LRW[layer, : len(rows)] = rows
        return
    layers, _, width = block_LRW.shape
    padded = np.zeros((len(rows), layers * width), rows.dtype)
    padded[:, : rows.shape[1]] = rows
    block_LRW[:, : len(rows)] = padded.reshape(len(rows), layers, width).swapaxes(0, 1)


def _raw(matrix: np.ndarray, layout: PageLayout) -> np.ndarray:
    dtype = layout.adapter_dtype
    return np.ascontiguousarray(matrix).astype(dtype, copy=False).view(raw_dtype(dtype))
