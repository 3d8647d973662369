"""Which implementation of a kernel runs on which platform: explicit tables, best first.

The last entry of every row is the XLA version, which is the reference and always applies. The same function serves the
device and, inside near-data functions, the pool; where it runs on the device alone, the XLA version serves the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from memory_pool.layout import PageLayout
from strategies import low_rank, native, paged_attention, pallas


class Kernel(NamedTuple):
    """One implementation.

    Attributes:
        name: for reports.
        call: the function; its contract is that of the XLA version.
        unsupported: None when it can run here on pages of a layout, else why not; the layout may be None, not known.
        device_only: it cannot run near the data.
    """

    name: str
    call: Callable[..., Any]
    unsupported: Callable[[PageLayout | None], str | None]
    device_only: bool = False


class KernelSet(NamedTuple):
    """The implementations for the tokens of one phase."""

    shrink: Kernel
    expand: Kernel
    delta: Kernel
    add: Kernel
    rows: Kernel
    attention: Kernel

    def near_the_data(self) -> KernelSet:
        """What runs where the pool is: the XLA version for what runs on the device alone."""
        return KernelSet(*(xla if own.device_only else own for own, xla in zip(self, XLA, strict=True)))


class Kernels(NamedTuple):
    """The implementations of this process: decode rows, of which an adapter has few, and prefill tokens."""

    decode: KernelSet
    prefill: KernelSet


def _always(layout: PageLayout | None) -> str | None:
    del layout
    return None


XLA = KernelSet(
    shrink=Kernel("xla", low_rank.shrink, _always),
    expand=Kernel("xla", low_rank.expand, _always),
    delta=Kernel("xla", low_rank.delta, _always),
    add=Kernel("xla", low_rank.add, _always),
    rows=Kernel("xla", low_rank.rows, _always),
    attention=Kernel("xla", paged_attention.partial_attention, _always),
)

Table = Mapping[str, tuple[Kernel, ...]]
"""Implementations by field of KernelSet, best first; the XLA version comes after them."""


def _native(call: Callable[..., Any]) -> tuple[Kernel, ...]:
    return (Kernel("native", call, lambda _: native.unavailable()),)


def _on_tiles(call: Callable[..., Any]) -> tuple[Kernel, ...]:
    return (Kernel("native-tiles", call, lambda _: native.matrix_unit_unavailable()),)


def _pallas(
    platform: str, adapters_unsupported: Callable[..., str | None], attention_unsupported: Callable[..., str | None]
) -> Mapping[str, tuple[Kernel, ...]]:
    def of(call: Callable[..., Any], unsupported: Callable[..., str | None]) -> tuple[Kernel, ...]:
        return (Kernel("pallas", call, unsupported, device_only=True),)

    def first_call(name: str) -> Callable[..., Any]:
        return pallas.at_first_call(f"low_rank_{platform}", name)

    attend = pallas.at_first_call(f"attention_{platform}", "partial_attention")
    return {
        **{name: of(first_call(name), adapters_unsupported) for name in ("shrink", "expand", "delta")},
        "add": of(functools.partial(low_rank.add, delta=first_call("delta")), adapters_unsupported),
        "attention": of(attend, attention_unsupported),
    }


# The native kernels read memory near its speed, give a token the same bits in any company, and multiply each token only
# with its own adapter's components; XLA multiplies all with all. Prefill is theirs where they have the matrix unit: for
# blocks of 16 queries, 3 heads each, attention makes 200 GFLOP/s a core of bfloat16, XLA 72, vectors 53. `delta` of 512
# tokens in all layers of the default model on two cores (medians of 15 calls in one program), vectors and tiles: four
# adapters of rank 8 to 64 take 81 and 22 ms, one of rank 64 163 and 31, one of rank 8 23 and 20, 32 of rank 32 87 and
# 55; half of what is left is the results' way to memory. Vectors win below some 16 tokens an adapter (16 of rank 16 of
# 5 tokens: 13 and 19 ms), but a choice by count would change a token's bits with its company.
_LORA: Table = {
    "shrink": _native(native.shrink),
    "expand": _native(native.expand),
    "delta": _native(native.delta),
    "add": _native(native.add),
    "rows": _native(native.rows),
}
_GPU = _pallas("gpu", pallas.low_rank_unsupported_on_gpu, pallas.attention_unsupported_on_gpu)
_TPU = _pallas("tpu", pallas.low_rank_unsupported_on_tpu, pallas.attention_unsupported_on_tpu)
# JAX calls an NVIDIA GPU "gpu" as the platform of a device, and "cuda" where programs are lowered.
_DEVICES: Mapping[str, Table] = {"gpu": _GPU, "cuda": _GPU, "tpu": _TPU}
DECODE: Mapping[str, Table] = {"cpu": {**_LORA, "attention": _native(native.partial_attention)}, **_DEVICES}
_TILES: Table = {
    "shrink": _on_tiles(functools.partial(native.shrink, on_tiles=True)),
    "expand": _on_tiles(functools.partial(native.expand, on_tiles=True)),
    "delta": _on_tiles(functools.partial(native.delta, on_tiles=True)),
    "add": _on_tiles(functools.partial(native.add, on_tiles=True)),
    "attention": _on_tiles(native.block_attention),
}
PREFILL: Mapping[str, Table] = {
    "cpu": {field: (*_TILES.get(field, ()), *_LORA.get(field, ())) for field in KernelSet._fields}
}
"""Tables by platform. Whether Pallas beats XLA on the many rows of a prompt is not known."""


def choose_kernels(platform: str | None = None, *, layout: PageLayout | None = None) -> Kernels:
    """The best implementations that apply to pages of a layout on a platform, by default that of the first device."""
    platform = platform or jax.local_devices()[0].platform

    def best(table: Table) -> KernelSet:
        rows = {field: (*table.get(field, ()), getattr(XLA, field)) for field in KernelSet._fields}
        chosen = {field: next(k for k in row if k.unsupported(layout) is None) for field, row in rows.items()}
        return KernelSet(**chosen)

    return Kernels(best(DECODE.get(platform, {})), best(PREFILL.get(platform, {})))


def describe_kernels(kernels: Kernels, platform: str | None = None, *, layout: PageLayout | None = None) -> str:
    """One line for people: what was chosen, and why something faster was not."""
    platform = platform or jax.local_devices()[0].platform
    parts = []
    for phase, chosen in kernels._asdict().items():
        by_name: dict[str, list[str]] = {}
        for field, kernel in chosen._asdict().items():
            by_name.setdefault(kernel.name, []).append(field)
        parts.append(f"{phase}: " + ", ".join(f"{name} ({', '.join(fields)})" for name, fields in by_name.items()))
    reasons = {
        f"no {kernel.name}: {reason}"
        for tables in (DECODE, PREFILL)
        for row in tables.get(platform, {}).values()
        for kernel in row
        if (reason := kernel.unsupported(layout))
    }
    return "; ".join(parts) + "".join(f" ({reason})" for reason in sorted(reasons))
