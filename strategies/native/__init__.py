"""Native CPU kernels: built with the machine's C++ compiler when first used, kept on disk, called through jax.ffi."""

from strategies.native.build import matrix_unit_unavailable, unavailable
from strategies.native.calls import delta, expand, partial_attention, products, rows, shrink

__all__ = [
    "delta",
    "expand",
    "matrix_unit_unavailable",
    "partial_attention",
    "products",
    "rows",
    "shrink",
    "unavailable",
]
