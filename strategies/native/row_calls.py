"""The native kernels of rows as JAX functions, with the contracts of the XLA versions.

bfloat16 goes in and out as it is: XLA on the CPU makes a bitcast to raw numbers a pass of its own over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from memory_pool.layout import PageLayout


def gated(gate: jax.Array, up: jax.Array, used: jax.Array | None, *, silu: bool) -> jax.Array:
    """As strategies.rowwise.xla_gated to bfloat16, from bfloat16 or float32; 0 where nothing is used."""
    call = jax.ffi.ffi_call("plora_gated", _bfloat16(gate))
    return call(gate, up, _used(used, gate.shape[:-1]), silu=np.bool_(silu))


def rms_norm(x: jax.Array, weight: jax.Array, used: jax.Array | None, *, eps: float, offset: bool) -> jax.Array:
    """As strategies.rowwise.xla_rms_norm to bfloat16, from bfloat16 or float32 and a bfloat16 weight.

    0 where nothing is used.
    """
    call = jax.ffi.ffi_call("plora_rms_norm", _bfloat16(x))
    return call(x, weight, _used(used, x.shape[:-1]), eps=np.float32(eps), offset=np.bool_(offset))


def add_rms_norm(
    x: jax.Array, out: jax.Array, weight: jax.Array, used: jax.Array | None, *, eps: float, offset: bool
) -> tuple[jax.Array, jax.Array]:
    """As strategies.rowwise.xla_add_rms_norm of bfloat16 x and weight, and bfloat16 or float32 out.

    Both are 0 where nothing is used.
    """
    call = jax.ffi.ffi_call("plora_add_rms_norm", [_bfloat16(x)] * 2)
    rows = _used(used, x.shape[:-1])
    total, norm = call(x, out, weight, rows, eps=np.float32(eps), offset=np.bool_(offset))
    return total, norm


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, used: jax.Array | None) -> jax.Array:
    """As strategies.rowwise.xla_rotated to bfloat16, from bfloat16 or float32; 0 where nothing is used."""
    return jax.ffi.ffi_call("plora_rotate", _bfloat16(x))(x, cos, sin, _used(used, x.shape[:-2]))


def write_kv(
    pages_LPW: jax.Array,
    layer: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    *,
    pages_T: jax.Array,
    offsets_T: jax.Array,
    used: jax.Array | None,
    layout: PageLayout,
) -> jax.Array:
    """As strategies.kv_write.xla_write_kv of the tokens that are used.

    Keys and values are as wide as the pages' numbers, or float32 for bfloat16.

    int8 is the same to the bit, of bfloat16 and float32.

    Raises:
        At run time, where a token's page or offset is none.

    Cost:
        Reads and writes what the tokens have; the pages themselves are never copied.
    """
    target = "plora_int8_write_kv" if layout.int8_kv else "plora_write_kv"
    call = jax.ffi.ffi_call(target, jax.typeof(pages_LPW), input_output_aliases={0: 0})
    used = _used(used, pages_T.shape)
    return call(pages_LPW, layer, k_TKH, v_TKH, pages_T, offsets_T, used, page_tokens=np.int32(layout.page_tokens))


def add_rows(sums: Sequence[jax.Array], parts: Sequence[jax.Array], *, first: int) -> tuple[jax.Array, ...]:
    """As strategies.low_rank.add_rows, in place."""
    call = jax.ffi.ffi_call(
        "plora_add_rows",
        [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in sums],
        input_output_aliases={len(parts) + i: i for i in range(len(sums))},
    )
    return tuple(call(*parts, *sums, first=np.int64(first)))


def first_best(x_BV: jax.Array) -> jax.Array:
    """As strategies.rowwise.xla_first_best."""
    return jax.ffi.ffi_call("plora_first_best", jax.ShapeDtypeStruct(x_BV.shape[:1], jnp.int32))(x_BV)


def _used(used: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """[] int32, rows that are used of those of `shape`, of which `used` counts the first axis."""
    if used is None:
        return jnp.int32(math.prod(shape))
    return used * math.prod(shape[1:]) if len(shape) > 1 else used


def _bfloat16(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
