"""Native CPU kernels: built with the machine's C++ compiler when first used, kept on disk, called through jax.ffi."""

from strategies.native.build import unavailable
from strategies.native.calls import attend_decode, lora_delta

__all__ = ["attend_decode", "lora_delta", "unavailable"]
