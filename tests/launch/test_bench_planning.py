"""python -m launch.bench planning: how long plans take, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from rich.console import Console

from launch.benchmarks.planning import PlanningCase, run_planning
from launch.benchmarks.planning_report import PlanningReport
from launch.console import StageLog
from launch.flags import StartError
from tests.launch.small_engine import LLAMA

CASE = PlanningCase(
    model=str(LLAMA),
    hardware="cpu,paper",
    adapters=40,
    adapter_ranks="4,8",
    streams=6,
    prompt_tokens=8,
    new_tokens=6,
    plan_interval_steps=4,
    warmup_choices=3,
    choices=5,
    repeats=1,
)


def measured(**changes: object) -> PlanningReport:
    case = dataclasses.replace(CASE, **changes)
    return run_planning(case, command="python -m launch.bench planning --x", log=StageLog(Console(quiet=True)))


def test_every_choice_is_solved_in_full_and_from_the_one_before():
    report = measured()
    got = json.loads(json.dumps(report.as_json()))
    assert list(got["choices"]) == ["cpu", "paper"]
    for choices in got["choices"].values():
        assert len(choices) == 5
        for choice in choices:
            assert 1 <= choice["active"] <= 6
            assert choice["active"] <= choice["with_work"] <= 40
            assert min(choice["full_s"], choice["incremental_s"], choice["decision_s"]) > 0
            assert choice["full_over_bound"] >= -1e-9
            assert choice["incremental_over_full"] >= 0
    assert any(c["with_work"] > c["active"] for c in got["choices"]["cpu"]), "nobody was remembered"
    text = report.as_text()
    for pattern in (
        r"^plans for +adapters active +with work +full, ms +incremental, ms +decision, ms$",
        r"^paper( +[\d.]+, [\d.]+){5}$",
        r"^plans for cpu +full .*% over bound on average, .* at worst; incremental .*% over full, .* at worst$",
        r"^command +python -m launch\.bench planning --x$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern} is not in\n{text}"


def test_same_traffic_has_the_same_problems():
    once, again, other = (
        [(choice.active, choice.with_work) for choice in measured(hardware="cpu", seed=seed).choices["cpu"]]
        for seed in (0, 0, 1)
    )
    assert once == again != other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapters": 0, "repeats": 0}, "--adapters must be at least 1, got 0; --repeats must be at least 1, got 0"),
        ({"traffic": "rush"}, "--traffic 'rush' is unknown: choose from uniform, skewed, drifting"),
        ({"adapter_ranks": "8,x"}, "--adapter_ranks '8,x' must be whole numbers above 0 with commas, such as 8,16"),
        ({"hardware": ","}, "--hardware is empty: name at least one"),
        ({"hardware": "abacus"}, "hardware 'abacus' is unknown: choose paper,"),
        ({"adapter_targets": "q_proj,wings"}, "--adapter_targets 'wings' is unknown: choose from q_proj,"),
        ({"model": "/nowhere/model"}, "/nowhere/model"),
    ],
)
def test_case_that_cannot_be_is_refused(changes, message):
    with pytest.raises(StartError) as refused:
        measured(**changes)
    assert message in str(refused.value)
