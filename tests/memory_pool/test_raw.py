import jax
import numpy as np
import pytest

from memory_pool.raw import recast

NUMBERS = np.array([[1.5, -2.0, 3.25, np.inf], [0.0, 1e-30, -7.0, 2.0]], np.float32)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.uint32])
def test_recast_keeps_the_bytes_of_each_row_and_goes_back(dtype):
    there = jax.jit(lambda x: recast(x, dtype))(NUMBERS)
    np.testing.assert_array_equal(there, NUMBERS.view(dtype))
    np.testing.assert_array_equal(recast(there, np.float32), NUMBERS)
