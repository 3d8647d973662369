"""The strategies by name. Adding one is a function with the same signature and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from memory_pool import AdapterRows
from strategies.attention import attend
from strategies.lora import DeltaKernel, LoraLane


class LoraStrategy(NamedTuple):
    """How adapters change projections.

    Attributes:
        delta: (x [T, I], rows by projection, layer, lane, kernel=) to [T, O] float32 by projection.
    """

    delta: Callable[..., dict[str, jax.Array]]


class AttentionStrategy(NamedTuple):
    """How queries attend over the KV cache.

    Attributes:
        attend: (q [N, Q, heads, H], pages, layer, lane, maths, kernel=) to the output, same shape and dtype.
    """

    attend: Callable[..., jax.Array]


def _resident(
    x_TI: jax.Array, rows: Mapping[str, AdapterRows], layer: jax.Array, lane: LoraLane, *, kernel: DeltaKernel
) -> dict[str, jax.Array]:
    """A and B are in device memory; shrink and expand run on the device."""
    return kernel(x_TI, rows, layer, lane)


LORA = {"resident": LoraStrategy(_resident)}
ATTENTION = {"local": AttentionStrategy(attend)}
