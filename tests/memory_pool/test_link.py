import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memory_pool import allocate, device_sharding, link, one_device_mesh, pool_sharding


@pytest.mark.parametrize("place", [device_sharding, pool_sharding])
def test_allocate_gives_zeros_in_the_memory_asked_for(place):
    sharding = place(one_device_mesh())
    array = allocate((3, 5), np.uint16, sharding)
    assert array.sharding == sharding
    assert array.sharding.memory_kind == sharding.memory_kind
    assert not np.asarray(array).any()


def test_pool_array_mixed_with_device_array_is_refused_when_traced():
    mesh = one_device_mesh()
    pool = allocate((4,), np.float32, pool_sharding(mesh))
    device = allocate((4,), np.float32, device_sharding(mesh))
    with pytest.raises(ValueError, match="memory"):
        jax.jit(lambda a, b: a + b)(pool, device)


def test_copy_rows_to_device_replaces_only_the_slots_named():
    mesh = one_device_mesh()
    rows = allocate((2, 6, 3), np.float32, device_sharding(mesh))
    piece = link.store_in_pool(np.arange(12, dtype=np.float32).reshape(2, 2, 3), mesh)
    out = np.asarray(link.copy_rows_to_device({"x": rows}, {"x": piece}, np.array([4, 1], np.int32))["x"])
    want = np.zeros((2, 6, 3), np.float32)
    want[:, [4, 1]] = np.asarray(piece)
    np.testing.assert_array_equal(out, want)


def test_tree_bytes_counts_every_leaf():
    assert link.tree_bytes({"a": jnp.zeros((2, 3), jnp.float32), "b": (jnp.zeros(4, jnp.uint16),)}) == 32
