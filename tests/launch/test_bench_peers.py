"""python -m launch.bench peers: who is measured, ratios, who is missing and why, with drivers that are scripts here."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import stat
import sys

import pytest
from rich.console import Console

from launch.benchmarks.peers import systems
from launch.benchmarks.peers.case import CASES, PeerCase, PeersConfig, write_files
from launch.benchmarks.peers.command import run_peers
from launch.benchmarks.peers.systems import DriverPeer, PeerError, PeerResult, run_system, why_missing, why_not
from launch.console import StageLog
from launch.flags import StartError
from plora_jax.adapters import load_adapter
from plora_jax.checkpoints import load_config
from tests.launch.small_engine import LLAMA, small_flags

OURS = " ".join(flag for flag in small_flags() if not flag.startswith("--model"))
CONFIG = PeersConfig(
    model=str(LLAMA),
    dtype="float32",
    engine_flags=OURS,
    cases="base-1,lora-1",
    systems="plora_jax,peft,vllm,openvino,llama.cpp",
    prompt_tokens=8,
    new_tokens=4,
    runs=1,
)
ANSWERS = """
import json, sys
job = json.load(open(sys.argv[1]))
print("a library says something")
print(json.dumps({"version": f"toy {len(job['adapters'])}", "seconds": [9.0] + [2.0] * (len(job["runs"]) - 1)}))
"""


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """PEFT is a script that claims two seconds a run, vLLM one that fails, OpenVINO is not installed."""
    (tmp_path / "good.py").write_text(ANSWERS)
    (tmp_path / "bad.py").write_text("import sys; print('first'); sys.exit('it broke')")
    monkeypatch.setattr(systems, "DRIVERS", tmp_path)
    peers = {
        "peft": DriverPeer("good.py", ("json",), "peft_python", "pip install it"),
        "vllm": DriverPeer("bad.py", ("json",), "vllm_python", "pip install it"),
        "openvino": DriverPeer("good.py", ("no_such_module",), "openvino_python", "pip install openvino-genai"),
    }
    monkeypatch.setattr(systems, "PEERS", peers)
    return tmp_path


def test_peers_are_measured_beside_ours_and_the_missing_are_named(toy):
    command = "python -m launch.bench peers --x"
    report = run_peers(CONFIG, command=command, log=StageLog(Console(quiet=True)))
    got = json.loads(json.dumps(report.as_json()))
    by = {(r["system"], r["requests"], r["adapters"]): r for r in got["results"]}
    assert by.keys() == {("plora_jax", 1, 0), ("plora_jax", 32, 1), ("peft", 1, 0), ("peft", 32, 1)}
    theirs = by["peft", 32, 1]
    assert (theirs["runs"], theirs["version"]) == ([64.0], "toy 1")
    assert theirs["ours_over_it"] == {"plora_jax": pytest.approx(by["plora_jax", 32, 1]["output_tokens_per_s"] / 64.0)}
    assert got["notes"]["openvino"] == (
        f"{sys.executable} has no no_such_module: pip install openvino-genai, and name it by --openvino_python"
    )
    assert got["notes"]["vllm, base, 1 request"] == "ended with code 1: it broke"
    text = report.as_text()
    for pattern in (
        r"^peft +toy \d$",
        r"^output tokens/s +plora_jax +peft +vllm +openvino +llama\.cpp$",
        r"^  base, 1 request +[\d.]+ +2\.0 +- +- +-$",
        r"^  1 adapter, 32 requests +[\d.]+ +64\.0 +- +- +-$",
        r"^plora_jax over +plora_jax +peft",
        r"^no figure: openvino +.* has no no_such_module",
        r"^command +python -m launch\.bench peers --x$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern} is not in\n{text}"


def test_int8_weights_of_ours_are_a_system_of_their_own(toy, monkeypatch):
    asked = []

    def answer(command, timeout_s):
        file = next(flag for flag in command if flag.startswith("--output_json=")).partition("=")[2]
        int8 = "--quantization=int8" in command
        asked.append(int8)
        runs = [{"output_tokens_per_s": 30.0 if int8 else 10.0}]
        pathlib.Path(file).write_text(json.dumps({"runs": runs, "software": {"plora_jax": "1", "jax": "2"}}))
        return ""

    monkeypatch.setattr(systems, "_output", answer)
    config = dataclasses.replace(CONFIG, cases="base-1", systems="plora_jax,plora_jax-int8")
    report = run_peers(config, command="", log=StageLog(Console(quiet=True)))
    assert asked == [False, True]
    case = CASES["base-1"]
    assert (report.ratio("plora_jax-int8", "plora_jax", case), report.ratio("plora_jax", "plora_jax", case)) == (
        3.0,
        1.0,
    )
    assert re.search(r"^plora_jax-int8 over .*\n  base, 1 request +3\.00 +1\.00$", report.as_text(), re.MULTILINE)


def test_files_are_written_once_and_can_be_read_again(tmp_path):
    first = write_files(CONFIG, tmp_path)
    when = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = write_files(CONFIG, tmp_path)
    assert first == again
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == when
    assert load_config(first.model).vocab_size == load_config(LLAMA).vocab_size
    assert load_adapter(first.adapters[0], name="a", config=load_config(LLAMA)).max_rank == 8
    job = first.job(CONFIG, CASES["lora-1"])
    assert [len(run) for run in job["runs"]] == [32, 32]
    assert {len(prompt) for run in job["runs"] for prompt in run} == {8}
    assert job["adapters"] == [str(first.adapters[0])]


def test_system_that_cannot_run_a_case_says_why(tmp_path):
    files = write_files(CONFIG, tmp_path)
    assert why_not("openvino", PeerCase(32, 32), files) == "serves one adapter set a batch, and none from a GGUF file"
    assert why_not("llama.cpp", PeerCase(32, 1), files) == "does not batch requests of different adapters"
    assert why_not("openvino", PeerCase(1, 0), files) == "reads a GGUF file, and --model is none"
    assert why_not("plora_jax-gguf", PeerCase(1, 0), files) == "reads a GGUF file, and --model is none"
    assert why_not("peft", PeerCase(32, 32), files) is None


def test_interpreter_or_binary_that_is_not_there_is_named():
    config = PeersConfig(vllm_python="/nowhere/python", llama_server="/nowhere/llama-server")
    assert (why_missing("vllm", config) or "").startswith("--vllm_python '/nowhere/python' cannot be run: ")
    assert "cmake --build build --target llama-server" in (why_missing("llama.cpp", config) or "")
    assert why_missing("plora_jax", config) is None


def test_driver_that_takes_too_long_or_says_nothing_is_given_up(toy):
    files = write_files(CONFIG, toy / "files")
    (toy / "good.py").write_text("print('hello')")
    with pytest.raises(PeerError, match="its driver printed no figures: hello"):
        run_system("peft", PeerCase(1, 0), files, CONFIG)
    (toy / "good.py").write_text("import time; time.sleep(60)")
    slow = PeersConfig(timeout_s=1)
    with pytest.raises(PeerError, match="took more than 1 s: raise --timeout_s, or leave it out of --systems"):
        run_system("peft", PeerCase(1, 0), files, slow)


SERVER = """#!{python}
import http.server, json, sys, time
if "--version" in sys.argv:
    print("load_backend: loaded CPU backend\\nversion: 1 (toy)\\nbuilt with GNU 12.2.0 for Linux", file=sys.stderr)
    sys.exit()
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        usage = {{"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}}
        for event in ({{"choices": [{{"text": "x"}}]}}, {{"choices": [], "usage": usage}}):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_llama_server_is_started_measured_and_ended(tmp_path):
    binary = tmp_path / "llama-server"
    binary.write_text(SERVER.format(python=sys.executable))
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    config = PeersConfig(llama_server=str(binary), runs=2, prompt_tokens=8, new_tokens=4)
    files = write_files(CONFIG, tmp_path / "files")._replace(gguf=tmp_path / "x.gguf")
    result = run_system("llama.cpp", PeerCase(2, 0), files, config)
    assert len(result.tokens_per_s) == 2
    assert result.version == "llama.cpp version: 1 (toy), GGUF as it is"
    assert result.median > 0
    binary.write_text(f"#!{sys.executable}\nimport sys\nprint('a\\nno\\nsuch\\nmodel', file=sys.stderr)\nsys.exit(3)\n")
    with pytest.raises(PeerError, match=r"ended with code 3 before it was ready: no \| such \| model$"):
        run_system("llama.cpp", PeerCase(2, 0), files, config)


def test_median_of_runs_is_the_figure():
    assert PeerResult([3.0, 1.0, 2.0], "x").median == 2.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cases": "base-1,base-2"}, "--cases 'base-1,base-2' must name some of base-1, base-32, lora-1, lora-32"),
        (
            {"systems": "tgi"},
            "--systems 'tgi' must name some of plora_jax, plora_jax-int8, plora_jax-gguf, peft, vllm, openvino, "
            "llama.cpp",
        ),
        ({"dtype": "int4"}, "--dtype 'int4' must be bfloat16 or float32"),
        ({"runs": 0, "threads": 0}, "--runs must be at least 1, got 0; --threads must be at least 1, got 0"),
        ({"output_json": "/nowhere/x.json"}, "--output_json '/nowhere/x.json' is in a directory that does not exist"),
        ({"peft_python": "/no/python"}, "--peft_python '/no/python' is not a program that can be run: give the path"),
        ({"model": "/nowhere"}, "/nowhere does not exist"),
    ],
)
def test_comparison_that_cannot_be_is_refused(options, says):
    with pytest.raises(StartError) as caught:
        run_peers(PeersConfig(**options), command="", log=StageLog(Console(quiet=True)))
    assert says in str(caught.value)
