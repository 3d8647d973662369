"""python -m launch.bench latency: the figures, the breakdown, the traces that stay, and what is refused."""

from __future__ import annotations

import json
import pathlib
import re
import statistics

import pytest
from rich.console import Console

from launch.benchmarks.latency import run_latency
from launch.benchmarks.latency_case import LatencyCase, LatencyPoint
from launch.benchmarks.latency_report import LatencyReport, decode_step_s
from launch.benchmarks.measurement import RequestRecord
from launch.console import StageLog
from launch.flags import StartError
from launch.profiling import ProfileConfig
from tests.launch.small_engine import small_config

CASE = LatencyCase(batches="1,8", adapters="0,2", prompt_tokens=20, new_tokens=12, runs=2, breakdown=True)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[LatencyReport, ProfileConfig]:
    """One real measurement that several tests look at, and where its traces are."""
    profile = ProfileConfig(profile_dir=str(tmp_path_factory.mktemp("traces") / "kept"), profile_steps=6)
    log = StageLog(Console(quiet=True))
    command = "python -m launch.bench latency --x"
    return run_latency(CASE, small_config(), profile=profile, command=command, log=log), profile


def test_points_are_each_measured_once():
    assert CASE.points == [(1, 0), (1, 1), (8, 0), (8, 2)]
    assert LatencyCase(batches="8", adapters="8,32").points == [LatencyPoint(8, 8)]


def test_report_has_a_row_a_point_and_the_machine(measured):
    report, _ = measured
    text = report.as_text()
    for pattern in (
        r"^case +prompts of 20 random tokens, 12 new tokens, greedy; synthetic adapters of rank 8,16,32,64 on all-lin",
        r"^limits +[\d.]+ GB/s from memory, \d+ GFLOP/s in products$",
        r"^ +1 +0( +[\d.]+){6}$",
        r"^ +8 +2( +[\d.]+){6}$",
        r"^compilations in traffic +0$",
        r"^command +python -m launch\.bench latency --x$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern} is not in\n{text}"
    got = json.loads(json.dumps(report.as_json()))
    assert [(p["rows"], p["adapters"]) for p in got["points"]] == [(1, 0), (1, 1), (8, 0), (8, 2)]
    assert all(0 < p["step_s"] < p["ttft_s"]["p50"] + 1 for p in got["points"])


def test_breakdown_parts_add_up_and_know_their_limits(measured):
    report, _ = measured
    unnamed: dict[str, list[float]] = {"decode": [], "prefill": []}
    for point in json.loads(json.dumps(report.as_json()))["points"]:
        by_kind = {b["title"].split()[0]: b for b in point["breakdowns"]}
        assert by_kind.keys() == {"decode", "prefill"}
        for kind, found in by_kind.items():
            parts = {part["part"]: part for part in found["parts"]}
            assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(found["traced_s"], rel=1e-3)
            assert {
                "qkv",
                "o",
                "gate_up",
                "down",
                "head",
                f"{kind}.attention",
                "host: pack",
                "host: plan",
            } <= parts.keys()
            for name in ("qkv", "gate_up", "head", f"{kind}.attention"):
                assert parts[name]["ratio"] == pytest.approx(parts[name]["seconds"] / parts[name]["limit_s"])
                assert parts[name]["bound"] in ("memory", "arithmetic")
            # Programs always ask whether any adapter is used; only where one is there is something to read.
            assert (parts[f"{kind} adapters"]["limit_s"] is not None) == (point["adapters"] > 0)
            unnamed[kind].append(sum(part["share"] for name, part in parts.items() if name.startswith("unnamed")))
    # In most of the points: a machine that is busy elsewhere may hold up any one part of a step of microseconds.
    assert {kind: statistics.median(shares) < 0.2 for kind, shares in unnamed.items()} == dict.fromkeys(unnamed, True)


def test_breakdown_shows_every_part_from_5_percent_on(measured):
    report, _ = measured
    breakdown = report.results[-1].breakdowns[0]
    lines = breakdown.as_lines()
    for part in breakdown.parts:
        own = [line for line in lines if line.startswith(f"  {part.part} ")]
        assert len(own) == (part.share >= 0.05), part


def test_traces_stay_where_they_were_asked_for(measured):
    _, profile = measured
    folder = pathlib.Path(profile.profile_dir or "")
    assert sorted(path.name for path in folder.iterdir()) == [
        "1-requests-0-adapters",
        "1-requests-1-adapters",
        "8-requests-0-adapters",
        "8-requests-2-adapters",
    ]
    assert list((folder / "8-requests-2-adapters" / "decode").rglob("*.trace.json.gz"))


def test_decode_step_counts_only_gaps_in_which_all_decode():
    early = RequestRecord(4, 4, 0.0, [1.0, 1.5, 3.0, 3.2])
    late = RequestRecord(4, 3, 0.0, [2.0, 3.0, 3.2])
    assert decode_step_s([early, late]) == pytest.approx(0.2)
    assert decode_step_s([late._replace(piece_s=[2.0])]) != decode_step_s([early])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batches": "8,0"}, "--batches '8,0' must be whole numbers of 1 or more with commas, such as 1,32"),
        ({"adapters": "x"}, "--adapters 'x' must be whole numbers of 0 or more with commas, such as 0,32"),
        ({"new_tokens": 2, "runs": 0}, "--new_tokens must be at least 8, got 2; --runs must be at least 1, got 0"),
        ({"adapter_ranks": "8,0"}, "--adapter_ranks '8,0' must be whole numbers above 0 with commas, such as 8,16"),
        ({"output_json": "/nowhere/x.json"}, "--output_json '/nowhere/x.json' is in a directory that does not exist"),
    ],
)
def test_case_that_cannot_be_measured_is_refused(options, says):
    with pytest.raises(StartError) as caught:
        LatencyCase(**options).validate()
    assert says in str(caught.value)


def test_profile_dir_that_cannot_be_made_is_refused_before_anything_is_loaded():
    profile = ProfileConfig(profile_dir="/proc/x")
    with pytest.raises(StartError, match="--profile_dir '/proc/x' cannot be made: "):
        run_latency(
            LatencyCase(),
            small_config(model="/nowhere"),
            profile=profile,
            command="",
            log=StageLog(Console(quiet=True)),
        )
