"""Which implementation of a kernel runs on which platform: an explicit table, best first.

The last entry of every row is the XLA version, which is the reference and always applies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from strategies import attention, lora, native


class Kernel(NamedTuple):
    """One implementation.

    Attributes:
        name: for reports.
        call: the function.
        unsupported: None when it can run here, else why not.
    """

    name: str
    call: Callable[..., Any]
    unsupported: Callable[[], str | None]


def _always() -> str | None:
    return None


_XLA_LORA = Kernel("xla", lora.xla_delta, _always)
_XLA_ATTENTION = Kernel("xla", attention.paged_attention, _always)

LORA_DELTA = {"cpu": (Kernel("native", native.lora_delta, native.unavailable), _XLA_LORA)}
DECODE_ATTENTION = {"cpu": (Kernel("native", native.attend_decode, native.unavailable), _XLA_ATTENTION)}
PREFILL_ATTENTION: dict[str, tuple[Kernel, ...]] = {}


class KernelSet(NamedTuple):
    """The implementations chosen for this process."""

    lora_delta: Kernel
    decode_attention: Kernel
    prefill_attention: Kernel


def choose_kernels(platform: str | None = None) -> KernelSet:
    """The best implementations that apply on a platform; by default that of the first device."""
    platform = platform or jax.local_devices()[0].platform

    def best(table: dict[str, tuple[Kernel, ...]], reference: Kernel) -> Kernel:
        return next(k for k in table.get(platform, (reference,)) if k.unsupported() is None)

    return KernelSet(
        best(LORA_DELTA, _XLA_LORA), best(DECODE_ATTENTION, _XLA_ATTENTION), best(PREFILL_ATTENTION, _XLA_ATTENTION)
    )
