"""The link between device memory and the pool: the only place where arrays change memory space.

Pool arrays live in host memory space (`pinned_host`), device arrays in `device`. Every sharding is a NamedSharding, on
a one-device mesh too: with SingleDeviceSharding(memory_kind="pinned_host") a returned array loses its host type and
mixes with device arrays unnoticed.

Where the backend has no host memory the pool is emulated (`emulation`): its arrays lie in device memory, and a transfer
is an identity whose name tells the audit what would have crossed.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection, Sequence

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tensor"
POOL, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
POOL_KIND = "pinned_host"
"""Memory kind of the pool."""

MARKS = {"link.to_device": "to_device", "link.to_pool": "to_pool"}
"""Directions by the names of the identities that stand for transfers where the pool is emulated."""

Index = jax.Array | int


class AllocationError(MemoryError):
    """An array that could not be had.

    Attributes:
        in_pool: of the pool, else of the device.
    """

    def __init__(self, nbytes: int, *, in_pool: bool) -> None:
        super().__init__(f"{nbytes / 2**30:.1f} GB of {'pool' if in_pool else 'device'} memory could not be had")
        self.in_pool = in_pool


def emulation(kinds: Collection[str] | None = None) -> str | None:
    """Why pool arrays lie in device memory, so that nothing moves over the link; None where they do not.

    PLORA_POOL=device asks for it where there is host memory, too. It is read whenever an array or a program is made,
    so it must not change while a process has any.

    Args:
        kinds: of memory that the device reaches; by default those of the first device of this process.
    """
    if os.environ.get("PLORA_POOL") == "device":
        return "PLORA_POOL=device asks for it"
    if POOL_KIND in (_memory_kinds() if kinds is None else kinds):
        return None
    return f"the backend has no memory kind {POOL_KIND}"


def one_device_mesh() -> Mesh:
    """A mesh of the first local device, with the axis `tensor`."""
    return Mesh(np.array(jax.local_devices()[:1]), (TENSOR_AXIS,))


def device_sharding(mesh: Mesh, spec: PartitionSpec = PartitionSpec()) -> NamedSharding:  # noqa: B008 - immutable
    """Sharding of an array in device memory."""
    return NamedSharding(mesh, spec, memory_kind="device")


def pool_sharding(mesh: Mesh, spec: PartitionSpec = PartitionSpec()) -> NamedSharding:  # noqa: B008 - immutable
    """Sharding of an array in the pool."""
    return NamedSharding(mesh, spec, memory_kind="device" if emulation() else POOL_KIND)


def allocate(shape: tuple[int, ...], dtype: np.dtype | type, sharding: NamedSharding) -> jax.Array:
    """An array of zeros in the memory that `sharding` names, without a copy on the way.

    Args:
        shape: of the array.
        dtype: of the array.
        sharding: device or pool sharding.

    Raises:
        AllocationError: there is not that much memory left.
    """
    space = POOL if sharding.memory_kind == POOL_KIND else DEVICE
    make = jax.jit(lambda: jax.device_put(jax.numpy.zeros(shape, dtype), space), out_shardings=sharding)
    try:
        return jax.block_until_ready(make())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        raise AllocationError(nbytes, in_pool=space is POOL) from error


def store_in_pool(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """Copies an array of the host program into the pool. Nothing crosses the link: both are host memory."""
    return jax.device_put(array, pool_sharding(mesh))


def store_on_device(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """Copies an array of the host program to every device. It does not come from the pool and is not counted."""
    return jax.device_put(array, device_sharding(mesh))


def to_device(x: jax.Array) -> jax.Array:
    """Inside a traced function: brings a pool array over the link; its bytes count as read from the pool."""
    return checkpoint_name(x, "link.to_device") if emulation() else jax.device_put(x, DEVICE)


def to_pool(x: jax.Array) -> jax.Array:
    """Inside a traced function: sends a device array over the link; its bytes count as written to the pool."""
    return checkpoint_name(x, "link.to_pool") if emulation() else jax.device_put(x, POOL)


def read_block(pool: jax.Array, at: Sequence[Index], sizes: Sequence[int]) -> jax.Array:
    """Inside a traced function: brings a block of a pool array over the link, by a copy, where nothing computes there.

    Args:
        pool: in the pool, of any shape.
        at: [] int32 on the device for each axis, where the block starts; it lies within the array.
        sizes: of the block.

    Returns:
        The block, on the device.
    """
    return to_device(lax.dynamic_slice(pool, at, sizes, allow_negative_indices=False))


def write_block(pool: jax.Array, block: jax.Array, at: Sequence[Index]) -> jax.Array:
    """Inside a traced function: sends a block over the link into a pool array, where nothing computes there.

    Args:
        pool: in the pool, of any shape.
        block: on the device, of as many axes.
        at: [] int32 on the device for each axis, where the block starts; it lies within the array.

    Returns:
        The pool array with the block in it, in place where it is donated.
    """
    return lax.dynamic_update_slice(pool, to_pool(block), at, allow_negative_indices=False)


@functools.cache
def _memory_kinds() -> frozenset[str]:
    """Kinds of memory that the first device reaches; none where the backend does not tell."""
    try:
        return frozenset(memory.kind for memory in jax.local_devices()[0].addressable_memories())
    # Backends refuse what they lack by many kinds of errors, some of their own.
    except Exception:
        return frozenset()
