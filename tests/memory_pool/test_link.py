import jax
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


def test_arrays_of_the_host_program_are_stored_in_the_memory_asked_for():
    mesh, array = one_device_mesh(), np.arange(6, dtype=np.int32)
    for store, place in ((link.store_in_pool, pool_sharding), (link.store_on_device, device_sharding)):
        stored = store(array, mesh)
        assert stored.sharding == place(mesh)
        np.testing.assert_array_equal(np.asarray(stored), array)
