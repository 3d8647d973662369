"""Measures what adapters cost while they wait in the pool: memory, and the time of a step that does not use them.

  python -m launch.bench memory
      0, 10 and 100 synthetic adapters in the pool, on the default model

  python -m launch.bench memory --adapters=0,1000 --adapter_targets=q_proj,v_proj --pool_memory_gb=8
      more and smaller ones

One engine is filled step by step. At each number of adapters the same requests run, of the base model and, where there
are any, over the first adapters; a decode step is timed as in `bench latency`. "true" are bytes of A and B of the true
ranks; "pool" are those of the pages that they take; "resident" is the process's memory. Step times are medians of
--runs runs after one to warm up. Progress goes to standard error.
"""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import sys

import numpy as np
from absl import flags as absl_flags
from rich.console import Console

from launch import flags
from launch.benchmarks.case import ThroughputCase, jobs_of_runs, prompt_ids_range, split_names
from launch.benchmarks.engine_client import EngineTarget, targets_of
from launch.benchmarks.latency_report import decode_step_s
from launch.benchmarks.machine import describe_machine, describe_software, resident_bytes
from launch.benchmarks.memory_report import MemoryPoint, MemoryReport
from launch.benchmarks.output import output_problems, write_json
from launch.benchmarks.synthetic import ALL_LINEAR, synthetic_adapter
from launch.console import StageLog
from launch.flags import StartError
from plora_jax.checkpoints import load_config
from plora_jax.engine.build import Deployment, EngineConfig, build_engine
from plora_jax.engine.errors import EngineDeadError, GenerationFailedError

# The case decides about these itself.
_NOT_FLAGS = ("seed", "enable_lora", "max_lora_rank")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """What is measured.

    Attributes:
        adapters: how many are in the pool, comma separated, in rising order.
        adapter_ranks: ranks of the synthetic adapters, in turn; comma separated.
        adapter_targets: projections of the synthetic adapters, comma separated, such as q_proj,v_proj; or all-linear.
        requests: that run at once while a step is timed; over as many adapters at most.
        prompt_tokens: tokens of each prompt, drawn at random.
        new_tokens: tokens to generate for each.
        runs: measured runs at each number of adapters, after one to warm up.
        seed: of the prompts.
        output_json: file to write all figures to.
    """

    adapters: str = "0,10,100"
    adapter_ranks: str = "8,16,32,64"
    adapter_targets: str = ALL_LINEAR
    requests: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 48
    runs: int = 5
    seed: int = 0
    output_json: str | None = None

    @property
    def counts(self) -> list[int]:
        return [int(entry) for entry in split_names([self.adapters])]

    def validate(self) -> None:
        """Raises StartError naming every field that cannot be, its value and what is allowed."""
        entries = split_names([self.adapters])
        problems = []
        if not entries or not all(entry.isdecimal() for entry in entries) or self.counts != sorted(set(self.counts)):
            problems.append(f"--adapters {self.adapters!r} must be whole numbers in rising order, such as 0,10,100")
        least = {"requests": 1, "prompt_tokens": 1, "new_tokens": 8, "runs": 1}
        problems += [
            f"--{name} must be at least {bound}, got {value}"
            for name, bound in least.items()
            if (value := getattr(self, name)) < bound
        ]
        problems += output_problems(self.output_json)
        if problems:
            raise StartError("; ".join(problems))

    def throughput(self, count: int) -> ThroughputCase:
        """The requests in the words of the throughput benchmark; what cannot be is refused by it."""
        case = ThroughputCase(
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            runs=self.runs,
            seed=self.seed,
            adapters=count,
            adapter_ranks=self.adapter_ranks,
            adapter_targets=self.adapter_targets,
        )
        case.validate()
        return case


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each option of the case, and of the engine as far as the case leaves it open."""
    flags.define(MemoryCase, flag_values=flag_values)
    flags.define(EngineConfig, leave_out=_NOT_FLAGS, flag_values=flag_values)


def main() -> int:
    """Measures what the flags describe, prints the report, and writes it where asked."""
    case, engine = flags.read(MemoryCase), flags.read(EngineConfig)
    command = shlex.join(["python", "-m", "launch.bench", "memory", *sys.argv[1:]])
    report = run_memory(case, engine, command=command, log=StageLog(Console(stderr=True)))
    print(report.as_text())
    write_json(case.output_json, report.as_json())
    return 0


def run_memory(case: MemoryCase, engine: EngineConfig, *, command: str, log: StageLog) -> MemoryReport:
    """Fills an engine and measures it.

    Args:
        case: how far, and which requests run.
        engine: what is filled.
        command: command line that asks for this.
        log: told how far it is.

    Raises:
        StartError: the case cannot be measured.
    """
    case.validate()
    most = case.throughput(case.counts[-1])
    try:
        model = load_config(engine.model)
        targets = targets_of(most, model)
        config = dataclasses.replace(engine, enable_lora=True, max_lora_rank=max([engine.max_lora_rank, *most.ranks]))
        deployment = build_engine(config, progress=log)
        deployment.wait_until_settled()
    except (ValueError, OSError) as error:
        raise StartError(str(error)) from error
    finally:
        log.end()
    deployment.engine.start()
    item, true_bytes = deployment.memory.layout.adapter_dtype.itemsize, 0
    points: list[MemoryPoint] = []
    try:
        for count in case.counts:
            for index in range(points[-1].adapters if points else 0, count):
                made = synthetic_adapter(index, rank=most.ranks[index], targets=targets, config=model)
                deployment.engine.add_adapter(made)
                true_bytes += item * sum(m.a.size + m.b.size for m in made.modules.values())
            points.append(_point(case, count, deployment, true_bytes=true_bytes))
            log.say("measured", f"{count} adapters: {points[-1].as_words()}")
    except (ValueError, EngineDeadError, GenerationFailedError) as error:
        raise StartError(f"the engine could not serve the case: {error}") from error
    finally:
        deployment.engine.shutdown()
    return MemoryReport(
        case=f"{deployment.engine.model_name}, {deployment.precision}; adapters of rank {case.adapter_ranks} on "
        f"{case.adapter_targets}; {case.requests} requests of {case.prompt_tokens} + {case.new_tokens} tokens",
        options=dataclasses.asdict(case) | {"engine": dataclasses.asdict(config)},
        machine=describe_machine(),
        software=describe_software(),
        points=points,
        command=command,
        measured_at=datetime.datetime.now(datetime.UTC),
    )


def _point(case: MemoryCase, count: int, deployment: Deployment, *, true_bytes: int) -> MemoryPoint:
    statuses = deployment.engine.adapters()
    used: list[str | None] = [status.name for status in statuses[: case.requests]]
    base_s = _step_s(case, [None], deployment)
    used_s = _step_s(case, used, deployment) if used else None
    statuses = deployment.engine.adapters()
    return MemoryPoint(
        adapters=count,
        true_bytes=true_bytes,
        pool_bytes=deployment.pool_bytes()["adapter"],
        device_bytes=sum(status.device_bytes for status in statuses),
        resident_bytes=resident_bytes(),
        base_step_s=base_s,
        used=len(used),
        used_step_s=used_s,
    )


def _step_s(case: MemoryCase, models: list[str | None], deployment: Deployment) -> float:
    """Median seconds of a decode step while the case's requests run."""
    requests = case.throughput(0)
    jobs = jobs_of_runs(requests, models, ids_range=prompt_ids_range(requests, deployment.model.vocab_size))
    target = EngineTarget(deployment.engine)
    return float(np.median([decode_step_s(target.run(next(jobs), concurrency=None)) for _ in range(case.runs + 1)][1:]))
