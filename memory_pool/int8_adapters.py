"""Adapters as int8: half the bytes of bfloat16 in the pool, over the link and in every step.

A rank component is the product of a row of A and a column of B, so what a row is divided by its column may be
multiplied with. Each row of A is scaled to whole steps of its own, its scale goes to its column of B, and one scale is
left for all of B: it joins the factor of the module, which lanes carry anyway. A component that is small beside the
others of its module gets few steps, and its part of the result is as small.

Letters: R rank components, I in, O out.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from memory_pool.adapter_streams import Matrices, Modules

LARGEST = 127
_TINY = 1e-30
"""Numbers that are all below are zeros."""


@dataclasses.dataclass(frozen=True)
class Int8Matrices:
    """One low-rank change in integers.

    Attributes:
        a: [R, I] int8.
        b: [O, R] int8.
        scale: the factor on their product; NaN where a number was NaN or infinite.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float


def quantize_modules(modules: Modules) -> dict:
    """An adapter's matrices in integers, under the same keys."""
    return {key: quantize_matrices(m) for key, m in modules.items()}


def quantize_matrices(m: Matrices) -> Int8Matrices:
    """Rounds to the nearest of 255 steps for each row of A, and for all of B after A's scales have gone there."""
    a, largest_R1 = _rounded(np.asarray(m.a, np.float32), axis=1)
    b, largest = _rounded(np.asarray(m.b, np.float32) * (largest_R1.T / LARGEST), axis=None)
    return Int8Matrices(a, b, float(m.scale) * float(largest.item()) / LARGEST)


def _rounded(x: np.ndarray, *, axis: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Integers, and the magnitude that LARGEST stands for."""
    largest = np.max(np.abs(x), axis=axis, keepdims=True, initial=0)
    usable = np.isfinite(largest) & (largest >= _TINY)
    factor = np.where(usable, LARGEST / np.where(usable, largest, 1), 0).astype(x.dtype)
    with np.errstate(invalid="ignore"):  # infinity times 0, and NaN as an integer
        ints = np.rint(x * factor).astype(np.int8)
    return ints, np.where(np.isfinite(largest), np.where(usable, largest, 0), np.nan)
