"""Random adapters packed into pages, beside the same numbers as plain matrices; for the tests of several floors.

    layout = make_layout(widths={"q": (24, 16), "k": (8, 16)})
    packed = pack_adapters(rng, layout, ranks=[[4, 0], [70, 3]])         # ranks [E, J]
    lane = packed.lane(owner=[0, BASE, 1])                               # a Stripe of numpy arrays
    kernel(x, packed.pages, layer, lane, layout=layout, group=("q", "k"), ...)
    want = packed.delta(x, layer, lane.owner, "q")                       # float64

Pages are scattered over the memory in no order, page 0 is reserved, and pages that belong to nobody hold NaN, so that a
kernel that reads a wrong page is seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from memory_pool.layout import PageLayout, whole
from memory_pool.raw import raw_dtype
from strategies.lanes import BASE, Stripe

Matrices = list[dict[str, np.ndarray]]


def make_layout(
    *,
    widths: Mapping[str, tuple[int, int]],
    spread: Sequence[str] = (),
    num_layers: int = 2,
    page_tokens: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: str = "float32",
    int8_kv: bool = False,
    int8_adapters: bool = False,
) -> PageLayout:
    """A layout on one shard; `widths` are (O, I) by projection, those in `spread` lie outside the layers."""
    cuts = {name: whole(size, spread=name in spread) for name, size in widths.items()}
    return PageLayout(
        num_layers=num_layers,
        page_tokens=page_tokens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        projections=cuts,
        dtype=np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype),
        int8_kv=int8_kv,
        int8_adapters=int8_adapters,
    )


def int8_parts(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [..., H] as int8 and their scales [...] float32, in plain numpy; as strategies.int8_kv, but for NaN."""
    wide = numbers.astype(np.float32)
    largest = np.abs(wide).max(axis=-1)
    factor = np.where(largest == 0, np.float32(0), np.float32(127) / np.where(largest == 0, np.float32(1), largest))
    with np.errstate(invalid="ignore"):
        ints = np.round(wide * factor[..., None]).astype(np.int8)
    return ints, largest * np.float32(1 / 127)


def int8_pages(numbers: np.ndarray, layout: PageLayout) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [..., 2, K, G, H] as pages [..., W] raw, and what they stand for, [..., 2, K, G, H] float32."""
    ints, scales = int8_parts(numbers)
    parts = [ints.reshape(*ints.shape[:-2], -1).view(np.uint8), np.ascontiguousarray(scales).view(np.uint8)]
    pages = np.concatenate(parts, axis=-1).reshape(*numbers.shape[:-4], -1)
    return pages.view(raw_dtype(layout.dtype)), ints.astype(np.float32) * scales[..., None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedAdapters:
    """Adapters in pages.

    Attributes:
        layout: of the pages.
        pages: [L, P, W] raw numbers, numpy.
        ranks: [E, J] int32.
        scale: [E, L, J] float32.
        a_pages: [E, MA] int32, padded with 0.
        b_pages: [E, MB] int32, padded with 0.
        a: by adapter and projection, [L, rank, in_width] float64: the numbers of each layer of the pages.
        b: by adapter and projection, [L, rank, out_width] float64.
    """

    layout: PageLayout
    pages: np.ndarray
    ranks: np.ndarray
    scale: np.ndarray
    a_pages: np.ndarray
    b_pages: np.ndarray
    a: Matrices
    b: Matrices

    def lane(self, owner: Sequence[int] | np.ndarray) -> Stripe:
        """The lane of tokens with these owners, [T] indices of adapters or BASE."""
        return Stripe(
            owner=np.asarray(owner, np.int32),
            count=np.int32(len(self.a)),
            ranks=self.ranks,
            scale=self.scale,
            a_pages=self.a_pages,
            b_pages=self.b_pages,
        )

    def shrink(self, x: np.ndarray, layer: int, owner: np.ndarray, name: str, *, max_rank: int) -> np.ndarray:
        """[T, max_rank] float64 in plain numpy."""
        m = np.zeros((len(x), max_rank))
        for t, e in enumerate(owner):
            if e != BASE:
                a = self.a[e][name][layer]
                m[t, : len(a)] = self.scale[e, layer, self.layout.index(name)] * (a @ x[t].astype(np.float64))
        return m

    def expand(self, m: np.ndarray, layer: int, owner: np.ndarray, name: str) -> np.ndarray:
        """[T, out_width] float64 in plain numpy."""
        y = np.zeros((len(m), self.layout.out_width(name)))
        for t, e in enumerate(owner):
            if e != BASE:
                b = self.b[e][name][layer]
                y[t] = m[t, : len(b)].astype(np.float64) @ b
        return y

    def delta(self, x: np.ndarray, layer: int, owner: np.ndarray, name: str) -> np.ndarray:
        """[T, out_width] float64 in plain numpy, not rounded between shrink and expand."""
        max_rank = max(1, int(self.ranks.max(initial=0)))
        return self.expand(self.shrink(x, layer, owner, name, max_rank=max_rank), layer, owner, name)


def pack_adapters(
    rng: np.random.Generator,
    layout: PageLayout,
    *,
    ranks: Sequence[Sequence[int]],
    room: int | None = None,
    max_rank: int | None = None,
) -> PackedAdapters:
    """Random adapters of the given ranks in scattered pages.

    Args:
        rng: of everything.
        layout: of the pages.
        ranks: [E, J], 0 where an adapter leaves a projection alone.
        room: entries of the tables; by default E, at least 1. More than E are empty.
        max_rank: sizes of tables and pages are those of `room` adapters of this rank, so that one compiled program
            serves all cases; by default they are those of the ranks given.
    """
    table = np.zeros((room or max(1, len(ranks)), len(layout.names)), np.int32)
    for entry, of_adapter in zip(table, ranks, strict=False):
        entry[:] = of_adapter
    scale = rng.uniform(0.5, 2, (len(table), layout.num_layers, len(layout.names))).astype(np.float32)
    step = 40 if layout.int8_adapters else 1  # integers up to some 127
    scale /= step**2

    def numbers(rank: int, width: int) -> np.ndarray:
        wide = rng.normal(0, step, (layout.num_layers, rank, width))
        return (wide.clip(-127, 127) if layout.int8_adapters else wide).astype(layout.adapter_dtype)

    a, b = (
        [
            {name: numbers(r, width(name)) for name, r in zip(layout.names, of_adapter, strict=True)}
            for of_adapter in ranks
        ]
        for width in (layout.in_width, layout.out_width)
    )
    counts_a = [layout.a_pages(of_adapter) for of_adapter in table]
    counts_b = [layout.b_pages(of_adapter) for of_adapter in table]
    most = [max_rank or int(table.max(initial=0))] * len(layout.names)
    most_a, most_b = max(1, layout.a_pages(most)), max(1, layout.b_pages(most))
    num_pages = 4 + (len(table) * (most_a + most_b) if max_rank else sum(counts_a) + sum(counts_b))
    free = list(rng.permutation(np.arange(1, num_pages)))
    pages = np.full((layout.num_layers, num_pages, layout.page_width), np.nan, layout.dtype)
    a_pages = _pack(pages, layout, a, counts_a, free, most_a)
    b_pages = _pack(pages, layout, b, counts_b, free, most_b)
    wide = [[{name: m.astype(np.float64) for name, m in one.items()} for one in side] for side in (a, b)]
    return PackedAdapters(
        layout=layout,
        pages=pages.view(raw_dtype(layout.dtype)),
        ranks=table,
        scale=scale,
        a_pages=a_pages,
        b_pages=b_pages,
        a=wide[0],
        b=wide[1],
    )


def _pack(
    pages: np.ndarray, layout: PageLayout, side: Matrices, counts: list[int], free: list[int], most: int
) -> np.ndarray:
    tables = np.zeros((len(counts), most), np.int32)
    numbers = pages.view(layout.adapter_dtype)
    width = numbers.shape[-1]
    for e, matrices in enumerate(side):
        stream = np.concatenate([m.reshape(layout.num_layers, -1) for m in matrices.values()], axis=1)
        for i in range(counts[e]):
            tables[e, i] = free.pop()
            piece = stream[:, i * width : (i + 1) * width]
            numbers[:, tables[e, i], : piece.shape[1]] = piece
    return tables
