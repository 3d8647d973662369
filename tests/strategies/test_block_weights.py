"""Products with weights of 4 bits: blocks against the gguf package, native against XLA, alone against in company."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strategies import native
from strategies.block_weights import BlockWeights, block_products, dequantize, pack, unsupported

needs_unit = pytest.mark.skipif(native.block_unit_unavailable() is not None, reason="no 8-bit products here")
TILED = pytest.mark.parametrize("tiled", [False, pytest.param(True, marks=needs_unit)])
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def _random(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def _blocks(seed: int, *shape: int) -> np.ndarray:
    """[L, O, I / 32, 20] of random weights [L, O, I], as a file has them."""
    weights = np.asarray(_random(seed, *shape))
    found = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
    return found.reshape(*shape[:2], -1, 20)


def _exact(blocks: np.ndarray) -> np.ndarray:
    flat = blocks.reshape(*blocks.shape[:-2], -1)
    return gguf.quants.dequantize(flat, gguf.GGMLQuantizationType.Q4_1)


def _multiply(x: jax.Array, weights: list[BlockWeights], layer: int = 0) -> list[np.ndarray]:
    return [np.asarray(y) for y in jax.jit(block_products)(x, weights, jnp.int32(layer))]


def test_dequantize_gives_what_the_gguf_package_does() -> None:
    blocks = _blocks(0, 2, 24, 96)
    np.testing.assert_array_equal(dequantize(jnp.asarray(blocks)), _exact(blocks))


@TILED
@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 31, 50])
def test_block_products_are_those_of_the_weights_with_rows_rounded_by_blocks(
    rows: int, dtype: str, tiled: bool
) -> None:
    x = _random(0, rows, 192, dtype=dtype) * np.geomspace(1e-3, 1e3, rows).astype(dtype)[:, None]
    blocks = [_blocks(1, 3, 80, 192), _blocks(2, 3, 16, 192)]
    found = _multiply(x, [pack(jnp.asarray(b), tiled=tiled) for b in blocks], 2)
    x_TBI = np.asarray(x, np.float64).reshape(rows, -1, 32)
    largest_TB = np.abs(x_TBI).max(-1)
    for y, b in zip(found, blocks, strict=True):
        weight = _exact(b)[2].astype(np.float64)
        assert y.dtype == np.float32
        of_block = np.abs(weight).reshape(len(weight), -1, 32).sum(-1)
        assert (np.abs(y - np.asarray(x, np.float64) @ weight.T) <= largest_TB @ of_block.T / 2 / 126).all()


@needs_unit
@DTYPES
@pytest.mark.parametrize(("rows", "out", "inputs"), [(1, 48, 32), (9, 16, 128), (32, 80, 192), (50, 96, 64)])
def test_native_block_products_are_those_of_xla(rows: int, out: int, inputs: int, dtype: str) -> None:
    x, blocks = _random(3, rows, inputs, dtype=dtype), jnp.asarray(_blocks(4, 2, out, inputs))
    x = x.at[rows // 2].set(0)
    (found,), (expected,) = (_multiply(x, [pack(blocks, tiled=tiled)], 1) for tiled in (True, False))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not found[rows // 2].any()


@needs_unit
def test_native_block_products_of_a_row_are_the_same_bits_in_any_company() -> None:
    x, weights = _random(5, 160, 1536, dtype="bfloat16"), [pack(jnp.asarray(_blocks(6, 1, 576, 1536)), tiled=True)]
    (together,) = _multiply(x, weights)
    for first, count in ((0, 8), (5, 15), (96, 32), (157, 3), (159, 1)):
        (alone,) = _multiply(x[first : first + count], weights)
        np.testing.assert_array_equal(alone, together[first : first + count])


@needs_unit
@pytest.mark.parametrize("used", [0, 1, 16, 37, 64])
def test_native_block_products_leave_out_rows_that_are_not_used(used: int) -> None:
    x, weights = _random(11, 64, 128), [pack(jnp.asarray(_blocks(12, 1, out, 128)), tiled=True) for out in (48, 64)]
    for y, whole in zip(
        block_products(x, weights, jnp.int32(0), used=jnp.int32(used)), _multiply(x, weights), strict=True
    ):
        np.testing.assert_array_equal(y[:used], whole[:used])
        assert not np.asarray(y[used:]).any()


@TILED
@DTYPES
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_block_products_contain_a_row_that_is_not_finite(bad: float, dtype: str, tiled: bool) -> None:
    x = _random(7, 32, 64, dtype=dtype).at[3, 5].set(bad)
    (y,) = _multiply(x, [pack(jnp.asarray(_blocks(8, 1, 32, 64)), tiled=tiled)])
    assert not np.isfinite(y[3]).any()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()


@TILED
def test_block_products_of_the_parts_of_a_row_add_up_to_those_of_the_row(tiled: bool) -> None:
    x, blocks = _random(9, 20, 256), jnp.asarray(_blocks(10, 1, 32, 256))
    (whole,) = _multiply(x, [pack(blocks, tiled=tiled)])
    parts = [
        _multiply(x[:, 32 * part.start : 32 * part.stop], [pack(blocks[:, :, part], tiled=tiled)])[0]
        for part in (slice(0, 4), slice(4, 8))
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "shards", "platform", "reason"),
    [
        ((2, 64, 2, 20), 1, "tpu", "there is no kernel for weights of 4 bits on tpu"),
        ((2, 24, 2, 20), 1, "cpu", "24 outputs over 1 shards are not whole tiles of 16"),
        ((2, 48, 2, 20), 2, "cpu", "48 outputs over 2 shards are not whole tiles of 16"),
    ],
)
def test_unsupported_says_why(shape: tuple[int, ...], shards: int, platform: str, reason: str) -> None:
    assert unsupported(shape, shards=shards, platform=platform) == reason
