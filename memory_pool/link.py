"""The link between device memory and the pool: the only place where arrays change memory space.

Pool arrays live in host memory space (`pinned_host`), device arrays in `device`. Every sharding is a NamedSharding, on
a one-device mesh too: with SingleDeviceSharding(memory_kind="pinned_host") a returned array loses its host type and
mixes with device arrays unnoticed.
"""

from __future__ import annotations

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


def store_on_device(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """Copies an array of the host program to every device. It does not come from the pool and is not counted."""
    return jax.device_put(array, device_sharding(mesh))


def to_device(x: jax.Array) -> jax.Array:
    """Inside a traced function: brings a pool array over the link; its bytes count as read from the pool."""
    return jax.device_put(x, DEVICE)


def to_pool(x: jax.Array) -> jax.Array:
    """Inside a traced function: sends a device array over the link; its bytes count as written to the pool."""
    return jax.device_put(x, POOL)
