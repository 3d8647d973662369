"""Functions of rows: native kernels against XLA."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from strategies import native
from strategies.low_rank import add_rows
from strategies.rowwise import (
    add_rms_norm,
    first_best,
    gated,
    rms_norm,
    rotated,
    xla_add_rms_norm,
    xla_first_best,
    xla_gated,
    xla_rms_norm,
    xla_rotated,
)

needs_native = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def numbers(shape, scale=4.0, seed=0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(ml_dtypes.bfloat16)


BF16 = ml_dtypes.bfloat16


def wide(shape, scale=4.0, seed=0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def assert_same_to_a_rounding(got, want):
    """Equal but for a unit in the last place here and there, or two after two roundings: sums have another order."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype == BF16
    got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=2**-6, atol=1e-30)
    assert np.mean(got != want) < 0.005


@needs_native
@pytest.mark.parametrize("kind", ["silu", "gelu"])
@pytest.mark.parametrize("shape", [(32, 1536), (1, 1), (3, 5, 7), (2, 1040), (1, 33)])
def test_gated_native_equals_xla_to_a_rounding_of_the_dtype(kind, shape):
    gate, up = numbers(shape), numbers(shape, seed=1)
    got = np.asarray(jax.jit(gated, static_argnums=(2, 3))(gate, up, kind, BF16), np.float32)
    want = np.asarray(jax.jit(xla_gated, static_argnums=(2, 3))(gate, up, kind, BF16), np.float32)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-5)
    x = gate.astype(np.float64)
    inner = x if kind == "silu" else np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)
    exact = (x / (1 + np.exp(-inner))).astype(gate.dtype) * up
    assert np.mean(got == exact.astype(np.float32)) > 0.99


@needs_native
@pytest.mark.parametrize("kind", ["silu", "gelu"])
@pytest.mark.parametrize("repeats", [1, 4])
def test_gated_native_of_extremes_equals_xla(kind, repeats):
    gate = np.array(
        [np.inf, -np.inf, np.nan, 3e38, -3e38, 0.0, -0.0, 100.0, -100.0, 1e-30, -86.5, 87.5] * repeats, BF16
    )
    got = np.asarray(gated(gate, np.ones_like(gate), kind, BF16), np.float32)
    want = np.asarray(xla_gated(gate, np.ones_like(gate), kind, BF16), np.float32)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-30)


@needs_native
@pytest.mark.parametrize("count", [1536, 77])
def test_gated_native_rounds_float32_as_it_reads(count):
    gate, up = wide((2, count)), wide((2, count), seed=1)
    gate[0, :3] = np.nan, np.inf, 3.4e38
    got = np.asarray(gated(gate, up, "silu", BF16))
    np.testing.assert_array_equal(
        got.view(np.uint16), np.asarray(gated(gate.astype(BF16), up.astype(BF16), "silu", BF16)).view(np.uint16)
    )


def test_gated_in_float32_is_the_reference():
    gate, up = (np.asarray(numbers((4, 96), seed=i), np.float32) for i in range(2))
    np.testing.assert_array_equal(gated(gate, up, "silu", np.float32), xla_gated(gate, up, "silu", np.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gated_has_the_derivative_of_the_reference(dtype):
    gate, up = (jnp.asarray(wide((2, 32), seed=i), dtype) for i in range(2))
    got, want = (
        jax.grad(lambda g, u, f=f: f(g, u, "silu", BF16).astype(jnp.float32).sum(), argnums=(0, 1))(gate, up)
        for f in (gated, xla_gated)
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == dtype


@needs_native
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("shape", [(32, 576), (1, 1), (2, 3, 5, 20), (3, 67), (2, 16384)])
def test_rms_norm_native_equals_xla_to_a_rounding_of_the_dtype(offset, dtype, shape):
    x, weight = wide(shape).astype(dtype), numbers(shape[-1:], seed=1)
    got = jax.jit(rms_norm, static_argnums=(2, 3, 4))(x, weight, 1e-5, offset, BF16)
    assert_same_to_a_rounding(got, xla_rms_norm(x, weight, 1e-5, offset, BF16))


@needs_native
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("shape", [(33, 576), (1, 1), (2, 3, 67), (1, 16384)])
def test_add_rms_norm_native_equals_xla_to_a_rounding_of_the_dtype(offset, dtype, shape):
    x, out, weight = numbers(shape), wide(shape, seed=2).astype(dtype), numbers(shape[-1:], seed=1)
    total, norm = jax.jit(add_rms_norm, static_argnums=(3, 4))(x, out, weight, 1e-5, offset)
    want_total, want_norm = xla_add_rms_norm(x, out, weight, 1e-5, offset)
    np.testing.assert_array_equal(np.asarray(total), np.asarray(want_total))
    assert_same_to_a_rounding(norm, want_norm)


@needs_native
@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm_native_of_extremes_equals_xla(offset):
    x = numbers((6, 37))
    x[0, 3], x[1, 36], x[2, 0], x[3], x[4, 5], x[5] = np.inf, np.nan, 3e38, 0.0, -np.inf, 1e-30
    weight = numbers((37,), seed=1)
    got = np.asarray(rms_norm(x, weight, 1e-6, offset, BF16), np.float32)
    want = np.asarray(xla_rms_norm(jnp.asarray(x), weight, 1e-6, offset, BF16), np.float32)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-38)
    total, norm = add_rms_norm(x, np.zeros_like(x), weight, 1e-6, offset)
    np.testing.assert_array_equal(np.asarray(total, np.float32), x.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(norm, np.float32), got)


@needs_native
def test_rms_norm_native_of_a_row_has_the_same_bits_beside_other_rows():
    x, weight = numbers((200, 576)), numbers((576,), seed=1)
    together = np.asarray(rms_norm(x, weight, 1e-5, False, BF16))
    for row in (0, 77, 199):
        np.testing.assert_array_equal(together[row], np.asarray(rms_norm(x[row], weight, 1e-5, False, BF16)))


def test_rms_norm_in_float32_is_the_reference():
    x, weight = wide((4, 96)), wide((96,), seed=1)
    np.testing.assert_array_equal(
        rms_norm(x, weight, 1e-5, False, np.float32), xla_rms_norm(x, weight, 1e-5, False, np.float32)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_norms_have_the_derivatives_of_the_references(dtype):
    x, out = jnp.asarray(numbers((3, 32))), jnp.asarray(wide((3, 32), seed=1), dtype)
    weight = jnp.asarray(numbers((32,), seed=2))

    def add(x, out, weight, *, norms):
        total, norm = norms[0](x, out, weight, 1e-5, True)
        return (total * norm * norms[1](out, weight, 1e-5, False, BF16)).astype(jnp.float32).sum()

    got, want = (
        jax.grad(lambda *args, norms=norms: add(*args, norms=norms), argnums=(0, 1, 2))(x, out, weight)
        for norms in ((xla_add_rms_norm, xla_rms_norm), (add_rms_norm, rms_norm))
    )
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=2**-6, atol=1e-2)


@needs_native
@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("shape", [(33, 9, 64), (1, 1, 2), (2, 3, 5, 38), (300, 3, 128)])
def test_rotated_native_equals_xla_to_a_rounding_of_the_dtype(dtype, shape):
    x = wide(shape).astype(dtype)
    angles = 100 * wide((*shape[:-2], shape[-1] // 2), seed=1)
    got = np.asarray(jax.jit(rotated, static_argnums=3)(x, np.cos(angles), np.sin(angles), BF16))
    want = np.asarray(xla_rotated(x, np.cos(angles), np.sin(angles), BF16))
    # Differences cancel, so the error is that of their terms.
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2**-7, atol=1e-5)
    assert got.dtype == BF16
    assert np.mean(got != want) < 0.005


@needs_native
@pytest.mark.parametrize("used", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64), (5, 2, 3, 38)])
def test_rows_that_are_used_are_those_of_all_and_the_others_are_zero(used, shape):
    x, y, weight = numbers(shape), wide(shape, seed=1), numbers(shape[-1:], seed=2)
    angles = wide((*shape[:-2], shape[-1] // 2), seed=3)
    rotate = len(shape) > 2
    calls = [
        lambda used: gated(x, numbers(shape, seed=1), "silu", BF16, used),
        lambda used: rms_norm(y, weight, 1e-5, False, BF16, used),
        *(lambda used, part=part: add_rms_norm(x, y, weight, 1e-5, True, used)[part] for part in (0, 1)),
        *([lambda used: rotated(y, np.cos(angles), np.sin(angles), BF16, used)] if rotate else []),
    ]
    for call in calls:
        got, whole = np.asarray(jax.jit(call)(np.int32(used))), np.asarray(jax.jit(call)(None))
        np.testing.assert_array_equal(got[:used], whole[:used])
        assert not got[used:].any()
        assert whole.all(axis=-1).any()


def test_rotated_of_other_shapes_is_the_reference():
    x, angles = numbers((4, 1, 2, 8)), wide((3, 4), seed=1)
    got = rotated(x, np.cos(angles), np.sin(angles), BF16)
    np.testing.assert_array_equal(got, xla_rotated(x, np.cos(angles), np.sin(angles), BF16))


@needs_native
@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (5, 3), (64, 9)])
def test_add_rows_native_has_the_bits_of_the_reference_and_leaves_other_rows(tokens, first, dtype):
    sums = [wide((first + tokens + 2, width), seed=width) for width in (8, 200, 1536)]
    parts = [wide((tokens, y.shape[1]), seed=7).astype(dtype) for y in sums]
    got = jax.jit(lambda y, p: native.add_rows(y, p, first=first))(sums, parts)
    for one, want, before in zip(got, add_rows(sums, parts, first=first), sums, strict=True):
        np.testing.assert_array_equal(one, want)
        changed = (np.asarray(one) != before).any(axis=1)
        assert changed.tolist() == [False] * first + [True] * tokens + [False] * 2


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
