"""python -m launch.bench throughput: cases, adapters, figures, both clients, and what stops it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from launch import bench
from launch.benchmarks.case import ThroughputCase
from launch.benchmarks.http_client import HttpTarget
from launch.benchmarks.report import ThroughputReport
from launch.benchmarks.throughput import run_throughput
from launch.console import StageLog
from launch.flags import StartError
from launch.profiling import ProfileConfig
from tests.launch.http_rig import http_rig, live_server
from tests.launch.small_engine import LLAMA, PACK, ROOT, small_config, small_flags

ENGINE = small_config()
CASE = ThroughputCase(requests=4, adapters=3, prompt_tokens=20, new_tokens=6, runs=3)


def quiet() -> StageLog:
    return StageLog(Console(quiet=True))


@pytest.fixture(scope="module")
def report() -> ThroughputReport:
    """One real measurement that several tests look at."""
    return run_throughput(CASE, ENGINE, command="python -m launch.bench throughput --x", log=quiet())


def assert_consistent(got: dict) -> None:
    """Counts and rates agree with each other, and percentiles are in order."""
    requests, new = got["options"]["requests"], got["options"]["new_tokens"]
    assert len(got["runs"]) == got["options"]["runs"]
    for run in (*got["runs"], got["median"]):
        assert run["output_tokens"] == requests * new
        assert run["prompt_tokens"] == requests * got["options"]["prompt_tokens"]
        assert run["short_answers"] == 0
        for name in ("ttft_s", "itl_s", "e2e_s"):
            assert 0 < run[name]["p50"] <= run[name]["p90"] <= run[name]["p99"], name
        assert run["ttft_s"]["p50"] < run["e2e_s"]["p50"] <= run["wall_s"]
    for run in got["runs"]:
        assert run["output_tokens_per_s"] == pytest.approx(requests * new / run["wall_s"])
    rates = [run["output_tokens_per_s"] for run in got["runs"]]
    assert got["median"]["output_tokens_per_s"] == statistics.median(rates)


def test_throughput_in_process_gives_consistent_figures(report):
    got = json.loads(json.dumps(report.as_json()))
    assert_consistent(got)
    assert got["compilations_in_traffic"] == 0
    assert got["preemptions"] == 0
    assert got["system"]["kernels"].keys() == {
        f"{phase} {what}"
        for phase in ("decode", "prefill")
        for what in ("shrink", "expand", "delta", "add", "rows", "attention")
    }
    assert got["system"]["device_bytes"]["weights"] > 0


def test_report_says_the_case_the_machine_and_the_command(report):
    text = report.as_text()
    for pattern in (
        r"^case +4 requests, all at once, of 20 prompt \+ 6 new tokens, greedy, ignore_eos; "
        r"prompts random ids in \[0, 256\), seed 0; 3 synthetic adapters in turn, rank 8, 16, 32 on all-linear$",
        r"^system +llama, float32, adapters loaded: 3$",
        r"^hardware +\S.*, \d+ cores, [\d.]+ \wB$",
        r"^software +plora_jax \S+, jax \S+, python 3\.",
        r"^output tokens/s +\d+\.\d   (\d+\.\d ?){3}$",
        r"^TTFT +(\d+\.\d *){3}$",
        r"^compilations in traffic +0$",
        r"^command +python -m launch\.bench throughput --x$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern} is not in\n{text}"


def test_report_says_when_programs_compiled_and_answers_were_short(report):
    run = report.measurement.runs[0]._replace(short_answers=2, itl_s=None)
    measured = report.measurement._replace(runs=(run,), compilations=3, preemptions=None)
    text = dataclasses.replace(report, measurement=measured).as_text()
    assert "3, and must be 0: the figures hold time of the compiler" in text
    assert "2 answers ended before the tokens asked for" in text
    assert re.search(r"^ITL +-$", text, re.MULTILINE)
    assert "preemptions" not in text


def test_real_adapters_serve_in_turn_and_too_little_memory_is_refused():
    directories = tuple(str(PACK / "adapters" / name) for name in ("plain_qv", "all_linear"))
    case = dataclasses.replace(
        CASE, adapters=0, adapter_dirs=(",".join(directories),), runs=1, concurrency=2, case="peers-1"
    )
    got = run_throughput(case, ENGINE, command="", log=quiet()).as_json()
    assert_consistent(got)
    assert "2 at a time" in got["case"]
    assert got["case"].startswith("peers-1 with changes: 4 requests")
    assert "adapters all_linear, plain_qv in turn" in got["case"]
    big = dataclasses.replace(CASE, adapters=1, adapter_ranks="200")
    small = dataclasses.replace(ENGINE, pool_memory_gb=0.001)
    with pytest.raises(StartError, match=r"an adapter of .* does not fit: .* raise --pool_memory_gb"):
        run_throughput(big, small, command="", log=quiet())


@pytest.mark.parametrize(
    ("case", "engine", "says"),
    [
        ({"prompt_tokens": 600}, {}, "--prompt_tokens 600 and --new_tokens 6 are 606 tokens, and a sequence holds"),
        ({"adapter_targets": "q_proj,x"}, {}, "--adapter_targets 'q_proj,x' names no projection of this model: choose"),
        ({"adapter_targets": ","}, {}, "names no projection"),
        ({"adapters": 0, "adapter_dirs": ("/nowhere",)}, {}, "/nowhere"),
        ({}, {"model": "/nowhere"}, "/nowhere does not exist"),
    ],
)
def test_case_that_the_model_cannot_take_is_refused(case, engine, says):
    with pytest.raises(StartError) as caught:
        run_throughput(
            dataclasses.replace(CASE, **case), dataclasses.replace(ENGINE, **engine), command="", log=quiet()
        )
    assert says in str(caught.value)


@pytest.fixture
def server_url() -> Iterator[str]:
    with http_rig() as rig, live_server(rig.state) as server:
        yield server.url


def over_http(url: str, **options: object) -> ThroughputCase:
    # The rig's tokens are bytes, and its prompts must be texts that it can decode.
    values = {
        "requests": 4,
        "prompt_tokens": 20,
        "new_tokens": 6,
        "runs": 2,
        "prompt_id_low": 97,
        "prompt_id_high": 122,
    }
    return ThroughputCase(**{**values, "url": url, **options})


def test_throughput_over_http_gives_consistent_figures(server_url):
    case = over_http(server_url + "/v1", concurrency=3)
    got = json.loads(json.dumps(run_throughput(case, ENGINE, command="", log=quiet()).as_json()))
    assert_consistent(got)
    assert got["compilations_in_traffic"] == 0
    assert got["system"]["name"] == f"base at {server_url}"


def test_server_without_metrics_of_ours_has_no_counts(server_url):
    assert HttpTarget(server_url).compilations() == 7
    assert HttpTarget(server_url + "/nothing").compilations() is None


def test_server_that_refuses_is_quoted(server_url):
    case = over_http(server_url, served_model=("base,nobody",))
    with pytest.raises(StartError, match=r"/v1/completions answered 404: .*`nobody` does not exist"):
        run_throughput(case, ENGINE, command="", log=quiet())


def test_server_that_is_not_there_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"{url}/v1/models cannot be reached: "):
            run_throughput(over_http(url), ENGINE, command="", log=quiet())


def bench_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.bench", *arguments]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)


def test_bench_prints_the_report_and_writes_it(tmp_path):
    file = tmp_path / "out.json"
    arguments = [*small_flags(), "--requests=2", "--prompt_tokens=9", "--new_tokens=4", "--runs=2"]
    done = bench_command("throughput", *arguments, "--adapters=1", f"--output_json={file}")
    assert done.returncode == 0, done.stderr
    got = json.loads(file.read_text())
    assert_consistent(got)
    assert f"command                  {got['command']}\n" in done.stdout
    assert got["command"].startswith(f"python -m launch.bench throughput --model={LLAMA} --")
    assert "--requests=2 --prompt_tokens=9 --new_tokens=4 --runs=2 --adapters=1" in got["command"]
    assert re.search(r"^warm-up .*\nrun 1/2 +8 output tokens in .*\nrun 2/2 ", done.stderr, re.MULTILINE)


def test_bench_without_a_known_benchmark_says_which_there_are(monkeypatch, capsys):
    for arguments, says in (([], "must come first"), (["--runs=3"], "must come first"), (["speed"], "'speed': choose")):
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        with pytest.raises(SystemExit) as caught:
            bench.cli()
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert says in error
        assert "throughput" in error
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    bench.cli()
    assert re.search(r"^  throughput +output tokens/s", capsys.readouterr().out, re.MULTILINE)


def test_help_of_a_benchmark_shows_its_examples_and_flags():
    done = bench_command("throughput", "--help")
    assert "python -m launch.bench throughput --case=peers-32" in done.stdout
    assert "--adapter_ranks: Ranks of the synthetic adapters, in turn" in done.stdout


def test_trace_is_replayed_at_its_times_here_and_over_http(server_url, tmp_path):
    file = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:{46 + 0.1 * i:.7f},{12 + i},5\n" for i in range(6))
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}2023-11-16 18:15:47.0000000,90000,5\n")
    case = dataclasses.replace(CASE, trace=str(file), runs=1, prompt_tokens=90000)
    for got in (
        run_throughput(case, ENGINE, command="", log=quiet()).as_json(),
        run_throughput(over_http(server_url, trace=str(file), runs=1), ENGINE, command="", log=quiet()).as_json(),
    ):
        assert got["case"].startswith(
            "trace trace.csv, all of it, 1 of its requests: 6 requests of 87 prompt + 30 new "
        )
        assert "1 dropped that the context does not hold" in got["case"]
        (run,) = got["runs"]
        assert (run["prompt_tokens"], run["output_tokens"]) == (87, 30)
        # The last request comes half a second after the first, however quick the answers are.
        # The last request comes half a second after the first, however quick the answers are.
        assert run["wall_s"] > 0.4
        assert got["compilations_in_traffic"] == 0


def test_profile_dir_holds_a_trace_of_a_run_here_and_has_no_use_for_a_server(tmp_path, server_url):
    profile = ProfileConfig(profile_dir=str(tmp_path / "trace"), profile_steps=2)
    case = dataclasses.replace(CASE, adapters=1, runs=1)
    run_throughput(case, ENGINE, command="", log=quiet(), profile=profile)
    assert list((tmp_path / "trace").rglob("*.trace.json.gz"))
    done = bench_command("throughput", f"--url={server_url}", f"--profile_dir={tmp_path}")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --profile_dir has no use with --url: start the server with it\n",
    )
