"""Measures how long the first token of an adapter takes that the server has never seen, beside one that it holds.

  python -m launch.bench first_use
      20 adapters of rank 16 on all linear layers, on the default model

  python -m launch.bench first_use --adapter_rank=64 --prompt_tokens=512
      larger ones, longer prompts

Adapters are written as PEFT directories and put out of the machine's file cache. For each one in turn: its file is
read once, and put out of the cache again ("read"); the adapter is loaded as /v1/load_lora_adapter does it, and a
request for it is sent ("unseen": loading and the request's TTFT together); a second request is sent when the first has
ended ("resident"). Medians over the adapters, after one to warm up. Progress goes to standard error.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib
import shlex
import sys
import tempfile
import time

from absl import flags as absl_flags
from rich.console import Console

from launch import flags
from launch.benchmarks.case import ThroughputCase, jobs_of_runs, prompt_ids_range
from launch.benchmarks.engine_client import EngineTarget, targets_of
from launch.benchmarks.first_use_report import FirstUse, FirstUseReport
from launch.benchmarks.machine import describe_machine, describe_software
from launch.benchmarks.output import output_problems, write_json
from launch.benchmarks.synthetic import ALL_LINEAR, synthetic_adapter
from launch.console import StageLog
from launch.flags import StartError
from plora_jax.adapters import save_adapter
from plora_jax.checkpoints import load_config
from plora_jax.engine.build import Deployment, EngineConfig, build_engine
from plora_jax.engine.errors import EngineDeadError, GenerationFailedError

_NOT_FLAGS = ("seed", "enable_lora", "max_lora_rank")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstUseCase:
    """What is measured.

    Attributes:
        adapters: how many are measured, one after the other.
        adapter_rank: rank of each.
        adapter_targets: their projections, comma separated, such as q_proj,v_proj; or all-linear.
        prompt_tokens: tokens of each prompt, drawn at random.
        seed: of the prompts.
        output_json: file to write all figures to.
    """

    adapters: int = 20
    adapter_rank: int = 16
    adapter_targets: str = ALL_LINEAR
    prompt_tokens: int = 128
    seed: int = 0
    output_json: str | None = None

    @property
    def requests(self) -> ThroughputCase:
        """One request in the words of the throughput benchmark; what cannot be is refused by it."""
        case = ThroughputCase(
            requests=1,
            prompt_tokens=self.prompt_tokens,
            new_tokens=1,
            seed=self.seed,
            adapters=self.adapters,
            adapter_ranks=str(self.adapter_rank),
            adapter_targets=self.adapter_targets,
        )
        case.validate()
        return case

    def validate(self) -> None:
        """Raises StartError naming every field that cannot be, its value and what is allowed."""
        least = {"adapters": 1, "adapter_rank": 1, "prompt_tokens": 1}
        problems = [
            f"--{name} must be at least {bound}, got {value}"
            for name, bound in least.items()
            if (value := getattr(self, name)) < bound
        ]
        problems += output_problems(self.output_json)
        if problems:
            raise StartError("; ".join(problems))


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each option of the case, and of the engine as far as the case leaves it open."""
    flags.define(FirstUseCase, flag_values=flag_values)
    flags.define(EngineConfig, leave_out=_NOT_FLAGS, flag_values=flag_values)


def main() -> int:
    """Measures what the flags describe, prints the report, and writes it where asked."""
    case, engine = flags.read(FirstUseCase), flags.read(EngineConfig)
    command = shlex.join(["python", "-m", "launch.bench", "first_use", *sys.argv[1:]])
    report = run_first_use(case, engine, command=command, log=StageLog(Console(stderr=True)))
    print(report.as_text())
    write_json(case.output_json, report.as_json())
    return 0


def run_first_use(case: FirstUseCase, engine: EngineConfig, *, command: str, log: StageLog) -> FirstUseReport:
    """Writes adapters and measures each.

    Args:
        case: what to measure.
        engine: what loads them.
        command: command line that asks for this.
        log: told how far it is.

    Raises:
        StartError: the case cannot be measured.
    """
    case.validate()
    requests = case.requests
    with tempfile.TemporaryDirectory() as temporary:
        try:
            model = load_config(engine.model)
            targets = targets_of(requests, model)
            config = dataclasses.replace(
                engine, enable_lora=True, max_lora_rank=max(engine.max_lora_rank, case.adapter_rank)
            )
            deployment = build_engine(config, progress=log)
            deployment.wait_until_settled()
            log.stage("written")
            paths = []
            for index in range(case.adapters + 1):
                made = synthetic_adapter(index, rank=case.adapter_rank, targets=targets, config=model)
                paths.append(pathlib.Path(temporary) / made.name)
                save_adapter(made, paths[-1], dtype=deployment.dtype)
                log.advance(index + 1, case.adapters + 1)
        except (ValueError, OSError) as error:
            raise StartError(str(error)) from error
        finally:
            log.end()
        deployment.engine.start()
        try:
            # The first one warms up.
            measured = [_first_use(path, case, deployment, seed=case.seed + at) for at, path in enumerate(paths)][1:]
        except (ValueError, OSError, EngineDeadError, GenerationFailedError) as error:
            raise StartError(f"the engine could not serve the case: {error}") from error
        finally:
            deployment.engine.shutdown()
        size = sum(file.stat().st_size for file in paths[-1].iterdir())
    return FirstUseReport(
        case=f"{deployment.engine.model_name}, {deployment.precision}; {case.adapters} adapters of rank "
        f"{case.adapter_rank} on {case.adapter_targets}; prompts of {case.prompt_tokens} random tokens",
        options=dataclasses.asdict(case) | {"engine": dataclasses.asdict(config)},
        machine=describe_machine(),
        software=describe_software(),
        file_bytes=size,
        measured=measured,
        command=command,
        measured_at=datetime.datetime.now(datetime.UTC),
    )


def _first_use(path: pathlib.Path, case: FirstUseCase, deployment: Deployment, *, seed: int) -> FirstUse:
    read_s = _cold_read_s(path)
    requests = dataclasses.replace(case.requests, seed=seed)
    ids_range = prompt_ids_range(requests, deployment.model.vocab_size)
    jobs = jobs_of_runs(requests, [path.name], ids_range=ids_range)
    target = EngineTarget(deployment.engine)

    def ttft_s() -> float:
        (record,) = target.run(next(jobs), concurrency=None)
        return record.piece_s[0] - record.sent_s

    started_s = time.perf_counter()
    deployment.engine.load_adapter(path.name, str(path))
    load_s = time.perf_counter() - started_s
    return FirstUse(read_s, load_s, ttft_s(), ttft_s())


def _cold_read_s(path: pathlib.Path) -> float:
    """Seconds in which the files of a directory are read from the disk; they are not in the file cache afterwards."""
    seconds = 0.0
    for file in sorted(path.iterdir()):
        with file.open("rb", buffering=0) as opened:
            _put_out_of_cache(opened.fileno())
            started_s = time.perf_counter()
            opened.read()
            seconds += time.perf_counter() - started_s
            _put_out_of_cache(opened.fileno())
    return seconds


def _put_out_of_cache(file: int) -> None:
    if hasattr(os, "posix_fadvise"):  # not on macOS, where the read is one from the cache
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
