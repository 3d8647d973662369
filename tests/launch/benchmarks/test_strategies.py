"""The strategies benchmark on a tiny grid: figures that can be, bytes as the formulas say, and what stops it."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re

import pytest
from rich.console import Console

from launch import bench
from launch.benchmarks.strategies import StrategiesCase, run_strategies
from launch.benchmarks.strategy_programs import LoraPoint
from launch.benchmarks.strategy_report import StrategiesReport, Timing
from launch.console import StageLog
from launch.flags import StartError
from memory_pool.auditing import LinkTraffic
from memory_pool.hardware import HARDWARE, save_hardware
from plora_jax.checkpoints import load_config
from strategies.low_rank import CHUNK_ROWS
from tests.strategies.cost.models import some_calibration

LLAMA = pathlib.Path(__file__).parents[2] / "data" / "conformance" / "models" / "llama"
CASE = StrategiesCase(
    model=str(LLAMA),
    ranks="40",
    tokens_per_adapter="1,4",
    adapters="3",
    contexts="40",
    sequences=2,
    dtype="float32",
    runs=2,
    data_mb=2,
)
ITEM, WORD = 4, 4
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


@pytest.fixture(scope="module")
def report() -> StrategiesReport:
    """One real measurement that several tests look at."""
    return run_strategies(CASE, command="python -m launch.bench strategies --x", log=StageLog(Console(quiet=True)))


@pytest.fixture(scope="module")
def points(report) -> dict[tuple[int, int, int], dict[str, dict]]:
    """Programs by name of each point of rank, tokens and adapters, as the file has them."""
    got = json.loads(json.dumps(report.as_json()))["points"]
    return {
        (p["rank"], p["tokens_per_adapter"], p["adapters"]): {program["program"]: program for program in p["programs"]}
        for p in got
        if "rank" in p
    }


def test_strategies_times_every_program_on_every_point(points):
    assert set(points) == {(40, 1, 3), (40, 4, 3)}
    for programs in points.values():
        assert list(programs) == ["resident", "fetch", "near_data", "split", "shrink", "expand", "delta"]
        for program in programs.values():
            assert len(program["runs_s"]) == 2
            assert all(seconds > 0 for seconds in program["runs_s"])
            assert min(program["runs_s"]) <= program["median_s"] <= max(program["runs_s"])
            assert program["data_bytes_per_s"] == pytest.approx(program["data_bytes"] / program["median_s"])
            assert program["share_of_memory_read"] > 0


def test_strategies_data_bytes_are_those_of_the_matrices(points):
    config = load_config(LLAMA)
    inputs = sum(width_in for _, width_in in config.projections.values())
    outputs = sum(width_out for width_out, _ in config.projections.values())
    for (rank, _, adapters), programs in points.items():
        components = rank * adapters * config.num_layers * ITEM
        assert programs["shrink"]["data_bytes"] == components * inputs
        assert programs["expand"]["data_bytes"] == components * outputs
        for name in ("delta", "resident", "fetch", "near_data", "split"):
            assert programs[name]["data_bytes"] == components * (inputs + outputs)


def test_strategies_link_bytes_are_those_of_the_formulas(points):
    config = load_config(LLAMA)
    shapes, layers = config.projections, config.num_layers
    x_numbers = layers * sum(shapes[group[0]][1] for group in GROUPS)
    y_numbers = layers * sum(width_out for width_out, _ in shapes.values())
    row_numbers = layers * sum(map(sum, shapes.values()))
    calls = layers * len(GROUPS) * WORD
    for (rank, tokens, adapters), programs in points.items():
        served, rows, chunks = tokens * adapters, max(8, tokens * adapters), math.ceil(rank * adapters / CHUNK_ROWS)
        link = {name: program["link_bytes"] for name, program in programs.items() if "link_bytes" in program}
        assert link["resident"]["moved"]["to_device"] == link["resident"]["useful"]["to_device"] == 0
        to_device = {
            "fetch": (chunks * CHUNK_ROWS * row_numbers, rank * adapters * row_numbers),
            "near_data": (rows * y_numbers, served * y_numbers),
            "split": (rows * rank * layers * len(shapes), served * rank * layers * len(shapes)),
        }
        tables = link["resident"]["moved"]["to_pool"]
        for name, (moved, useful) in to_device.items():
            assert link[name]["moved"]["to_device"] == moved * ITEM, name
            assert link[name]["useful"]["to_device"] == useful * ITEM, name
            assert link[name]["moved"]["to_pool"] >= link[name]["useful"]["to_pool"] > 0, name
        for name in ("near_data", "split"):
            assert link[name]["moved"]["to_pool"] == rows * x_numbers * ITEM + calls + tables, name
        # The layer's and the chunk's number, once for A and once for B.
        assert link["fetch"]["moved"]["to_pool"] == chunks * layers * len(shapes) * 2 * 2 * WORD + tables


def test_strategies_attention_reads_the_context_of_every_sequence(report):
    config = load_config(LLAMA)
    (timing,) = report.results[-1].timings
    assert timing.program == "partial attention"
    assert timing.data_bytes == config.num_layers * 2 * 40 * 2 * config.num_kv_heads * config.head_dim * ITEM
    assert timing.moved is None
    assert all(seconds > 0 for seconds in timing.runs_s)
    assert "link_bytes" not in timing.as_json()


def test_report_says_the_machine_the_grid_and_the_shares(report):
    text = report.as_text()
    for pattern in (
        r"^case +2 points of rank x tokens x adapters on 7 projections and 1 of context with 2 sequences, ",
        r"^hardware +\S.*, \d+ cores, ",
        r"^backend +cpu: .*link bytes are emulated",
        r"^kernels +shrink \w+, expand \w+, delta \w+, ",
        r"^cold data +[\d.]+ MB of pages in turn; last-level cache ",
        r"^memory read +[\d.]+ GB/s \(median; [\d.]+ to [\d.]+\)$",
        r"^rank  tokens each  adapters +resident +fetch +near_data +split$",
        r"^ +40 +4 +3( +[\d.]+){8}$",
        r"^rank  tokens each  adapters +shrink +expand +shrink\+expand$",
        r"^ +40 +1 +3( +[\d.]+ +\d+%){3}$",
        r"^ +40 +2 +[\d.]+ +\d+%$",
        r"^command +python -m launch\.bench strategies --x$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern} is not in\n{text}"
    got = report.as_json()
    assert got["memory_read_bytes_per_s"]["median"] > 0
    assert got["cycled_bytes"] >= 2 * 2**20


def test_hardware_file_is_held_against_what_is_measured(tmp_path):
    hardware = dataclasses.replace(HARDWARE["cpu"], calibration=some_calibration())
    save_hardware(hardware, tmp_path / "x.json")
    case = dataclasses.replace(CASE, tokens_per_adapter="1", runs=1, hardware=str(tmp_path / "x.json"))
    report = run_strategies(case, command="", log=StageLog(Console(quiet=True)))
    got = json.loads(json.dumps(report.as_json()))["predicted"]
    (point,) = got["points"]
    measured = {program["program"]: program["median_s"] for program in report.as_json()["points"][0]["programs"]}
    for name, seconds in point["predicted_s"].items():
        assert got["mape"][name] == pytest.approx(abs(seconds / measured[name] - 1))
    for choice in point["choices"]:
        assert choice["measured_s"] / choice["best_fixed_s"] == got["regret"][choice["budget"]]["worst"]
    (attention,) = got["attention"]
    (timed,) = [p for result in report.as_json()["points"] if "context" in result for p in result["programs"]]
    assert attention["measured_s"] == timed["median_s"]
    assert got["attention_mape"] == pytest.approx(abs(attention["predicted_s"] / attention["measured_s"] - 1))
    text = report.as_text()
    assert re.search(r"^ +40 +2 +[\d.]+ +[-+]\d+%$", text, re.MULTILINE), text
    assert re.search(r"^regret, worst +[\d.]+ +[\d.]+$", text, re.MULTILINE), text
    assert re.search(r"^MAPE( +[\d.]+%){4}$", text, re.MULTILINE), text


def test_share_is_the_median_over_runs_of_the_rate_beside_its_own_read():
    timing = Timing("shrink", 100, (1.0, 2.0, 4.0), (200.0, 50.0, 100.0), LinkTraffic(1, 2, 3), LinkTraffic(1, 1, 3))
    # 100 / 1 / 200, 100 / 2 / 50, 100 / 4 / 100.
    assert timing.share == 0.5
    assert timing.bytes_per_s == 50.0
    assert timing.as_json()["link_bytes"]["useful"] == {"to_device": 1, "to_pool": 1}


def test_smallest_step_has_eight_rows():
    assert LoraPoint(8, 1, 3).rows == 8
    assert LoraPoint(8, 4, 3).rows == 12


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ranks": "8,x"}, "--ranks '8,x' must be whole numbers above 0 with commas, such as 8,16"),
        ({"adapters": "0"}, "--adapters '0' must be whole numbers above 0"),
        ({"contexts": ","}, "--contexts ',' must be whole numbers above 0"),
        ({"runs": 0}, "--runs must be at least 1, got 0"),
        ({"dtype": "int8"}, "--dtype 'int8' is unknown; choose bfloat16, float16, float32"),
        ({"phase": "both"}, "--phase 'both' is unknown; choose decode, prefill"),
        ({"output_json": "/nowhere/x.json"}, "--output_json '/nowhere/x.json' is in a directory that does not exist"),
        ({"model": "/nowhere"}, "/nowhere does not exist"),
        ({"hardware": "x.json"}, "--hardware 'x.json': hardware 'x.json' is unknown: choose "),
        ({"hardware": "paper"}, "--hardware 'paper': hardware paper has no calibration: measure it with python -m"),
    ],
)
def test_strategies_case_that_cannot_be_is_refused(changes, says):
    with pytest.raises(StartError) as caught:
        run_strategies(dataclasses.replace(CASE, **changes), command="", log=StageLog(Console(quiet=True)))
    assert says in str(caught.value)


def test_bench_knows_the_benchmark():
    assert "strategies" in bench.BENCHMARKS
    assert "launch.bench strategies --ranks=16,64" in (bench.BENCHMARKS["strategies"].guide or "")
