"""Native CPU kernels: built with the machine's C++ compiler when first used, kept on disk, called through jax.ffi."""

from strategies.native.build import (
    block_unit_unavailable,
    cpu_flags,
    int8_unit_unavailable,
    matrix_unit_unavailable,
    unavailable,
)
from strategies.native.calls import (
    add,
    block_attention,
    block_products,
    delta,
    expand,
    int8_products,
    partial_attention,
    products,
    rows,
    shrink,
)
from strategies.native.row_calls import add_rms_norm, add_rows, first_best, gated, rms_norm, rotated, write_kv

__all__ = [
    "add",
    "add_rms_norm",
    "add_rows",
    "block_attention",
    "block_products",
    "block_unit_unavailable",
    "cpu_flags",
    "delta",
    "expand",
    "first_best",
    "gated",
    "int8_products",
    "int8_unit_unavailable",
    "matrix_unit_unavailable",
    "partial_attention",
    "products",
    "rms_norm",
    "rotated",
    "rows",
    "shrink",
    "unavailable",
    "write_kv",
]
