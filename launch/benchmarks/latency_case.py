"""What the latency benchmark is asked to measure: options and their checks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from launch.benchmarks.case import ThroughputCase, split_names
from launch.benchmarks.output import output_problems
from launch.benchmarks.synthetic import ALL_LINEAR
from launch.flags import StartError


class LatencyPoint(NamedTuple):
    """One measured case: requests at once, and distinct adapters among them."""

    rows: int
    adapters: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatencyCase:
    """What is measured.

    Attributes:
        batches: requests that run at once, comma separated.
        adapters: distinct adapters that they use in turn, comma separated; a batch cannot use more than it has
            requests, and the same number twice is measured once.
        adapter_ranks: ranks of the synthetic adapters, in turn; comma separated.
        adapter_targets: projections of the synthetic adapters, comma separated, such as q_proj,v_proj; or all-linear.
        prompt_tokens: tokens of each prompt, drawn at random.
        new_tokens: tokens to generate for each.
        runs: measured runs, after one to warm up; the figures are medians over them.
        seed: of the prompts.
        breakdown: also say where the time of a step goes, and how far each part is from the machine's limit.
        output_json: file to write all figures to.
    """

    batches: str = "1,8,32"
    adapters: str = "0,1,32"
    adapter_ranks: str = "8,16,32,64"
    adapter_targets: str = ALL_LINEAR
    prompt_tokens: int = 128
    new_tokens: int = 48
    runs: int = 5
    seed: int = 0
    breakdown: bool = False
    output_json: str | None = None

    @property
    def points(self) -> list[LatencyPoint]:
        """The cases, batch by batch."""
        pairs = itertools.product(_numbers(self.batches), _numbers(self.adapters))
        return list(dict.fromkeys(LatencyPoint(rows, min(adapters, rows)) for rows, adapters in pairs))

    def validate(self) -> None:
        """Raises StartError naming every field that cannot be, its value and what is allowed."""
        problems = [
            f"--{name} {text!r} must be whole numbers of {least} or more with commas, such as {example}"
            for name, text, least, example in (
                ("batches", self.batches, 1, "1,32"),
                ("adapters", self.adapters, 0, "0,32"),
            )
            if not _are_numbers(text, least)
        ]
        least = {"prompt_tokens": 1, "new_tokens": 8, "runs": 1}
        problems += [
            f"--{name} must be at least {bound}, got {value}"
            for name, bound in least.items()
            if (value := getattr(self, name)) < bound
        ]
        problems += output_problems(self.output_json)
        if problems:
            raise StartError("; ".join(problems))
        self.requests().validate()

    def requests(self, point: LatencyPoint | None = None) -> ThroughputCase:
        """The requests of a point in the words of the throughput benchmark; those of the largest without one."""
        points = self.points
        return ThroughputCase(
            requests=point.rows if point else max(p.rows for p in points),
            adapters=point.adapters if point else max(p.adapters for p in points),
            adapter_ranks=self.adapter_ranks,
            adapter_targets=self.adapter_targets,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            runs=self.runs,
            seed=self.seed,
        )


def _numbers(text: str) -> list[int]:
    return [int(entry) for entry in split_names([text])]


def _are_numbers(text: str, least: int) -> bool:
    entries = split_names([text])
    return bool(entries) and all(entry.isdecimal() and int(entry) >= least for entry in entries)
