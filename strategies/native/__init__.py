"""Native CPU kernels: built with the machine's C++ compiler when first used, kept on disk, called through jax.ffi."""

from strategies.native.build import int8_unit_unavailable, matrix_unit_unavailable, unavailable
from strategies.native.calls import (
    block_attention,
    delta,
    expand,
    first_best,
    gated,
    int8_products,
    partial_attention,
    products,
    rows,
    shrink,
)

__all__ = [
    "block_attention",
    "delta",
    "expand",
    "first_best",
    "gated",
    "int8_products",
    "int8_unit_unavailable",
    "matrix_unit_unavailable",
    "partial_attention",
    "products",
    "rows",
    "shrink",
    "unavailable",
]
