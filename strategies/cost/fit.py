"""Coefficients of a calibration from measurements: non-negative least squares of relative errors.

A measurement is what ran, as quantities by flat name of a coefficient (`strategies.cost.quantities`), and the seconds
it took. Errors count relative to the measurement, so short steps weigh as much as long ones.

Source: Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Measurement(NamedTuple):
    """What ran and how long it took.

    Attributes:
        quantities: by flat name of a coefficient.
        seconds: above 0.
    """

    quantities: Mapping[str, float]
    seconds: float


class Fit(NamedTuple):
    """The result.

    Attributes:
        coefficients: seconds by flat name, 0 or more.
        errors: [measurements], (predicted - measured) / measured.
    """

    coefficients: Mapping[str, float]
    errors: np.ndarray

    @property
    def mean_error(self) -> float:
        """Mean absolute error, relative to what was measured."""
        return float(np.abs(self.errors).mean())


def fit_coefficients(measured: Sequence[Measurement], *, same: Mapping[str, str] | None = None) -> Fit:
    """The coefficients that explain measurements best.

    Args:
        measured: at least one.
        same: functions that are one and the same here, such as {"near_delta": "device_delta"} where device and pool are
            the same cores: they get one set of coefficients.

    Raises:
        ValueError: there are no measurements, or one took no time.
    """
    if not measured or min(m.seconds for m in measured) <= 0:
        raise ValueError(f"{len(measured)} measurements: at least one is needed, each of more than 0 seconds")
    same = same or {}

    def fitted(name: str) -> str:
        function, _, term = name.partition(".")
        return f"{same.get(function, function)}.{term}"

    names = sorted({name for m in measured for name in m.quantities})
    columns = {name: i for i, name in enumerate(sorted({fitted(name) for name in names}))}
    rows = np.zeros((len(measured), len(columns)))
    for row, m in zip(rows, measured, strict=True):
        for name, amount in m.quantities.items():
            row[columns[fitted(name)]] += amount / m.seconds
    # Columns differ by twenty orders of magnitude: bytes beside calls.
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    found = non_negative(rows / scale, np.ones(len(rows))) / scale
    return Fit({name: float(found[columns[fitted(name)]]) for name in names}, rows @ found - 1)


def non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x of no negative entries that minimises |a x - b|.

    Args:
        a: [M, K].
        b: [M].

    Returns:
        [K].
    """
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ b).max(initial=0.0)))
    for _ in range(3 * a.shape[1]):
        gain = np.where(free, -np.inf, a.T @ (b - a @ x))
        if gain.max(initial=-np.inf) <= tolerance:
            break
        free[gain.argmax()] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if trial[free].min(initial=1.0) > 0:
                break
            bad = free & (trial <= 0)
            with np.errstate(divide="ignore", invalid="ignore"):
                step = np.where(bad, x / (x - trial), np.inf).min()
            x = x + (step if np.isfinite(step) else 0.0) * (trial - x)
            free &= x > tolerance
            if not free.any():
                break
        x = np.where(free, trial, 0.0)
    return x
