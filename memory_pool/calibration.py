"""What the functions of a step were measured to take on one machine: a sum of terms each, fitted to measurements.

A cost model knows how many calls, bytes and FLOPs a function has in a step; here are the seconds of each. Part of a
hardware file, under "calibration": `HardwareSpec.calibration`. A term that a function has no use for is 0.

    {"device_delta": {"call_s": 2e-5, "byte_s": 4e-11, "flop_s": 2e-11}, ..., "source": "2 cores, 2026-11-29"}

Coefficients have flat names such as "device_delta.byte_s", which is what a fit works with.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from memory_pool.figures import HardwareError, check_figures, checked_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionCost:
    """Seconds that a function takes, by what it works on. They add up.

    Attributes:
        call_s: of each call, whatever is in it.
        piece_s: of each adapter's matrix, or each sequence, in a call.
        byte_s: of each byte of A, B, keys, values or base weights, read once; of a link, each byte that crosses.
        again_byte_s: of each byte of A and B that a kernel reads again from the cache, for more tokens.
        flop_s: of each FLOP.
        operand_byte_s: of each byte of the rows that it takes and gives.
    """

    call_s: float = 0.0
    piece_s: float = 0.0
    byte_s: float = 0.0
    again_byte_s: float = 0.0
    flop_s: float = 0.0
    operand_byte_s: float = 0.0

    def __post_init__(self) -> None:
        check_figures(self, not_negative=TERMS)


TERMS = tuple(field.name for field in dataclasses.fields(FunctionCost))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The measured functions of a machine.

    Attributes:
        device_delta: A and B of device pages, by the device.
        device_expand: B of device pages, by the device.
        device_chunk: a chunk of streamed rank components, by the device.
        near_delta: A and B near the data.
        near_shrink: A near the data.
        near_rows: rows of A and B, or pages of KV, gathered to be streamed.
        device_attention: keys and values of device pages, by the device.
        near_attention: keys and values near the data.
        merge: partial attention of pool devices or rounds, added up by the device.
        to_pool: a crossing to the pool.
        to_device: a crossing to the device.
        lanes: the lanes of a phase, also empty ones, and their sum.
        matmul: products with base weights.
        base_steps: by name of a base model, (tokens, seconds) of steps whose lanes are all empty and that have next to
            no context, in order of tokens; a model that is not here has the seconds of `matmul` and `lanes`.
        source: machine, date and error of the fit, in words.
    """

    device_delta: FunctionCost
    device_expand: FunctionCost
    device_chunk: FunctionCost
    near_delta: FunctionCost
    near_shrink: FunctionCost
    near_rows: FunctionCost
    device_attention: FunctionCost
    near_attention: FunctionCost
    merge: FunctionCost
    to_pool: FunctionCost
    to_device: FunctionCost
    lanes: FunctionCost
    matmul: FunctionCost
    base_steps: Mapping[str, Sequence[tuple[float, float]]] = dataclasses.field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        for name, points in self.base_steps.items():
            tokens = [point[0] for point in points]
            if not points or any(len(point) != 2 or point[1] <= 0 for point in points) or tokens != sorted(set(tokens)):
                raise HardwareError(
                    f"base_steps of {name} must be pairs of tokens, growing, and seconds above 0, got {points!r}"
                )

    def coefficient(self, name: str) -> float:
        """Seconds of a flat name such as "device_delta.byte_s"."""
        function, _, term = name.partition(".")
        return getattr(getattr(self, function), term)

    @functools.cached_property
    def coefficients(self) -> Mapping[str, float]:
        """All coefficients by flat name."""
        return {name: self.coefficient(name) for name in COEFFICIENTS}


FUNCTIONS = tuple(f.name for f in dataclasses.fields(Calibration) if f.name not in ("base_steps", "source"))
COEFFICIENTS = tuple(f"{function}.{term}" for function in FUNCTIONS for term in TERMS)


def calibration_of(
    coefficients: Mapping[str, float],
    *,
    base_steps: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    source: str = "",
) -> Calibration:
    """A calibration from the result of a fit.

    Args:
        coefficients: seconds by flat name; those that are absent are 0.
        base_steps: as `Calibration` has it.
        source: in words.

    Raises:
        HardwareError: a name is unknown, or a coefficient is negative.
    """
    if unknown := sorted(set(coefficients) - set(COEFFICIENTS)):
        raise HardwareError(
            f"coefficient {', '.join(unknown)} is unknown: functions are {', '.join(FUNCTIONS)}, "
            f"terms {', '.join(TERMS)}, joined by a dot"
        )
    functions = {
        name: FunctionCost(**{term: float(coefficients.get(f"{name}.{term}", 0.0)) for term in TERMS})
        for name in FUNCTIONS
    }
    return Calibration(**functions, base_steps=base_steps or {}, source=source)


def calibration_from_json(values: Any) -> Calibration:
    """The calibration of a hardware file.

    Raises:
        HardwareError: a field is missing, unknown or not of its kind.
    """
    fields = dict(checked_fields(Calibration, values, what="calibration"))
    for name in FUNCTIONS:
        fields[name] = FunctionCost(**checked_fields(FunctionCost, fields[name], what=f"calibration {name}"))
    steps = fields.get("base_steps", {})
    if not isinstance(steps, Mapping):
        raise HardwareError(f"base_steps must be an object of lists by name of a model, got {steps!r}")
    fields["base_steps"] = {name: tuple(tuple(point) for point in points) for name, points in steps.items()}
    return Calibration(**fields)
