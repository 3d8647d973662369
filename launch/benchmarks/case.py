"""What the throughput benchmark is asked to measure: options, presets and their checks; no engine yet."""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launch.benchmarks.arrivals import Arrival
from launch.benchmarks.measurement import Job
from launch.benchmarks.output import output_problems
from launch.benchmarks.synthetic import ALL_LINEAR
from launch.flags import StartError

_WARM_UP_REQUESTS = 8
_PEERS = {"requests": 32, "prompt_tokens": 128, "new_tokens": 64, "adapter_ranks": "8,16,32,64"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "peers-base": {**_PEERS, "adapters": 0},
    "peers-1": {**_PEERS, "adapters": 1},
    "peers-32": {**_PEERS, "adapters": 32},
}
"""Values of ThroughputCase by name. The peers' cases are those that vLLM, PEFT and others were measured on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputCase:
    """Requests to measure. All are greedy and go on to the last token, whatever the model says.

    Attributes:
        case: a preset: peers-base, peers-1 or peers-32 (32 requests at once of 128 + 64 tokens with none, 1 or 32
            adapters). Flags given beside it stand over its values.
        requests: requests of a run; request i uses adapter i modulo their number.
        concurrency: requests in flight at most; None for all at once.
        prompt_tokens: tokens of each prompt, drawn at random.
        new_tokens: tokens to generate for each.
        runs: measured runs, after one to warm up; the figures are medians over them.
        seed: of the prompts.
        prompt_id_low: smallest token id of a prompt; 0 where the vocabulary does not reach it.
        prompt_id_high: token ids of prompts lie below it, and below the size of the vocabulary.
        adapters: how many synthetic adapters to make in memory.
        adapter_ranks: ranks of the synthetic adapters, in turn; comma separated.
        adapter_targets: projections of the synthetic adapters, comma separated, such as q_proj,v_proj; or all-linear.
        adapter_skew: requests draw their adapter by a power law, the r-th in proportion to r ** -skew; None for each in
            its turn.
        adapter_dirs: real adapters instead, PEFT or Orbax directories, comma separated; repeatable.
        enable_lora: build the engine for adapters; None for doing so where the case has any.
        device_adapter_mb: device memory for adapters, MB of 2^20 bytes; None for as much as holds all of the case, and
            256 at least.
        url: measure the OpenAI-compatible server at this address instead of an engine in this process. The key in
            OPENAI_API_KEY is sent where the environment has it.
        served_model: with --url, models that answer, in turn; comma separated; repeatable. By default the first that
            the server lists.
        trace: take arrivals and lengths of requests from this file instead: CSV with TIMESTAMP, ContextTokens and
            GeneratedTokens, as the Azure LLM inference traces. Requests are sent at their times, whether or not others
            are answered; those that the context does not hold are dropped and counted.
        trace_scale: share of the trace's requests that are sent, evenly over it, above 0 to 1.
        trace_minutes: send only the first minutes of the trace; None for all.
        output_json: file to write all figures to.
    """

    case: str | None = None
    requests: int = 32
    concurrency: int | None = None
    prompt_tokens: int = 128
    new_tokens: int = 64
    runs: int = 5
    seed: int = 0
    prompt_id_low: int = 1000
    prompt_id_high: int = 40000
    adapters: int = 0
    adapter_ranks: str = "8,16,32,64"
    adapter_targets: str = ALL_LINEAR
    adapter_skew: float | None = None
    adapter_dirs: tuple[str, ...] = ()
    enable_lora: bool | None = None
    device_adapter_mb: int | None = None
    url: str | None = None
    served_model: tuple[str, ...] = ()
    trace: str | None = None
    trace_scale: float = 1.0
    trace_minutes: float | None = None
    output_json: str | None = None

    @property
    def ranks(self) -> list[int]:
        """Rank of each synthetic adapter."""
        cycle = [int(entry) for entry in split_names([self.adapter_ranks])]
        return [cycle[index % len(cycle)] for index in range(self.adapters)]

    @property
    def directories(self) -> list[pathlib.Path]:
        """Directories of the real adapters."""
        return [pathlib.Path(entry).expanduser() for entry in split_names(self.adapter_dirs)]

    @property
    def model_names(self) -> list[str]:
        """Models of a server that answer."""
        return split_names(self.served_model)

    def validate(self) -> None:
        """Raises StartError naming every field that cannot be, its value and what is allowed."""
        if self.case is not None and self.case not in PRESETS:
            raise StartError(f"--case {self.case!r} is unknown; choose {', '.join(PRESETS)}")
        least = {"requests": 1, "concurrency": 1, "prompt_tokens": 1, "new_tokens": 1, "runs": 1, "adapters": 0}
        least |= {"device_adapter_mb": 1, "prompt_id_low": 0, "prompt_id_high": 1}
        problems = [
            f"--{name} must be at least {bound}, got {value}"
            for name, bound in least.items()
            if (value := getattr(self, name)) is not None and value < bound
        ]
        if self.prompt_id_low >= self.prompt_id_high:
            problems.append(
                f"--prompt_id_low {self.prompt_id_low} must be below --prompt_id_high {self.prompt_id_high}"
            )
        entries = split_names([self.adapter_ranks])
        if not entries or not all(entry.isdecimal() and int(entry) for entry in entries):
            problems.append(
                f"--adapter_ranks {self.adapter_ranks!r} must be whole numbers above 0 with commas, such as 8,16"
            )
        if self.adapter_skew is not None and self.adapter_skew <= 0:
            problems.append(f"--adapter_skew must be above 0, got {self.adapter_skew}")
        problems += output_problems(self.output_json)
        problems += self._trace_problems() + self._contradictions()
        if problems:
            raise StartError("; ".join(problems))

    def _trace_problems(self) -> list[str]:
        problems = []
        if not 0 < self.trace_scale <= 1:
            problems.append(f"--trace_scale must be above 0 and at most 1, got {self.trace_scale}")
        if self.trace_minutes is not None and self.trace_minutes <= 0:
            problems.append(f"--trace_minutes must be above 0, got {self.trace_minutes}")
        if self.trace is None and (self.trace_scale, self.trace_minutes) != (1.0, None):
            problems.append("--trace_scale and --trace_minutes need --trace: name the file")
        if self.trace is not None and self.concurrency is not None:
            problems.append("--concurrency has no use with --trace: requests are sent at the trace's times")
        return problems

    def _contradictions(self) -> list[str]:
        problems = []
        if self.adapter_dirs and self.adapters:
            problems.append(
                f"--adapter_dirs and --adapters {self.adapters} cannot both be: measure real or synthetic adapters"
            )
        if (self.adapters or self.adapter_dirs) and self.enable_lora is False:
            problems.append("--noenable_lora cannot be in a case with adapters")
        if self.url is None:
            if self.served_model:
                problems.append("--served_model needs --url: an engine in this process takes its model from --model")
            return problems
        if not self.url.startswith(("http://", "https://")):
            problems.append(f"--url {self.url!r} must begin with http:// or https://")
        problems += [
            f"--{name} has no use with --url: load the adapters on the server and name them by --served_model"
            for name in ("adapter_dirs", "enable_lora", "device_adapter_mb")
            if getattr(self, name) not in (None, ())
        ]
        if self.adapters and len(self.model_names) != self.adapters:
            problems.append(
                f"the case has {self.adapters} adapters and --served_model names {len(self.model_names)} models: "
                f"load {self.adapters} adapters on the server and name each"
            )
        return problems


def split_names(entries: Sequence[str]) -> list[str]:
    """The names in comma-separated entries, empty ones left out."""
    return [name.strip() for entry in entries for name in entry.split(",") if name.strip()]


def prompt_ids_range(case: ThroughputCase, vocab_size: int | None) -> tuple[int, int]:
    """Where token ids of prompts come from, [low, high).

    Args:
        case: names the range.
        vocab_size: V, None where it is not known.
    """
    high = case.prompt_id_high if vocab_size is None else min(case.prompt_id_high, vocab_size)
    return (case.prompt_id_low if case.prompt_id_low < high else 0), high


def jobs_of_runs(
    case: ThroughputCase, models: Sequence[str | None], *, ids_range: tuple[int, int]
) -> Iterator[list[Job]]:
    """The jobs of run after run without end; every run has other prompts, and the seed gives them all.

    Args:
        case: what to send.
        models: who answers, in turn.
        ids_range: token ids of prompts, [low, high).
    """
    rng = random.Random(case.seed)
    while True:
        alike = [Arrival(0.0, case.prompt_tokens, case.new_tokens)] * case.requests
        yield _jobs(rng, alike, _drawn(rng, case, models, case.requests), ids_range)


def jobs_of_replays(
    case: ThroughputCase, sent: Sequence[Arrival], models: Sequence[str | None], *, ids_range: tuple[int, int]
) -> Iterator[list[Job]]:
    """A few requests of a trace at once, to warm up, and then all of them at their times, again and again.

    Args:
        case: has the seed.
        sent: requests of the trace.
        models: who answers, in turn.
        ids_range: token ids of prompts, [low, high).
    """
    rng = random.Random(case.seed)
    first = [arrival._replace(at_s=0.0) for arrival in sent[:_WARM_UP_REQUESTS]]
    yield _jobs(rng, first, _drawn(rng, case, models, len(first)), ids_range)
    while True:
        yield _jobs(rng, sent, _drawn(rng, case, models, len(sent)), ids_range)


def _drawn(rng: random.Random, case: ThroughputCase, models: Sequence[str | None], count: int) -> Sequence[str | None]:
    """Who answers `count` requests."""
    if case.adapter_skew is None:
        return models
    weights = [rank**-case.adapter_skew for rank in range(1, len(models) + 1)]
    return rng.choices(models, weights, k=count)


def _jobs(
    rng: random.Random, sent: Sequence[Arrival], models: Sequence[str | None], ids_range: tuple[int, int]
) -> list[Job]:
    return [
        Job([rng.randrange(*ids_range) for _ in range(a.prompt_tokens)], models[i % len(models)], a.new_tokens, a.at_s)
        for i, a in enumerate(sent)
    ]
