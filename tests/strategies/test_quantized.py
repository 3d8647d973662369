"""Products with int8 weights: against exact ones, native against XLA bit by bit, alone against in company."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strategies import native
from strategies.quantized import MAX_INPUTS, QuantizedWeights, int8_products, largest_magnitude, quantize, unsupported

needs_unit = pytest.mark.skipif(native.int8_unit_unavailable() is not None, reason="no matrix unit here")
TILED = pytest.mark.parametrize("tiled", [False, pytest.param(True, marks=needs_unit)])
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def _random(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def _multiply(x: jax.Array, weights: list[QuantizedWeights], layer: int = 0) -> list[np.ndarray]:
    return [np.asarray(y) for y in jax.jit(int8_products)(x, weights, jnp.int32(layer))]


def test_quantize_rounds_each_output_to_steps_of_its_largest_weight() -> None:
    weight = _random(0, 2, 48, 96, dtype="float32") * np.geomspace(1e-3, 10, 48)[:, None]
    values, scales = quantize(weight.at[1, 7].set(0), tiled=False)
    assert (values.dtype, values.shape, scales.shape) == (jnp.int8, (2, 48, 96), (2, 48))
    np.testing.assert_allclose(scales[0], np.abs(weight[0]).max(-1) / 127, rtol=1e-6)
    assert np.abs(np.asarray(values, int)).max(-1)[0].tolist() == [127] * 48
    error = np.abs(np.asarray(values, np.float64)[0] * scales[0][:, None] - weight[0])
    assert (error <= 0.5001 * np.asarray(scales)[0][:, None]).all()
    assert not np.asarray(values)[1, 7].any()


@TILED
@DTYPES
@pytest.mark.parametrize("rows", [1, 16, 31, 32, 50])
def test_int8_products_are_those_of_the_rounded_weights(rows: int, dtype: str, tiled: bool) -> None:
    x = _random(0, rows, 192, dtype=dtype) * np.geomspace(1e-3, 1e3, rows).astype(dtype)[:, None]
    weights = [_random(1, 3, 80, 192), _random(2, 3, 16, 192)]
    found = _multiply(x, [quantize(w, tiled=tiled) for w in weights], 2)
    for y, w in zip(found, weights, strict=True):
        values, scales = quantize(w, tiled=False)
        rounded = np.asarray(values[2], np.float64) * np.asarray(scales[2], np.float64)[:, None]
        expected = np.asarray(x, np.float64) @ rounded.T
        assert y.dtype == np.float32
        size = np.abs(np.asarray(x, np.float64)).max(-1, keepdims=True) * np.abs(rounded).sum(-1)
        assert (np.abs(y - expected) <= size / 2 / 32000).all()


@needs_unit
@DTYPES
@pytest.mark.parametrize(("rows", "out", "inputs"), [(1, 48, 64), (9, 16, 128), (32, 80, 192), (50, 96, 64)])
def test_native_int8_products_are_the_bits_of_xla(rows: int, out: int, inputs: int, dtype: str) -> None:
    x, w = _random(3, rows, inputs, dtype=dtype), _random(4, 2, out, inputs)
    x = x.at[rows // 2].set(0)
    (found,), (expected,) = (_multiply(x, [quantize(w, tiled=tiled)], 1) for tiled in (True, False))
    np.testing.assert_array_equal(found, expected)
    assert not found[rows // 2].any()


@needs_unit
def test_native_int8_products_of_a_row_are_the_same_bits_in_any_company() -> None:
    x, weights = _random(5, 160, 1536), [quantize(_random(6, 1, 576, 1536), tiled=True)]
    (together,) = _multiply(x, weights)
    for first, count in ((0, 8), (5, 8), (96, 32), (159, 1)):
        (alone,) = _multiply(x[first : first + count], weights)
        np.testing.assert_array_equal(alone, together[first : first + count])


@needs_unit
@pytest.mark.parametrize("used", [0, 1, 16, 37, 64])
def test_native_int8_products_leave_out_rows_that_are_not_used(used: int) -> None:
    x, weights = _random(11, 64, 128), [quantize(_random(12, 1, out, 128), tiled=True) for out in (48, 64)]
    for y, whole in zip(
        int8_products(x, weights, jnp.int32(0), used=jnp.int32(used)), _multiply(x, weights), strict=True
    ):
        np.testing.assert_array_equal(y[:used], whole[:used])
        assert not np.asarray(y[used:]).any()


@TILED
@DTYPES
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_int8_products_contain_a_row_that_is_not_finite(bad: float, dtype: str, tiled: bool) -> None:
    x = _random(7, 32, 64, dtype=dtype).at[3, 5].set(bad)
    (y,) = _multiply(x, [quantize(_random(8, 1, 32, 64), tiled=tiled)])
    assert not np.isfinite(y[3]).any()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()


@TILED
def test_int8_products_of_the_parts_of_a_row_add_up_to_those_of_the_row(tiled: bool) -> None:
    x, w = _random(9, 20, 256, dtype="float32"), _random(10, 1, 32, 256)
    values, scales = quantize(w, tiled=False)
    (whole,) = _multiply(x, [quantize(w, tiled=tiled)])
    parts = []
    for part in (slice(0, 128), slice(128, 256)):
        own = QuantizedWeights(values[..., part], scales)
        if tiled:
            own = QuantizedWeights(quantize(w, tiled=True).values[:, :, part.start // 64 : part.stop // 64], scales)
        (y,) = int8_products(x[:, part], [own], jnp.int32(0), largest=largest_magnitude(x))
        parts.append(np.asarray(y, np.float64))
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-6, atol=1e-6 * np.abs(whole).max())


def test_quantize_refuses_more_inputs_than_sums_can_take() -> None:
    says = (
        f"a projection of {MAX_INPUTS + 1} inputs cannot have int8 weights, since sums of 32 bits hold {MAX_INPUTS}: "
    )
    with pytest.raises(ValueError, match=says + "use --quantization none"):
        quantize(jnp.zeros((1, 1, MAX_INPUTS + 1), jnp.bfloat16), tiled=False)


@pytest.mark.parametrize(
    ("shape", "shards", "platform", "reason"),
    [
        ((2, 64, 64), 1, "tpu", "there is no kernel for int8 weights on tpu"),
        ((2, 24, 64), 1, "cpu", "24 outputs and 64 inputs over 1 shards are not whole tiles of 16 and 64"),
        ((2, 64, 96), 1, "cpu", "64 outputs and 96 inputs over 1 shards are not whole tiles of 16 and 64"),
        ((2, 64, 64), 2, "cpu", "64 outputs and 64 inputs over 2 shards are not whole tiles of 16 and 64"),
    ],
)
def test_unsupported_says_why(shape: tuple[int, ...], shards: int, platform: str, reason: str) -> None:
    assert unsupported(shape, shards=shards, platform=platform) == reason
