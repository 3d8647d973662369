"""Adapters in integers: how near they are, what does not matter to them, zeros and numbers that are not finite."""

from typing import NamedTuple

import numpy as np
import pytest

from memory_pool.int8_adapters import LARGEST, quantize_matrices, quantize_modules


class Matrices(NamedTuple):
    a: np.ndarray
    b: np.ndarray
    scale: float


def make(seed=0, *, rank=16, inputs=96, outputs=208):
    rng = np.random.default_rng(seed)
    return Matrices(
        rng.normal(size=(rank, inputs)).astype(np.float32), rng.normal(size=(outputs, rank)).astype(np.float32), 0.5
    )


def product(m):
    return m.scale * (m.b.astype(np.float64) @ m.a.astype(np.float64))


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_integers_stand_for_the_product_but_for_one_or_two_hundredths(rank):
    m = make(rank=rank)
    q = quantize_matrices(m)
    assert (q.a.dtype, q.b.dtype, q.a.shape, q.b.shape) == (np.int8, np.int8, m.a.shape, m.b.shape)
    assert np.abs(q.a).max(axis=1).tolist() == [LARGEST] * rank
    assert np.abs(q.b).max() == LARGEST
    error = np.linalg.norm(product(q) - product(m)) / np.linalg.norm(product(m))
    assert 0.002 < error < 0.02


def test_how_a_component_is_divided_between_its_row_and_its_column_does_not_matter():
    m = make()
    factors = np.float32(2) ** np.arange(-8, 8)
    other = Matrices(m.a * factors[:, None], m.b / factors, m.scale)
    q, same = quantize_matrices(m), quantize_matrices(other)
    np.testing.assert_array_equal(q.a, same.a)
    np.testing.assert_array_equal(q.b, same.b)
    assert q.scale == same.scale


def test_matrices_of_zeros_and_rows_of_zeros_stay_zeros():
    m = make()
    m.a[3] = 0
    q = quantize_matrices(m)
    assert not q.a[3].any()
    assert not q.b[:, 3].any(), "what nothing is multiplied with takes no steps from the others"
    for tiny in (1e-31, 1e-42):
        m.a[3] = tiny
        same = quantize_matrices(m)
        np.testing.assert_array_equal(same.a, q.a)
        np.testing.assert_array_equal(same.b, q.b)
    nothing = quantize_matrices(Matrices(m.a, np.zeros_like(m.b), 1.0))
    assert not nothing.b.any()
    assert product(nothing).tolist() == np.zeros(product(m).shape).tolist()
    assert quantize_matrices(Matrices(m.a[:0], m.b[:, :0], 1.0)).a.shape == (0, 96)


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_make_the_factor_nan(side, bad):
    modules = {"sick": make(), "well": make()}
    getattr(modules["sick"], side)[2, 5] = bad
    found = quantize_modules(modules)
    assert np.isnan(found["sick"].scale)
    assert np.isfinite(found["well"].scale)
