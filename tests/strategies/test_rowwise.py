"""The gate and the best of a row: native kernels against XLA."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from strategies import native
from strategies.rowwise import first_best, gated, xla_first_best, xla_gated

needs_native = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def numbers(shape, scale=4.0, seed=0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(ml_dtypes.bfloat16)


@needs_native
@pytest.mark.parametrize("kind", ["silu", "gelu"])
@pytest.mark.parametrize("shape", [(32, 1536), (1, 1), (3, 5, 7), (2, 1040)])
def test_gated_native_equals_xla_to_a_rounding_of_the_dtype(kind, shape):
    gate, up = numbers(shape), numbers(shape, seed=1)
    got = np.asarray(jax.jit(gated, static_argnums=2)(gate, up, kind), np.float32)
    want = np.asarray(jax.jit(xla_gated, static_argnums=2)(gate, up, kind), np.float32)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-5)
    x = gate.astype(np.float64)
    inner = x if kind == "silu" else np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)
    exact = (x / (1 + np.exp(-inner))).astype(gate.dtype) * up
    assert np.mean(got == exact.astype(np.float32)) > 0.99


@needs_native
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_gated_native_of_extremes_equals_xla(kind):
    gate = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 0.0, -0.0, 100.0, -100.0, 1e-30], ml_dtypes.bfloat16)
    got = np.asarray(gated(gate, np.ones_like(gate), kind), np.float32)
    want = np.asarray(xla_gated(gate, np.ones_like(gate), kind), np.float32)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-30)


def test_gated_in_float32_is_the_reference():
    gate, up = (np.asarray(numbers((4, 96), seed=i), np.float32) for i in range(2))
    np.testing.assert_array_equal(gated(gate, up, "silu"), xla_gated(gate, up, "silu"))


def test_gated_has_the_derivative_of_the_reference():
    gate, up = jnp.asarray(numbers((2, 32))), jnp.asarray(numbers((2, 32), seed=1))
    got, want = (
        jax.grad(lambda g, u, f=f: f(g, u, "silu").astype(jnp.float32).sum(), argnums=(0, 1))(gate, up)
        for f in (gated, xla_gated)
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_first_best_equals_the_reference():
    x = np.random.default_rng(0).normal(size=(9, 1003)).astype(np.float32)
    x[1] = -np.inf
    x[2] = np.nan
    x[3] = 0.0
    x[3, 7:] = -0.0
    x[4, [5, 700, 1002]] = 9.0
    x[5, ::2] = np.nan
    x[6, :990] = -np.inf
    x[7, 1002] = np.inf
    x[8] = -np.inf
    x[8, :4] = np.nan
    got = np.asarray(jax.jit(first_best)(x))
    np.testing.assert_array_equal(got, xla_first_best(x))
    assert got.dtype == np.int32
    assert (got[4], got[7], got[2]) == (5, 1002, 0)


@pytest.mark.parametrize("width", [1, 15, 64, 65])
def test_first_best_of_narrow_rows_is_argmax(width):
    x = np.random.default_rng(1).normal(size=(5, width)).astype(np.float32)
    np.testing.assert_array_equal(first_best(x), x.argmax(axis=1))
