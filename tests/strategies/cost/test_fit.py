"""Non-negative least squares of relative errors."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize

from memory_pool.calibration import calibration_of
from strategies.cost import Measurement, fit_coefficients, lane_quantities, predicted_s
from strategies.cost.fit import non_negative
from tests.strategies.cost.models import STRATEGIES, all_ranks, model, some_calibration

SHAPE = model("SmolLM2-135M-Instruct")


@pytest.mark.parametrize("seed", range(20))
def test_non_negative_least_squares_equals_scipys(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(12, 7)), rng.normal(size=12)
    want, _ = optimize.nnls(a, b)
    assert non_negative(a, b) == pytest.approx(want, abs=1e-8)


def test_dependent_columns_do_not_break_the_fit():
    a = np.array([[1.0, 2.0, 1.0], [2.0, 4.0, 1.0], [3.0, 6.0, 1.0]])
    x = non_negative(a, np.array([3.0, 5.0, 7.0]))
    assert (x >= 0).all()
    assert a @ x == pytest.approx([3, 5, 7])


def grid():
    """The benchmark's grid of rank, tokens per adapter and adapters."""
    for rank in (8, 16, 64):
        for tokens in (1, 4):
            for count in (8, 32):
                yield all_ranks(SHAPE, [rank] * count), np.full(count, float(tokens)), max(8, tokens * count)


def test_calibration_is_found_again_from_the_benchmarks_grid():
    """Terms that the grid cannot tell apart may differ; what it predicts must not, noise of 3 % included."""
    truth, rng = some_calibration(), np.random.default_rng(3)
    measured, exact = [], []
    for features, tokens, rows in grid():
        for strategy in STRATEGIES:
            quantities = lane_quantities(SHAPE, features, tokens, strategy=strategy, rows=rows)
            exact.append(predicted_s(truth, quantities))
            measured.append(Measurement(quantities, exact[-1] * rng.normal(1, 0.03)))
    fit = fit_coefficients(measured)
    found = calibration_of(fit.coefficients)
    predicted = [predicted_s(found, m.quantities) for m in measured]
    assert predicted == pytest.approx(exact, rel=0.06)
    assert fit.mean_error < 0.03
    assert min(fit.coefficients.values()) >= 0


def test_functions_that_are_one_get_one_set_of_coefficients():
    measured = [
        Measurement({"device_delta.call_s": 1, "device_delta.byte_s": 100}, 3.0),
        Measurement({"near_delta.call_s": 1, "near_delta.byte_s": 300}, 7.0),
    ]
    fit = fit_coefficients(measured, same={"near_delta": "device_delta"})
    assert fit.coefficients["near_delta.byte_s"] == fit.coefficients["device_delta.byte_s"] == pytest.approx(0.02)
    assert fit.errors == pytest.approx([0, 0], abs=1e-9)


def test_measurements_without_time_are_refused():
    with pytest.raises(ValueError, match="1 measurements: at least one is needed, each of more than 0 seconds"):
        fit_coefficients([Measurement({"matmul.call_s": 1}, 0.0)])
