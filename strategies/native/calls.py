"""The native kernels as JAX functions; same contracts as their XLA counterparts."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from memory_pool import AdapterRows, to_raw
from strategies.attention import AttentionLane, HeadMaths, KvPages, Partial
from strategies.lora import CHUNK_ROWS, LoraLane


def lora_delta(
    x_TI: jax.Array, rows: Mapping[str, AdapterRows], layer: jax.Array, lane: LoraLane
) -> dict[str, jax.Array]:
    """As strategies.lora.xla_delta.

    Cost:
        Reads each rank component in use once, whatever the number of tokens.
    """
    tokens = x_TI.shape[0]
    results = [jax.ShapeDtypeStruct((tokens, r.b.shape[-1]), jnp.float32) for r in rows.values()]
    matrices = [array for r in rows.values() for array in (r.a, r.b, r.scale)]
    call = jax.ffi.ffi_call("plora_lora_delta", results)
    deltas = call(
        to_raw(x_TI),
        layer,
        lane.owner,
        lane.slots,
        lane.slot_owner,
        lane.chunks,
        *matrices,
        chunk_rows=np.int32(CHUNK_ROWS),
    )
    return dict(zip(rows, deltas, strict=True))


def attend_decode(
    q_NKRH: jax.Array, pages: KvPages, layer: jax.Array, lane: AttentionLane, maths: HeadMaths
) -> Partial:
    """As strategies.attention.paged_attention, for lanes of one query a group.

    Cost:
        Reads the keys and values that the query sees once.
    """
    shape = q_NKRH.shape[:3]
    results = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (q_NKRH.shape, shape, shape)]
    call = jax.ffi.ffi_call("plora_decode_attention", results)
    return Partial(
        *call(
            to_raw(q_NKRH),
            pages.k,
            pages.v,
            layer,
            lane.tables,
            lane.positions,
            maths.window,
            scale=np.float32(maths.scale),
            cap=np.float32(maths.soft_cap or 0.0),
        )
    )
