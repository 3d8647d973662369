import jax
import numpy as np
import pytest

from memory_pool import allocate, device_sharding, link, near_data, one_device_mesh, pool_sharding


@pytest.mark.parametrize("place", [device_sharding, pool_sharding])
def test_allocate_gives_zeros_in_the_memory_asked_for(place):
    sharding = place(one_device_mesh())
    array = allocate((3, 5), np.uint16, sharding)
    assert array.sharding == sharding
    assert array.sharding.memory_kind == sharding.memory_kind
    assert not np.asarray(array).any()


@pytest.mark.parametrize(("place", "memory"), [(device_sharding, "device"), (pool_sharding, "pool")])
def test_allocate_of_more_than_there_is_says_how_much_and_of_which_memory(place, memory):
    with pytest.raises(link.AllocationError, match=rf"^4194304\.0 GB of {memory} memory could not be had$") as caught:
        allocate((2**52,), np.uint8, place(one_device_mesh()))
    assert caught.value.in_pool == (memory == "pool")


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


def test_emulation_is_where_host_memory_is_missing_or_not_wanted(monkeypatch):
    assert link.emulation() is None
    assert link.emulation(["device", "unpinned_host"]) == "the backend has no memory kind pinned_host"
    monkeypatch.setenv("PLORA_POOL", "device")
    assert link.emulation() == "PLORA_POOL=device asks for it"


def test_emulated_pool_arrays_are_in_device_memory_and_transfers_move_nothing(monkeypatch):
    monkeypatch.setenv("PLORA_POOL", "device")
    mesh = one_device_mesh()
    pool = allocate((4,), np.float32, pool_sharding(mesh))
    assert pool.sharding == device_sharding(mesh)
    assert pool.sharding.memory_kind == "device"
    there_and_back = jax.make_jaxpr(lambda x: link.to_device(link.to_pool(x)))(pool)
    assert [eqn.primitive.name for eqn in there_and_back.eqns] == ["name", "name"]
    near = near_data(lambda x: x + 1)
    np.testing.assert_array_equal(jax.jit(lambda x: near(link.to_pool(x)) * 2)(pool), [2, 2, 2, 2])


@pytest.mark.parametrize("where", ["host", "device"])
def test_blocks_are_written_and_read_where_they_are_asked_for(where, monkeypatch):
    monkeypatch.setenv("PLORA_POOL", where)
    content = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    pool = link.store_in_pool(content, one_device_mesh())
    block = np.full((1, 1, 4), 99, np.uint16)
    written = jax.jit(link.write_block)(pool, block, (np.int32(1), np.int32(2), 0))
    assert written.sharding.memory_kind == pool.sharding.memory_kind
    expected = content.copy()
    expected[1, 2] = 99
    np.testing.assert_array_equal(np.asarray(written), expected)
    read = jax.jit(lambda pool, at: link.read_block(pool, (at, 1, 1), (1, 2, 3)))(written, np.int32(1))
    assert read.sharding.memory_kind == "device"
    np.testing.assert_array_equal(np.asarray(read), expected[1:, 1:, 1:])
