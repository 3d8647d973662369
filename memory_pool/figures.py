"""How figures of hardware are checked, and how they are read from plain values: the same words for every spec."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


class HardwareError(ValueError):
    """Hardware that is not known or cannot be; says in one line what is allowed."""


def check_figures(spec: Any, *, positive: tuple[str, ...] = (), not_negative: tuple[str, ...] = ()) -> None:
    """Refuses figures of a dataclass that cannot be.

    Raises:
        HardwareError: one is no finite number, or too small.
    """
    for name in (*positive, *not_negative):
        value = getattr(spec, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (name in positive and value == 0):
            least = "above 0" if name in positive else "0 or more"
            raise HardwareError(f"{name} {value!r} of a {type(spec).__name__} must be a finite number, {least}")


def checked_fields(spec: Any, values: Any, *, what: str) -> Mapping[str, Any]:
    """The values for a dataclass's fields, as they are.

    Args:
        spec: the dataclass.
        values: by field name.
        what: the spec in words.

    Raises:
        HardwareError: a field is missing or unknown; names those that are allowed.
    """
    fields = {field.name: field for field in dataclasses.fields(spec)}
    if not isinstance(values, Mapping):
        raise HardwareError(f"{what} must be an object with {', '.join(fields)}, got {values!r}")
    needed = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in needed if name not in values]:
        raise HardwareError(f"{what} lacks {', '.join(missing)}: it has {', '.join(needed)} at least")
    if unknown := [name for name in values if name not in fields]:
        raise HardwareError(f"{what} has {', '.join(unknown)}, which is unknown: allowed are {', '.join(fields)}")
    return values
