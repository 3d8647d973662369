"""The matrix unit's products against XLA's, for any number of rows; what cannot be packed and why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strategies import native
from strategies.products import pack, products, unsupported

needs_unit = pytest.mark.skipif(native.matrix_unit_unavailable() is not None, reason="no matrix unit here")


def _random(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.bfloat16)


@needs_unit
@pytest.mark.parametrize("rows", [1, 8, 16, 31, 32, 50, 160])
def test_products_equal_float32_products_of_the_same_numbers(rows: int) -> None:
    x, weights = _random(0, rows, 96), [_random(1, 3, 80, 96), _random(2, 3, 16, 96)]
    found = jax.jit(products)(x, [pack(w) for w in weights], jnp.int32(2))
    for y, w in zip(found, weights, strict=True):
        expected = np.asarray(x, np.float64) @ np.asarray(w[2], np.float64).T
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


@needs_unit
def test_products_of_a_row_are_the_same_bits_in_any_company() -> None:
    x, weights = _random(3, 160, 1536), [pack(_random(4, 1, 576, 1536))]
    multiply = jax.jit(products)
    (together,) = multiply(x, weights, jnp.int32(0))
    for first, count in ((0, 8), (5, 8), (96, 32), (159, 1)):
        (alone,) = multiply(x[first : first + count], weights, jnp.int32(0))
        np.testing.assert_array_equal(alone, together[first : first + count])


@needs_unit
@pytest.mark.parametrize("used", [0, 1, 16, 37, 64, 99])
def test_products_leave_out_rows_that_are_not_used(used: int) -> None:
    x, weights = _random(7, 64, 96), [pack(_random(8, 2, out, 96)) for out in (48, 64)]
    multiply = jax.jit(products)
    for y, whole in zip(
        multiply(x, weights, jnp.int32(1), used=jnp.int32(used)), multiply(x, weights, jnp.int32(1)), strict=True
    ):
        np.testing.assert_array_equal(y[:used], whole[:used])
        assert not np.asarray(y[used:]).any()


@needs_unit
def test_products_contain_a_row_that_is_not_finite() -> None:
    x = _random(5, 32, 64).at[3].set(jnp.nan)
    (y,) = products(x, [pack(_random(6, 1, 32, 64))], jnp.int32(0))
    assert np.isnan(y[3]).all()
    assert np.isfinite(np.delete(np.asarray(y), 3, axis=0)).all()


@pytest.mark.parametrize(
    ("shape", "dtype", "shards", "platform", "reason"),
    [
        ((2, 64, 64), "bfloat16", 1, "tpu", "there is no kernel for packed weights on tpu"),
        ((2, 64, 64), "float32", 1, "cpu", "the matrix unit multiplies bfloat16, not float32"),
        ((2, 24, 64), "bfloat16", 1, "cpu", "24 outputs and 64 inputs over 1 shards are not whole tiles of 16 and 32"),
        ((2, 64, 64), "bfloat16", 4, "cpu", "64 outputs and 64 inputs over 4 shards are not whole tiles of 16 and 32"),
    ],
)
def test_unsupported_says_why(shape: tuple[int, ...], dtype: str, shards: int, platform: str, reason: str) -> None:
    assert unsupported(shape, jnp.dtype(dtype), shards=shards, platform=platform) == reason
