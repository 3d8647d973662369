"""The link between device memory and the pool: the only place where arrays change memory space.

Pool arrays live in host memory space (`pinned_host`), device arrays in `device`. Every sharding is a NamedSharding, on
a one-device mesh too: with SingleDeviceSharding(memory_kind="pinned_host") a returned array loses its host type and
mixes with device arrays unnoticed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tensor"
POOL, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
POOL_KIND = "pinned_host"
"""Memory kind of the pool."""


def one_device_mesh() -> Mesh:
    """A mesh of the first local device, with the axis `tensor`."""
    return Mesh(np.array(jax.local_devices()[:1]), (TENSOR_AXIS,))


def device_sharding(mesh: Mesh, spec: PartitionSpec = PartitionSpec()) -> NamedSharding:  # noqa: B008 - immutable
    """Sharding of an array in device memory."""
    return NamedSharding(mesh, spec, memory_kind="device")


def pool_sharding(mesh: Mesh, spec: PartitionSpec = PartitionSpec()) -> NamedSharding:  # noqa: B008 - immutable
    """Sharding of an array in the pool."""
    return NamedSharding(mesh, spec, memory_kind=POOL_KIND)


def allocate(shape: tuple[int, ...], dtype: np.dtype | type, sharding: NamedSharding) -> jax.Array:
    """An array of zeros in the memory that `sharding` names, without a copy on the way.

    Args:
        shape: of the array.
        dtype: of the array.
        sharding: device or pool sharding.
    """
    space = POOL if sharding.memory_kind == POOL_KIND else DEVICE
    make = jax.jit(lambda: jax.device_put(jax.numpy.zeros(shape, dtype), space), out_shardings=sharding)
    return make()


def store_in_pool(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """Copies an array of the host program into the pool. Nothing crosses the link: both are host memory."""
    return jax.device_put(array, pool_sharding(mesh))


def to_device(x: jax.Array) -> jax.Array:
    """Inside a traced function: brings a pool array over the link; its bytes count as read from the pool."""
    return jax.device_put(x, DEVICE)


def to_pool(x: jax.Array) -> jax.Array:
    """Inside a traced function: sends a device array over the link; its bytes count as written to the pool."""
    return jax.device_put(x, POOL)


@functools.partial(jax.jit, donate_argnames="device_rows")
def _write_rows(device_rows: Any, piece: Any, slots: jax.Array) -> Any:
    def write(rows: jax.Array, new: jax.Array) -> jax.Array:
        return rows.at[:, slots].set(to_device(new), mode="promise_in_bounds")

    return jax.tree.map(write, device_rows, piece)


def copy_rows_to_device(device_rows: Any, piece: Any, slots: np.ndarray) -> Any:
    """Writes a piece of the pool over rows of device arrays.

    Args:
        device_rows: pytree of device arrays [L, slots, ...].
        piece: pytree of pool arrays of the same structure, [L, rows, ...].
        slots: [rows] int32, the row slots written.

    Returns:
        The device arrays with the rows replaced.

    Donates:
        device_rows.

    Cost:
        `tree_bytes(piece)` over the link to the device; slots are control bytes.
    """
    return _write_rows(device_rows, piece, slots)


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
