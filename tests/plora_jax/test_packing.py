"""Packing of many small arrays into one."""

import jax
import numpy as np
import pytest

from memory_pool.link import one_device_mesh, pool_sharding, to_device
from memory_pool.near import near_data
from plora_jax.engine.packing import PackedArrays

TREE = {
    "flags": np.array([True, False, True]),
    "scalar": np.int32(-7),
    "numbers": (np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.uint32)),
    "none_here": np.zeros((0, 5), np.int32),
}


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


def test_packed_arrays_come_back_with_shape_and_dtype():
    packed = PackedArrays(TREE)
    words = packed.pack(TREE)
    assert words.shape == (packed.num_words,) == (14,)
    assert same(jax.jit(packed.unpack)(words), TREE)


def test_packed_arrays_can_be_opened_near_the_data():
    packed = PackedArrays(TREE)
    words = jax.device_put(packed.pack(TREE), pool_sharding(one_device_mesh()))
    near = jax.jit(lambda words: jax.tree.map(to_device, near_data(packed.unpack)(words)))
    assert same(near(words), TREE)


def test_packing_another_shape_fails():
    packed = PackedArrays({"a": np.zeros(3, np.int32)})
    with pytest.raises(AssertionError):
        packed.pack({"a": np.zeros(4, np.int32)})
