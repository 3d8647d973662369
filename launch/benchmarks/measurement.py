"""What is measured: times of single requests as their client sees them, and the figures of a run made of them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Job(NamedTuple):
    """One request to send: greedy, and on to the last token whatever the model says.

    Attributes:
        prompt_ids: token ids.
        model: adapter or model that answers; None for the base model.
        new_tokens: tokens to generate.
        at_s: when it is sent, seconds after the first of its run; 0 for as soon as its turn comes.
    """

    prompt_ids: Sequence[int]
    model: str | None
    new_tokens: int
    at_s: float = 0.0


class RequestRecord(NamedTuple):
    """One request as its client saw it; times in seconds of one clock.

    Attributes:
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens that came back.
        sent_s: when it was sent.
        piece_s: when each piece of the answer came, at least one; a piece is a token, or what one event of a stream
            holds.
    """

    prompt_tokens: int
    output_tokens: int
    sent_s: float
    piece_s: Sequence[float]


class Target(Protocol):
    """What answers the requests."""

    def run(self, jobs: Sequence[Job], *, concurrency: int | None) -> list[RequestRecord]:
        """Sends all jobs and waits for the answers.

        Args:
            jobs: in the order in which they are sent; those with a time are sent at that time, and what they take
                counts from then.
            concurrency: requests in flight at most; None for all at once.
        """
        ...

    def compilations(self) -> int | None:
        """Programs compiled so far, None where that is not known."""
        ...

    def preemptions(self) -> int | None:
        """Sequences that had to give their KV pages back so far, None where that is not known."""
        ...


async def answer_all(
    jobs: Sequence[Job], *, concurrency: int, answer: Callable[[Job, float], Awaitable[RequestRecord]]
) -> list[RequestRecord]:
    """Sends jobs, each when its time and its turn have come, from one event loop.

    Args:
        jobs: as `Target.run` is given them.
        concurrency: requests in flight at most.
        answer: sends a job; its second argument is when what it takes counts from, seconds of `time.perf_counter`.
    """
    turn, started_s = asyncio.Semaphore(concurrency), time.perf_counter()

    async def in_turn(job: Job) -> RequestRecord:
        if job.at_s:
            await asyncio.sleep(started_s + job.at_s - time.perf_counter())
        async with turn:
            # A request that has a time counts from it, also where it had to wait for its turn.
            return await answer(job, started_s + job.at_s if job.at_s else time.perf_counter())

    return await asyncio.gather(*map(in_turn, jobs))


class Percentiles(NamedTuple):
    """Seconds; between two values linear, as numpy has it."""

    p50: float
    p90: float
    p99: float


class RunFigures(NamedTuple):
    """What one run gave.

    Attributes:
        wall_s: from the first request sent to the last piece of an answer.
        prompt_tokens: of all prompts.
        output_tokens: of all answers.
        output_tokens_per_s: output_tokens / wall_s, so the whole run, prefill included.
        total_tokens_per_s: the same with the prompts' tokens.
        ttft_s: from sending a request to the first piece of its answer.
        itl_s: between two pieces of an answer; None where no answer has two.
        e2e_s: from sending a request to the last piece of its answer.
        short_answers: answers that ended before the tokens asked for.
    """

    wall_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Percentiles
    itl_s: Percentiles | None
    e2e_s: Percentiles
    short_answers: int


class Measurement(NamedTuple):
    """Runs of one case.

    Attributes:
        runs: figures of each, without the warm-up.
        compilations: programs compiled during all runs, warm-up included; None where not known.
        preemptions: sequences that had to give their KV pages back meanwhile; None where not known.
    """

    runs: tuple[RunFigures, ...]
    compilations: int | None
    preemptions: int | None


def measure(
    target: Target,
    make_jobs: Callable[[], Sequence[Job]],
    *,
    runs: int,
    concurrency: int | None,
    on_run: Callable[[int, RunFigures], None],
) -> Measurement:
    """Runs a case once to warm up, then as often as asked.

    Args:
        target: what answers.
        make_jobs: the jobs of the next run.
        runs: measured runs.
        concurrency: as `Target.run`.
        on_run: told each run's number (0: the warm-up) and figures when it has ended.
    """
    compiled, preempted = target.compilations(), target.preemptions()
    figures: list[RunFigures] = []
    for number in range(runs + 1):
        jobs = make_jobs()
        figures.append(run_figures(jobs, target.run(jobs, concurrency=concurrency)))
        on_run(number, figures[-1])
    return Measurement(
        tuple(figures[1:]),
        compilations=_gain(compiled, target.compilations()),
        preemptions=_gain(preempted, target.preemptions()),
    )


def run_figures(jobs: Sequence[Job], records: Sequence[RequestRecord]) -> RunFigures:
    """Figures of one run.

    Args:
        jobs: what was asked for.
        records: one a job, in order.
    """
    wall_s = max(r.piece_s[-1] for r in records) - min(r.sent_s for r in records)
    prompt_tokens, output_tokens = sum(r.prompt_tokens for r in records), sum(r.output_tokens for r in records)
    gaps = [gap for r in records for gap in np.diff(r.piece_s)]
    return RunFigures(
        wall_s=wall_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / wall_s,
        ttft_s=percentiles([r.piece_s[0] - r.sent_s for r in records]),
        itl_s=percentiles(gaps) if gaps else None,
        e2e_s=percentiles([r.piece_s[-1] - r.sent_s for r in records]),
        short_answers=sum(r.output_tokens < job.new_tokens for job, r in zip(jobs, records, strict=True)),
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """p50, p90 and p99 of at least one value."""
    return Percentiles(*(float(p) for p in np.percentile(values, (50, 90, 99))))


def median_run(runs: Sequence[RunFigures]) -> RunFigures:
    """The median over runs of every figure for itself; a percentile's is the median of the runs' percentiles."""
    gaps = [run.itl_s for run in runs if run.itl_s is not None]
    return RunFigures(
        wall_s=statistics.median(run.wall_s for run in runs),
        prompt_tokens=statistics.median_low([run.prompt_tokens for run in runs]),
        output_tokens=statistics.median_low([run.output_tokens for run in runs]),
        output_tokens_per_s=statistics.median(run.output_tokens_per_s for run in runs),
        total_tokens_per_s=statistics.median(run.total_tokens_per_s for run in runs),
        ttft_s=_median_percentiles([run.ttft_s for run in runs]),
        itl_s=_median_percentiles(gaps) if gaps else None,
        e2e_s=_median_percentiles([run.e2e_s for run in runs]),
        short_answers=statistics.median_low([run.short_answers for run in runs]),
    )


def _median_percentiles(values: Sequence[Percentiles]) -> Percentiles:
    return Percentiles(*(statistics.median(column) for column in zip(*values, strict=True)))


def _gain(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
