"""Measured costs in a hardware file."""

from __future__ import annotations

import dataclasses
import json

import pytest

from memory_pool.calibration import COEFFICIENTS, FUNCTIONS, calibration_from_json, calibration_of
from memory_pool.hardware import HARDWARE, HardwareError, parse_hardware, save_hardware

MEASURED = calibration_of(
    {name: i * 1e-12 for i, name in enumerate(COEFFICIENTS)},
    base_steps={"default": ((8, 0.01), (32, 0.02))},
    source="here",
)


def test_hardware_file_keeps_a_calibration(tmp_path):
    measured = dataclasses.replace(HARDWARE["cpu"], calibration=MEASURED)
    save_hardware(measured, tmp_path / "mine.json")
    assert parse_hardware(str(tmp_path / "mine.json")) == measured


def test_hardware_without_a_calibration_writes_none(tmp_path):
    save_hardware(HARDWARE["paper"], tmp_path / "paper.json")
    assert "calibration" not in json.loads((tmp_path / "paper.json").read_text())
    assert parse_hardware(str(tmp_path / "paper.json")).calibration is None


def test_coefficients_go_by_flat_names():
    assert MEASURED.coefficient("device_delta.piece_s") == MEASURED.device_delta.piece_s == 1e-12
    assert calibration_of(MEASURED.coefficients).matmul == MEASURED.matmul
    assert set(FUNCTIONS) >= {"near_shrink", "device_expand", "to_pool", "to_device", "near_rows"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"warp": {}}, "calibration has warp, which is unknown: allowed are device_delta"),
        ({"matmul": {"flops": 1}}, "calibration matmul has flops, which is unknown: allowed are call_s, piece_s"),
        ({"matmul": {"flop_s": -1}}, "flop_s -1 of a FunctionCost must be a finite number, 0 or more"),
        ({"base_steps": {"m": [[8, 1.0], [4, 2.0]]}}, "base_steps of m must be pairs of tokens, growing"),
        ({"base_steps": [1]}, r"base_steps must be an object of lists by name of a model, got \[1\]"),
    ],
)
def test_calibration_that_cannot_be_is_refused(change, says):
    with pytest.raises(HardwareError, match=says):
        calibration_from_json({**dataclasses.asdict(MEASURED), **change})


def test_calibration_that_lacks_a_function_says_which():
    values = dataclasses.asdict(MEASURED)
    del values["merge"]
    with pytest.raises(HardwareError, match=r"calibration lacks merge: it has device_delta, .* at least"):
        calibration_from_json(values)


def test_unknown_coefficient_is_refused():
    with pytest.raises(
        HardwareError, match=r"coefficient matmul\.watts is unknown: functions are device_delta.*terms call_s"
    ):
        calibration_of({"matmul.watts": 1.0})
