"""python -m launch.bench first_use: from a file on disk to a first token, and what is refused."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re

import pytest
from rich.console import Console

from launch.benchmarks.first_use import FirstUseCase, run_first_use
from launch.benchmarks.first_use_report import FirstUse, FirstUseReport
from launch.console import StageLog
from launch.flags import StartError
from plora_jax.checkpoints import load_config
from tests.launch.small_engine import LLAMA, small_config

CASE = FirstUseCase(adapters=3, adapter_rank=4, prompt_tokens=12)


def quiet() -> StageLog:
    return StageLog(Console(quiet=True))


def test_each_adapter_is_read_loaded_and_asked_twice():
    report = run_first_use(CASE, small_config(), command="python -m launch.bench first_use --x", log=quiet())
    got = json.loads(json.dumps(report.as_json()))
    model = load_config(LLAMA)
    numbers = 4 * model.num_layers * sum(out + width for out, width in model.projections.values())
    assert 4 * numbers < got["file_bytes"] < 4 * numbers + 20_000
    assert len(got["measured"]) == 3
    for found in got["measured"]:
        assert 0 < found["read_s"] < found["load_s"]
        assert min(found["ttft_s"], found["resident_s"]) > 0
    text = report.as_text()
    for pattern in (
        r"^case +.*; 3 adapters of rank 4 on all-linear; prompts of 12 random tokens$",
        r"^unseen, TTFT +[\d.]+ ms: [\d.]+ to load, [\d.]+ for the request$",
        r"^command +python -m launch\.bench first_use --x$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern} is not in\n{text}"


@pytest.mark.parametrize(
    ("ttft_s", "says"),
    [(0.10, "1.90 x resident, met (under 2 wanted)"), (0.11, "2.00 x resident, NOT met (under 2 wanted)")],
)
def test_report_holds_the_time_without_the_read_to_twice_that_of_a_resident_one(ttft_s, says):
    found = FirstUse(read_s=0.02, load_s=0.11, ttft_s=ttft_s, resident_s=0.1)
    report = FirstUseReport(
        case="",
        options={},
        machine={"cpu": "c", "cores": 2, "memory_bytes": 1},
        software={},
        file_bytes=10,
        measured=[found, found._replace(ttft_s=9.0), found._replace(ttft_s=0.0)],
        command="",
        measured_at=datetime.datetime.now(datetime.UTC),
    )
    assert says in report.as_text()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"adapters": 0, "prompt_tokens": 0},
            "--adapters must be at least 1, got 0; --prompt_tokens must be at least 1",
        ),
        ({"adapter_rank": 0}, "--adapter_rank must be at least 1, got 0"),
        ({"adapter_targets": "x_proj"}, "--adapter_targets 'x_proj' names no projection of this model"),
        ({"output_json": "/nowhere/x.json"}, "--output_json '/nowhere/x.json' is in a directory that does not exist"),
    ],
)
def test_case_that_cannot_be_measured_is_refused(change, says):
    with pytest.raises(StartError) as caught:
        run_first_use(dataclasses.replace(CASE, **change), small_config(), command="", log=quiet())
    assert says in str(caught.value)
