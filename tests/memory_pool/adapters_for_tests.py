"""Random adapters on a tiny layout, and the way back from pages to matrices."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from memory_pool.adapter_streams import OUTSIDE
from memory_pool.layout import Cut, PageLayout, whole

LAYERS = 3
SIZES = {"q": (8, 12), "o": (12, 8), "embed": (12, 50), "head": (50, 12)}
GROUPS = (("q",), ("o",))


class Matrices(NamedTuple):
    a: np.ndarray
    b: np.ndarray
    scale: float


class Adapter(NamedTuple):
    identity: int
    modules: dict


@functools.cache
def make_layout(shards=1, dtype="float32"):
    cuts = {
        1: {name: whole(size, spread=name in ("embed", "head")) for name, size in SIZES.items()},
        2: {
            "q": Cut(((0, 4), (4, 8)), ((0, 12), (0, 12))),
            "o": Cut(((0, 12), (0, 12)), ((0, 4), (4, 8))),
            "embed": Cut(((0, 12), (0, 12)), ((0, 50), (0, 50)), spread=True),
            "head": Cut(((0, 25), (25, 50)), ((0, 12), (0, 12)), spread=True),
        },
    }[shards]
    return PageLayout(num_layers=LAYERS, page_tokens=4, kv_heads=1, head_dim=4, projections=cuts, dtype=np.dtype(dtype))


def make_adapter(identity, ranks):
    """`ranks`: rank by (layer, projection)."""
    rng = np.random.default_rng(identity)
    modules = {}
    for key, rank in ranks.items():
        width_out, width_in = SIZES[key[1]]
        a, b = rng.normal(size=(rank, width_in)), rng.normal(size=(width_out, rank))
        modules[key] = Matrices(a.astype(np.float32), b.astype(np.float32), 0.5 + len(modules))
    return Adapter(identity, modules)


def random_ranks(rng, most):
    """Some modules of some layers, with ranks of 1 to `most`."""
    keys = [(layer, name) for name in ("q", "o") for layer in range(LAYERS)] + [(OUTSIDE, "embed"), (OUTSIDE, "head")]
    return {key: int(rng.integers(1, most + 1)) for key in keys if rng.random() < 0.7}


def matrices_in(pages, layout, placed, *, side, shard):
    """What the tables of an adapter say a shard has of A, or of B transposed: [rank, width] by (layer, projection).

    Args:
        pages: [n L, P, W] raw bits.
        placed: its ranks and page tables.
        side: "a" or "b".
        shard: which one.
    """
    stripes = len(placed.ranks)
    tables, units = (placed.a_pages, layout.a_units) if side == "a" else (placed.b_pages, layout.b_units)
    mine = np.asarray(pages)[shard * LAYERS : (shard + 1) * LAYERS].view(layout.dtype)
    found = {}
    for stripe, table in enumerate(tables):
        stream = mine[:, table].reshape(LAYERS, len(table) * layout.page_width)
        start = 0
        for j, name in enumerate(layout.names):
            rank, width = int(placed.ranks[stripe, j]), units[j] * layout.unit
            rows = stream[:, start : start + rank * width].reshape(LAYERS, rank, width)
            start += rank * width
            total = int(placed.ranks[:, j].sum())
            cut = layout.projections[name]
            first, last = (cut.inputs if side == "a" else cut.out)[shard]
            if cut.spread:
                spread = rows.swapaxes(0, 1).reshape(rank, LAYERS * width)[:, : last - first]
                found.setdefault((OUTSIDE, name), np.zeros((total, last - first)))[stripe::stripes] = spread
            for layer in range(0 if cut.spread else LAYERS):
                found.setdefault((layer, name), np.zeros((total, last - first)))[stripe::stripes] = rows[layer]
    return found


def check_matrices(found, modules, layout, *, side, shard):
    """Asserts that the matrices found are those of the modules, and zeros where there is no module."""
    for (layer, name), rows in found.items():
        cut = layout.projections[name]
        first, last = (cut.inputs if side == "a" else cut.out)[shard]
        want = np.zeros_like(rows)
        if (layer, name) in modules:
            m = modules[layer, name]
            matrix = m.a if side == "a" else m.b.T
            want[: len(matrix)] = matrix[:, first:last]
        np.testing.assert_array_equal(rows, want, err_msg=f"{side} of {name} in layer {layer}")
    assert set(modules) <= set(found)
