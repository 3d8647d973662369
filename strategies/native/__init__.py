"""Native CPU kernels: built with the machine's C++ compiler when first used, kept on disk, called through jax.ffi."""

from strategies.native.build import unavailable
from strategies.native.calls import delta, expand, partial_attention, rows, shrink

__all__ = ["delta", "expand", "partial_attention", "rows", "shrink", "unavailable"]
