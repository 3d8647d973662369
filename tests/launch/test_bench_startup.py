"""python -m launch.bench startup: phases of cold and warm starts, and what is refused."""

from __future__ import annotations

import datetime
import json
import re

import pytest
from rich.console import Console

from launch.benchmarks.startup import PHASES, StartupCase, StartupReport, run_startup
from launch.console import StageLog
from launch.flags import StartError
from tests.launch.small_engine import CACHE, small_config


def quiet() -> StageLog:
    return StageLog(Console(quiet=True))


def test_warm_start_has_all_phases_in_order_and_a_table():
    case = StartupCase(runs=1, cold_runs=0, compilation_cache_dir=str(CACHE))
    report = run_startup(case, small_config(), command="python -m launch.bench startup --x", log=quiet())
    got = json.loads(json.dumps(report.as_json()))
    (start,) = got["starts"]["warm"]
    # The pack's model comes without adapters of its own.
    assert [phase for phase in PHASES if phase in start] == [phase for phase in PHASES if phase != "adapters"]
    marks = [start[phase] for phase in PHASES if phase in start]
    assert marks == sorted(marks)
    median = got["median"]["warm"]
    assert sum(value for phase, value in median.items() if phase != "whole") == pytest.approx(median["whole"])
    text = report.as_text()
    for pattern in (
        r"^seconds, median +warm \(1\)$",
        r"^  programs +\d+\.\d\d$",
        r"^  whole +\d+\.\d\d$",
        r"^command +python -m launch\.bench startup --x$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern} is not in\n{text}"


def test_medians_are_of_phases_and_kinds_stand_side_by_side():
    warm = [{"interpreter": 0.1, "imports": 1.0 + i, "weights": 2.0 + i, "first token": 3.0 + i} for i in (0, 1, 4)]
    cold = [{"interpreter": 0.1, "imports": 1.0, "weights": 2.0, "programs": 50.0, "first token": 51.0}]
    report = StartupReport(
        model="default",
        starts={"cold": cold, "warm": warm},
        options={},
        machine={"cpu": "c", "cores": 2, "memory_bytes": 10**9},
        software={},
        command="",
        measured_at=datetime.datetime(2026, 1, 1),
    )
    wanted = {"interpreter": 0.1, "imports": 1.9, "weights": 1, "first token": 1, "whole": 4}
    assert report.phases("warm") == pytest.approx(wanted)
    text = report.as_text()
    assert re.search(r"^  programs +48\.00 +-$", text, re.MULTILINE)
    assert re.search(r"^  whole +51\.00 +4\.00$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "engine", "says"),
    [
        ({"runs": 0, "cold_runs": -1}, {}, "--runs must be at least 1, got 0; --cold_runs must be at least 0, got -1"),
        (
            {"output_json": "/nowhere/x.json"},
            {},
            "--output_json '/nowhere/x.json' is in a directory that does not exist",
        ),
        ({}, {"max_num_seqs": 0}, "max_num_seqs"),
        ({"cold_runs": 0}, {"model": "/nowhere"}, "/nowhere does not exist, and nothing is downloaded; give a "),
        ({"timeout_s": 1, "cold_runs": 0}, {}, "a start took more than 1 s: raise --timeout_s"),
    ],
)
def test_start_that_cannot_be_measured_is_refused(options, engine, says):
    with pytest.raises(StartError) as caught:
        run_startup(StartupCase(**options), small_config(**engine), command="", log=quiet())
    assert says in str(caught.value)
