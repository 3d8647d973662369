"""Measures this system and its peers on the same case, one after the other, and prints the ratios.

  python -m launch.bench peers --peft_python=a/bin/python --openvino_python=a/bin/python --vllm_python=b/bin/python
      what is installed there, and llama-server where it is on PATH; a line for each that is missing says how to get it

  python -m launch.bench peers --systems=plora_jax-int8,openvino --cases=base-32 --runs=3
      one peer and one case against this engine with int8 weights; --engine_flags gives it any other flag

The model is written once as a Hugging Face directory in --dtype, the adapters as PEFT directories, and every system
gets the same prompts of random token ids (OpenVINO texts of as many tokens). Figures are output tokens of a whole run
over its seconds, prefill included, medians of --runs runs after one to warm up. Each system runs alone, in a process of
its own; case by case they take turns, so that a ratio is of figures taken one after the other. Progress goes to
standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Iterator

from absl import flags as absl_flags
from rich.console import Console

from launch import flags
from launch.benchmarks.machine import describe_machine
from launch.benchmarks.output import write_json
from launch.benchmarks.peers.case import PeerCase, PeersConfig, write_files
from launch.benchmarks.peers.report import PeersReport
from launch.benchmarks.peers.systems import SYSTEMS, PeerError, PeerResult, run_system, why_missing, why_not
from launch.console import StageLog
from launch.flags import StartError


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each option."""
    flags.define(PeersConfig, flag_values=flag_values)


def main() -> int:
    """Compares what the flags describe, prints the report, and writes it where asked."""
    config = flags.read(PeersConfig)
    command = shlex.join(["python", "-m", "launch.bench", "peers", *sys.argv[1:]])
    report = run_peers(config, command=command, log=StageLog(Console(stderr=True)))
    print(report.as_text())
    write_json(config.output_json, report.as_json())
    return 0


def run_peers(config: PeersConfig, *, command: str, log: StageLog) -> PeersReport:
    """Measures every system that is installed on every case that it can run.

    Args:
        config: what to measure.
        command: command line that asks for this.
        log: told how far it is.

    Raises:
        StartError: the case cannot be made.
    """
    config.validate(SYSTEMS)
    notes = {name: why for name in config.chosen_systems if (why := why_missing(name, config)) is not None}
    present = [name for name in config.chosen_systems if name not in notes]
    results: dict[tuple[str, PeerCase], PeerResult] = {}
    with _case_dir(config) as directory:
        try:
            files = write_files(config, directory)
        except (ValueError, OSError) as error:
            raise StartError(str(error)) from error
        for case in config.chosen_cases:
            for name in present:
                if (why := why_not(name, case, files)) is not None:
                    notes[f"{name}, {case.words}"] = why
                    continue
                try:
                    results[name, case] = run_system(name, case, files, config)
                except PeerError as error:
                    notes[f"{name}, {case.words}"] = str(error)
                    log.say("failed", f"{name}, {case.words}: {error}")
                    continue
                log.say("measured", f"{name}, {case.words}: {results[name, case].median:.1f} output tokens a second")
    words = f"prompts of {config.prompt_tokens} random tokens, {config.new_tokens} new tokens, greedy; {config.dtype}"
    return PeersReport(
        case=f"{words}; adapters of ranks 8, 16, 32, 64 in turn on all linear layers",
        options=dataclasses.asdict(config),
        machine=describe_machine(),
        systems=config.chosen_systems,
        cases=config.chosen_cases,
        results=results,
        notes=notes,
        command=command,
        measured_at=datetime.datetime.now(datetime.UTC),
    )


@contextlib.contextmanager
def _case_dir(config: PeersConfig) -> Iterator[pathlib.Path]:
    if config.case_dir is not None:
        yield pathlib.Path(config.case_dir).expanduser()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)
