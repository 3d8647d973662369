"""One kind of page for KV and adapters, in the pool and on the device.

A page spans all layers: L rows of W raw numbers. A KV page holds keys and values of G tokens, [2, K, G, H] in each
layer. As int8 each head's keys, and its values, are G H bytes and then G scales of float32, as raw numbers too. An
adapter's pages hold rank components: one row of A is I numbers in each layer, one column of B is O. Rows are
laid end to end in units of U numbers, the largest size that divides every width, so nothing is padded to another
adapter's rank; only the last page of an adapter's A, and of its B, may have room left.

    A stream: for each projection in order, its rank rows of I / U units; B stream: its rank columns of O / U units.
    unit u of a stream lies in the stream's page u // (W / U), at number (u % (W / U)) * U of the layer's row.

Adapters as int8 (`memory_pool.int8_adapters`) lie the same way, as many of their numbers in a raw number as have room.

Projections outside the layers (embedding, head) are far wider than they are deep; their rows are spread over the L
layers of a page: row i takes ceil(width / L U) units, layer l holds the numbers from l * units * U on (U in numbers of
the adapter).

With tensor parallelism every width is that of one shard: page numbers are the same on all shards, contents differ.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

SCALE_BYTES = 4
"""Of the scale of one token and head, where keys and values are int8."""


class Cut(NamedTuple):
    """What each shard holds of a projection's matrices.

    Attributes:
        out: [start, stop) of B's O rows, one pair a shard; equal widths.
        inputs: [start, stop) of A's I columns, one pair a shard; equal widths.
        spread: outside the layers: rows are spread over the layers of a page.
    """

    out: tuple[tuple[int, int], ...]
    inputs: tuple[tuple[int, int], ...]
    spread: bool = False


def whole(size: tuple[int, int], *, spread: bool = False) -> Cut:
    """The cut of a projection (O, I) on one shard."""
    return Cut(((0, size[0]),), ((0, size[1]),), spread)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PageLayout:
    """Sizes of a page on one shard, and where rows lie in an adapter's pages.

    Attributes:
        num_layers: L.
        page_tokens: G.
        kv_heads: K of one shard.
        head_dim: H.
        projections: cuts by projection name; their order is that of the streams.
        dtype: of the numbers, which are kept as raw bits.
        int8_kv: keys and values are int8 with a scale a token and head; adapters are of `dtype` all the same.
        int8_adapters: the same of adapters, whose scales are those of their lane.
    """

    num_layers: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    projections: Mapping[str, Cut]
    dtype: np.dtype
    int8_kv: bool = False
    int8_adapters: bool = False

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Projections in the order of the streams; index J of lane tables."""
        return tuple(self.projections)

    @property
    def num_shards(self) -> int:
        return len(next(iter(self.projections.values())).out)

    @functools.cached_property
    def page_width(self) -> int:
        """W: numbers of a page in one layer."""
        return 2 * self.kv_heads * self.head_width

    @functools.cached_property
    def head_width(self) -> int:
        """Numbers of the keys, or of the values, of one head in one layer of a page."""
        if not self.int8_kv:
            return self.page_tokens * self.head_dim
        assert self.head_dim % self.dtype.itemsize == 0, self.head_dim
        return self.page_tokens * (self.head_dim + SCALE_BYTES) // self.dtype.itemsize

    @property
    def kv_item_bytes(self) -> float:
        """Bytes of a number of keys or values as it is kept, its part of a scale included."""
        return self.head_width * self.dtype.itemsize / (self.page_tokens * self.head_dim)

    @property
    def adapter_dtype(self) -> np.dtype:
        """Of the numbers of A and B."""
        return np.dtype(np.int8) if self.int8_adapters else self.dtype

    @property
    def adapter_numbers(self) -> int:
        """Numbers of A or B in a raw number."""
        return self.dtype.itemsize // self.adapter_dtype.itemsize

    @functools.cached_property
    def unit(self) -> int:
        """U: raw numbers of a unit."""
        widths = [s[1] - s[0] for c in self.projections.values() if not c.spread for s in (c.out[0], c.inputs[0])]
        assert all(width % self.adapter_numbers == 0 for width in widths), widths
        return math.gcd(self.page_width, *(width // self.adapter_numbers for width in widths))

    @functools.cached_property
    def units_per_page(self) -> int:
        return self.page_width // self.unit

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on one shard, all layers."""
        return self.num_layers * self.page_width * self.dtype.itemsize

    @functools.cached_property
    def a_units(self) -> tuple[int, ...]:
        """Units of one row of A, by projection."""
        return tuple(self._units(c.inputs[0], c.spread) for c in self.projections.values())

    @functools.cached_property
    def b_units(self) -> tuple[int, ...]:
        """Units of one column of B, by projection."""
        return tuple(self._units(c.out[0], c.spread) for c in self.projections.values())

    def index(self, name: str) -> int:
        """J of a projection."""
        return self.names.index(name)

    def in_width(self, name: str) -> int:
        """Numbers of a row of A in one layer of a page."""
        return self.a_units[self.index(name)] * self.unit * self.adapter_numbers

    def out_width(self, name: str) -> int:
        """Numbers of a column of B in one layer of a page."""
        return self.b_units[self.index(name)] * self.unit * self.adapter_numbers

    def a_pages(self, ranks: Sequence[int]) -> int:
        """Pages of A of an adapter with these ranks [J]."""
        return self._pages(ranks, self.a_units)

    def b_pages(self, ranks: Sequence[int]) -> int:
        """Pages of B of an adapter with these ranks [J]."""
        return self._pages(ranks, self.b_units)

    def _units(self, share: tuple[int, int], spread: bool) -> int:
        width, unit = share[1] - share[0], self.unit * self.adapter_numbers
        return -(-width // (self.num_layers * unit)) if spread else width // unit

    def _pages(self, ranks: Sequence[int], units: tuple[int, ...]) -> int:
        return -(-sum(r * u for r, u in zip(ranks, units, strict=True)) // self.units_per_page)
