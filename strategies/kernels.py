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

# The native LoRA kernel reads adapters at the speed of memory but multiplies without the matrix unit, which XLA uses:
# the first wins with one token an adapter, the second with a chunk of a prompt (4 times, 144 tokens of rank 32).
DECODE_LORA = {"cpu": (Kernel("native", native.lora_delta, native.unavailable), _XLA_LORA)}
PREFILL_LORA: dict[str, tuple[Kernel, ...]] = {}
DECODE_ATTENTION = {"cpu": (Kernel("native", native.attend_decode, native.unavailable), _XLA_ATTENTION)}
PREFILL_ATTENTION: dict[str, tuple[Kernel, ...]] = {}


class KernelSet(NamedTuple):
    """The implementations chosen for the tokens of one phase."""

    lora: Kernel
    attention: Kernel


class Kernels(NamedTuple):
    """The implementations chosen for this process: decode rows and prefill tokens have their own."""

    decode: KernelSet
    prefill: KernelSet


def choose_kernels(platform: str | None = None) -> Kernels:
    """The best implementations that apply on a platform; by default that of the first device."""
    platform = platform or jax.local_devices()[0].platform

    def best(table: dict[str, tuple[Kernel, ...]], reference: Kernel) -> Kernel:
        return next(k for k in table.get(platform, (reference,)) if k.unsupported() is None)

    return Kernels(
        KernelSet(best(DECODE_LORA, _XLA_LORA), best(DECODE_ATTENTION, _XLA_ATTENTION)),
        KernelSet(best(PREFILL_LORA, _XLA_LORA), best(PREFILL_ATTENTION, _XLA_ATTENTION)),
    )


def describe_kernels(kernels: Kernels, platform: str | None = None) -> str:
    """One line for people: what was chosen, and why something faster was not."""
    platform = platform or jax.local_devices()[0].platform
    parts = [
        f"{phase} {what} {getattr(chosen, what).name}"
        for phase, chosen in kernels._asdict().items()
        for what in ("lora", "attention")
    ]
    reasons = {
        f"no {kernel.name}: {reason}"
        for table in (DECODE_LORA, PREFILL_LORA, DECODE_ATTENTION, PREFILL_ATTENTION)
        for kernel in table.get(platform, ())
        if (reason := kernel.unsupported())
    }
    return ", ".join(parts) + "".join(f" ({reason})" for reason in sorted(reasons))
