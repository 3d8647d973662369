"""LoRA over a batch whose tokens belong to many adapters of different ranks: y += scale * (x A) B per token.

The rank components of all adapters of the step are laid end to end and taken in chunks. A token multiplies with every
component of a chunk, and what is not its own adapter's is set to zero between shrink and expand. So each component is
read once a step however many tokens use it, ranks mix freely, and the amount of work is data, not program.

Letters: T packed tokens, I in, O out, L layers, C rank components of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memory_pool import AdapterRows, from_raw

CHUNK_ROWS = 64
BASE = -1
NOBODY = -2


class LoraLane(NamedTuple):
    """The tokens of a step that one strategy serves.

    Attributes:
        owner: [T] int32, which adapter of the step a token belongs to; BASE for none.
        slots: [C * n] int32, device slots of all adapters of the step, end to end; 0 for padding.
        slot_owner: [C * n] int32, the adapter of each slot; NOBODY for padding.
        chunks: [] int32, chunks of CHUNK_ROWS slots that are in use.
    """

    owner: Any
    slots: Any
    slot_owner: Any
    chunks: Any


DeltaKernel = Callable[[jax.Array, Mapping[str, AdapterRows], jax.Array, LoraLane], dict[str, jax.Array]]


def xla_delta(
    x_TI: jax.Array, rows: Mapping[str, AdapterRows], layer: jax.Array, lane: LoraLane
) -> dict[str, jax.Array]:
    """Shrink and expand for all tokens of a lane, in XLA; the reference for faster kernels.

    Args:
        x_TI: [T, I] input that all the projections of `rows` share.
        rows: device rows by projection.
        layer: [] int32.
        lane: tokens and slots.

    Returns:
        [T, O] float32 by projection; 0 for tokens of the base model.

    Cost:
        2 * T * (I + O) FLOPs and (I + O) elements read for each slot in use.
    """
    dtype = x_TI.dtype

    def step(i: jax.Array, deltas: dict[str, jax.Array]) -> dict[str, jax.Array]:
        slots = lax.dynamic_slice_in_dim(lane.slots, i * CHUNK_ROWS, CHUNK_ROWS)
        owners = lax.dynamic_slice_in_dim(lane.slot_owner, i * CHUNK_ROWS, CHUNK_ROWS)
        own_TC = lane.owner[:, None] == owners
        new = {}
        for name, r in rows.items():
            a, b = (from_raw(m.at[layer, slots].get(mode="promise_in_bounds"), dtype) for m in (r.a, r.b))
            scale_C = r.scale.at[layer, slots].get(mode="promise_in_bounds")
            shrunk_TC = jnp.einsum("TI,CI->TC", x_TI, a, preferred_element_type=jnp.float32)
            shrunk_TC = jnp.where(own_TC, shrunk_TC * scale_C, 0.0).astype(dtype)
            expanded = jnp.einsum("TC,CO->TO", shrunk_TC, b, preferred_element_type=jnp.float32)
            new[name] = deltas[name] + expanded
        return new

    zeros = {name: jnp.zeros((x_TI.shape[0], r.b.shape[-1]), jnp.float32) for name, r in rows.items()}
    return lax.fori_loop(0, lane.chunks, step, zeros)
