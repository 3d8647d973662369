"""The strategies by name. Adding one is a function with the same signature and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from memory_pool import AdapterRows
from strategies.attention import AttentionLane, HeadMaths, KvPages, attend
from strategies.kernels import KernelSet
from strategies.lora import LoraLane


class LoraStrategy(NamedTuple):
    """How adapters change projections.

    Attributes:
        delta: (x [T, I], rows by projection, layer, lane, kernels) to [T, O] float32 by projection.
    """

    delta: Callable[..., dict[str, jax.Array]]


class AttentionStrategy(NamedTuple):
    """How queries attend over the KV cache.

    Attributes:
        attend: (q [N, Q, heads, H], pages, layer, lane, maths, kernels) to the output, same shape and dtype.
    """

    attend: Callable[..., jax.Array]


def _resident(
    x_TI: jax.Array, rows: Mapping[str, AdapterRows], layer: jax.Array, lane: LoraLane, kernels: KernelSet
) -> dict[str, jax.Array]:
    """A and B are in device memory; shrink and expand run on the device."""
    return kernels.lora_delta.call(x_TI, rows, layer, lane)


def _local(
    q_NQHD: jax.Array,
    pages: KvPages,
    layer: jax.Array,
    lane: AttentionLane,
    maths: HeadMaths,
    kernels: KernelSet,
) -> jax.Array:
    """The device computes over pages in its own memory."""
    chosen = kernels.decode_attention if lane.positions.shape[1] == 1 else kernels.prefill_attention
    return attend(q_NQHD, pages, layer, lane, maths, kernel=chosen.call)


LORA = {"resident": LoraStrategy(_resident)}
ATTENTION = {"local": AttentionStrategy(_local)}
