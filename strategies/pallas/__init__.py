"""Kernels in Pallas for GPUs and TPUs, with the contracts of the XLA versions.

On TPUs Mosaic compiles them: a list of the pages that somebody uses is made beforehand, and the pipeline brings the
next page while one is multiplied. On GPUs Triton does: programs gather rows by their addresses. Both read raw numbers
and reinterpret them in the kernel. They run on the device alone; near the data the XLA versions serve.

They are tested by interpretation and by lowering, and were compiled for TPU v5e, H100 and A6000, without any of them:
they have not run there, and what they gain is not measured. In the memory of a TPU eight pages of [L, P, W] are
interleaved, so XLA copies all of them before a kernel, as it does before a gather of its own; GPUs need no copy.

Pallas is imported at the first call: it takes 0.2 to 0.3 s, which a start on the CPU need not spend.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import jax

from memory_pool.layout import PageLayout

_LANES, _LEAST_BLOCK, _LARGEST_HEAD = 128, 16, 256
_LEAST_CAPABILITY = 8.0


def at_first_call(module: str, name: str) -> Callable[..., Any]:
    """A function of this package, whose module is imported when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)(*args, **kwargs)

    return call


def low_rank_unsupported_on_gpu(layout: PageLayout | None, device: Any = None) -> str | None:
    """Why shrink, expand and delta cannot run on a GPU, or None; `device` is by default the first."""
    unit = layout.unit if layout else 0
    return (_unsupported_on_gpu(layout, device) or _of_int8_adapters(layout)) or (
        f"a unit of {unit} numbers is no multiple of {_LEAST_BLOCK}" if unit % _LEAST_BLOCK else None
    )


def attention_unsupported_on_gpu(layout: PageLayout | None, device: Any = None) -> str | None:
    """Why attention cannot run on a GPU, or None; `device` is by default the first."""
    dim = layout.head_dim if layout else 0
    fits = _LEAST_BLOCK <= dim <= _LARGEST_HEAD and dim & (dim - 1) == 0
    return (
        _unsupported_on_gpu(layout, device)
        or _of_int8(layout)
        or (None if fits else f"head_dim {dim} is no power of two from {_LEAST_BLOCK} to {_LARGEST_HEAD}")
    )


def low_rank_unsupported_on_tpu(layout: PageLayout | None, device: Any = None) -> str | None:
    """Why shrink, expand and delta cannot run on a TPU, or do not pay; `device` is by default the first."""
    unit = layout.unit if layout else 0
    return (_unsupported_on_tpu(layout, device) or _of_int8_adapters(layout)) or (
        f"a unit of {unit} numbers is no multiple of {_LANES} lanes" if unit % _LANES else None
    )


def attention_unsupported_on_tpu(layout: PageLayout | None, device: Any = None) -> str | None:
    """Why attention cannot run on a TPU, or does not pay; `device` is by default the first."""
    reason = _unsupported_on_tpu(layout, device) or _of_int8(layout)
    if reason or layout is None:
        return reason
    rows = 32 // layout.dtype.itemsize
    if layout.head_dim % _LANES:
        return f"head_dim {layout.head_dim} is no multiple of {_LANES} lanes"
    return (
        f"{layout.page_tokens} tokens of a page are no multiple of {rows} rows" if layout.page_tokens % rows else None
    )


def _of_int8(layout: PageLayout | None) -> str | None:
    return "keys and values are int8" if layout and layout.int8_kv else None


def _of_int8_adapters(layout: PageLayout | None) -> str | None:
    return "adapters are int8" if layout and layout.int8_adapters else None


def _unsupported_on_gpu(layout: PageLayout | None, device: Any) -> str | None:
    device = device or jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", "unknown"))
    if not re.fullmatch(r"\d+\.\d+", capability) or float(capability) < _LEAST_CAPABILITY:
        return f"needs an NVIDIA GPU of compute capability {_LEAST_CAPABILITY} or more, {device} has {capability}"
    return _unsupported_anywhere(layout, "triton")


def _unsupported_on_tpu(layout: PageLayout | None, device: Any) -> str | None:
    device = device or jax.local_devices()[0]
    if not re.fullmatch(r"TPU\D*([4-9]|\d\d).*", device.device_kind):
        return f"needs a TPU v4 or later, whose scalar memory holds the lists of pages, not {device.device_kind!r}"
    return _unsupported_anywhere(layout, "tpu")


def _unsupported_anywhere(layout: PageLayout | None, backend: str) -> str | None:
    if not _has_pallas(backend):
        return f"this JAX has no jax.experimental.pallas.{backend}"
    if layout is None:
        return "the page layout is not known"
    return None if layout.dtype.name in ("float32", "bfloat16") else f"pages of {layout.dtype.name}"


@functools.cache
def _has_pallas(backend: str) -> bool:
    try:
        return importlib.util.find_spec(f"jax.experimental.pallas.{backend}") is not None
    except ImportError:
        return False
