"""python -m launch.bench policies: one small run of everything, the report's verdict, and what stops it."""

import dataclasses
import datetime
import json
import re

import pytest
from rich.console import Console

from launch.benchmarks.policies import run_policies
from launch.benchmarks.policies_case import POLICIES, PoliciesCase
from launch.benchmarks.policies_figures import RunFigures
from launch.benchmarks.policies_report import Measured, PoliciesReport
from launch.benchmarks.policies_traffic import KINDS
from launch.benchmarks.report import System
from launch.console import StageLog
from launch.flags import StartError
from plora_jax.checkpoints import load_config
from tests.launch.small_engine import LLAMA, small_config
from tests.launch.test_bench import bench_command

CASE = PoliciesCase(
    adapters=10,
    adapter_ranks="4,8",
    device_adapter_mb=1,
    concurrency=4,
    prompt_tokens=5,
    new_tokens=8,
    requests=28,
    warmup_requests=4,
    drift_requests=8,
    runs=1,
)
ENGINE = small_config(plan_interval_steps=2)


def quiet():
    return StageLog(Console(quiet=True))


@pytest.fixture(scope="module")
def report():
    return run_policies(CASE, ENGINE, command="python -m launch.bench policies --x", log=quiet())


def test_every_policy_is_measured_under_every_traffic(report):
    got = json.loads(json.dumps(report.as_json()))
    assert [(m["traffic"], m["policy"]) for m in got["measured"]] == [(t, p) for t in KINDS for p in POLICIES]
    assert got["compilations_in_traffic"] == 0
    by_name = {(m["traffic"], m["policy"]): m["median"] for m in got["measured"]}
    for run in (run for m in got["measured"] for run in m["runs"]):
        assert sum(run["by_strategy"].values()) == pytest.approx(1)
    for (traffic, policy), run in by_name.items():
        assert 0 < run["itl_p50_s"] <= run["itl_p99_s"]
        assert run["itl_s"] <= run["latency_s"]
        if policy in run["by_strategy"]:
            assert run["by_strategy"][policy] == 1, "there is room for all"
            assert run["on_device"] == (policy in ("resident", "split"))
        assert (run["first_quarter"] is not None) == (traffic == "drifting")
    for traffic in KINDS:
        tokens = [by_name[traffic, policy]["tokens"] for policy in POLICIES]
        assert max(tokens) < 1.1 * min(tokens), "the requests are the same; where exactly the measured part ends is not"
    assert by_name["skewed", "lru"]["plans"] > 0
    assert by_name["skewed", "lru"]["on_device"] > 0.2
    assert by_name["skewed", "near_data"]["on_device"] == 0
    assert by_name["skewed", "fetch"]["link_bytes_per_token"] > by_name["skewed", "resident"]["link_bytes_per_token"]


def test_report_has_a_table_for_each_traffic_and_a_verdict(report):
    text = report.as_text()
    for pattern in (
        r"^case +10 synthetic adapters, rank 4, 8 on q_proj,v_proj, 1 MB of device memory for them; 4 streams, 28 ",
        r"^planner +joint, for hardware .*, cost model \w+$",
        *(rf"^{kind} traffic\npolicy +ms +over auto" for kind in KINDS),
        *(rf"^{policy} +\d+\.\d\d +\d\.\d{{3}} " for policy in POLICIES),
        r"^  auto: \d+ plans of \d+\.\d ms, \d+ pages copied, a decode step predicted \d+\.\d\d ms, measured \d+\.\d",
        r"^  lru: of tokens of popular adapters \d+ % were read on the device in first quarters of periods, \d+ % in",
        *(rf"^verdict {kind}: auto is " for kind in KINDS),
        r"^verdict regret: \d\.\d{3} on average and \d\.\d{3} at worst, (NOT )?met \(at most 1.05 and 1.2 wanted\)$",
        r"^compilations in traffic +0$",
        r"^command +python -m launch\.bench policies --x$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern} is not in\n{text}"
    assert "  resident: " not in text


def run_of(ms: float, all_ms: float | None = None) -> RunFigures:
    numbers = dict.fromkeys(RunFigures._fields, 1.0)
    numbers |= {"latency_s": ms / 1e3, "all_latency_s": (all_ms or ms) / 1e3, "plans": 0, "first_quarter": None}
    return RunFigures(**numbers | {"by_strategy": dict.fromkeys(("resident", "fetch", "near_data", "split"), 0.25)})


def report_of(**by_traffic: dict[str, float]) -> PoliciesReport:
    def measured(traffic: str, policy: str, of: dict[str, float]) -> Measured:
        beside = (run_of(of["auto"]),) if "auto" in of else ()
        return Measured(traffic, policy, (run_of(of[policy]),), beside)

    return PoliciesReport(
        case="",
        options={},
        system=System("m"),
        planning="joint",
        machine={"cpu": "c", "cores": 2, "memory_bytes": 1},
        software={},
        measured=[measured(traffic, policy, of) for traffic, of in by_traffic.items() for policy in of],
        compilations=0,
        command="",
        measured_at=datetime.datetime.now(datetime.UTC),
    )


def test_verdict_holds_auto_to_all_policies_and_to_the_best_fixed_one():
    made = report_of(
        uniform={"auto": 10, "lru": 9.8, "split": 12, "fetch": 20},
        skewed={"auto": 10, "lru": 9, "split": 8},
        drifting={"auto": 10, "paper": 11, "split": 20, "far": 1},
    )
    lines = made.as_text().splitlines()
    assert "verdict uniform: auto is 2.0 % above the lowest, met (at most 3 % wanted)" in lines
    assert "verdict skewed: auto is 25.0 % above the lowest, NOT met (at most 3 % wanted)" in lines
    assert "verdict drifting: auto is lowest, met (at most 3 % wanted)" in lines
    assert made.regrets == pytest.approx({"uniform": 10 / 12, "skewed": 1.25, "drifting": 0.5})
    assert "verdict regret: 0.861 on average and 1.250 at worst, NOT met (at most 1.05 and 1.2 wanted)" in lines
    assert "verdict: there is nothing to hold auto to" in report_of(uniform={"lru": 1}).as_text()


def test_slow_minute_of_the_machine_does_not_count_against_a_policy():
    runs, beside = ((run_of(10), run_of(22), run_of(11)), (run_of(10), run_of(20), run_of(10)))
    assert Measured("uniform", "split", runs, beside).over_auto == pytest.approx(1.1)
    assert Measured("uniform", "split", runs, ()).over_auto is None


@pytest.mark.parametrize(
    ("policies", "side_by_side", "groups"),
    [
        ("auto,lru,split,fetch", 3, [("auto", "lru", "split"), ("auto", "fetch")]),
        ("lru,auto,split", 2, [("auto", "lru"), ("auto", "split")]),
        ("lru,split,fetch", 2, [("lru", "split"), ("fetch",)]),
        ("auto", 3, [("auto",)]),
        ("lru,split", 1, [("lru",), ("split",)]),
    ],
)
def test_auto_is_beside_every_policy(policies, side_by_side, groups):
    case = dataclasses.replace(CASE, policies=policies, side_by_side=side_by_side)
    case.validate()
    assert (case.groups, case.engines) == (groups, max(map(len, groups)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"policies": "auto,best"},
            "--policies 'auto,best' must name each at most once, of auto, paper, lru, resident",
        ),
        ({"traffics": "skewed,skewed"}, "--traffics 'skewed,skewed' must name each at most once, of uniform, skewed"),
        ({"adapters": 0}, "--adapters must be at least 1, got 0"),
        ({"adapter_ranks": "8,x"}, "--adapter_ranks '8,x' must be whole numbers above 0 with commas, such as 8,16"),
        ({"requests": 8}, "--requests 8 must be above --warmup_requests 4 and --concurrency 4 together"),
        ({"side_by_side": 1}, "--side_by_side must be at least 2 where auto is held to other policies, got 1"),
        ({"turn_steps": 0}, "--turn_steps must be at least 1, got 0"),
        ({"skew": 0.0}, "--skew must be above 0, got 0.0"),
        ({"far_hardware": "h999"}, "--far_hardware: hardware 'h999' is unknown"),
        ({"output_json": "/no/where.json"}, "--output_json '/no/where.json' is in a directory that does not exist"),
    ],
)
def test_case_that_cannot_be_is_refused(change, says):
    with pytest.raises(StartError) as caught:
        dataclasses.replace(CASE, **change).validate()
    assert says in str(caught.value)


def test_pool_that_does_not_fit_the_machine_is_refused():
    model = load_config(str(LLAMA))
    with pytest.raises(StartError) as caught:
        dataclasses.replace(CASE, adapters=100_000).fit(ENGINE, model, memory_bytes=25 * 10**8)
    assert re.fullmatch(
        r"3 pools of 100000 adapters take [\d.]+ .B beside 6 MB of device memory and 2.15 GB for everything else, "
        r"and this machine has 2.50 GB: lower --side_by_side, --adapters or --adapter_ranks",
        str(caught.value),
    )
    with pytest.raises(StartError, match="--adapter_targets 'z_proj' names no projection of this model: choose from q"):
        dataclasses.replace(CASE, adapter_targets="z_proj").fit(ENGINE, model, memory_bytes=4 * 10**9)
    fitted = CASE.fit(ENGINE, model, memory_bytes=4 * 10**9)
    assert (fitted.max_num_seqs, fitted.max_lora_rank, fitted.max_model_len) == (4, 8, 17)


def test_help_says_how_policies_are_compared():
    done = bench_command("policies", "--help")
    assert "Policies are compared by" in done.stdout
    assert "--drift_requests: Requests after which other adapters are the popular ones" in done.stdout
    assert "--lora_strategy" not in done.stdout
