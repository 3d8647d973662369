"""The file of figures that --output_json names: looked at before anything is measured, written at the end."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from launch.flags import StartError


def output_problems(path: str | None) -> list[str]:
    """Why the file cannot be written, as far as can be told before; empty where it can, and where none is asked for."""
    if path is None or pathlib.Path(path).expanduser().parent.is_dir():
        return []
    return [f"--output_json {path!r} is in a directory that does not exist: make it first"]


def write_json(path: str | None, values: Mapping[str, Any]) -> None:
    """Writes figures to a file; nothing where None is given.

    Raises:
        StartError: it cannot be written.
    """
    if path is None:
        return
    try:
        pathlib.Path(path).expanduser().write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StartError(f"--output_json {path!r} cannot be written: {error}") from error
