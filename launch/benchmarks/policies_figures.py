"""From the steps of a run to its figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from launch.benchmarks.policies_traffic import Traffic
from launch.benchmarks.policies_watch import Step, WatchedPlanner
from launch.flags import StartError
from strategies.strategy_table import LORA

ON_DEVICE = frozenset(name for name, strategy in LORA.items() if strategy.needs.a or strategy.needs.b)
"""Strategies that read A or B on the device."""


class RunFigures(NamedTuple):
    """What one run gave, its warm-up and its end left out; None for what cannot be in it.

    Times and rates are those of settled steps.

    Attributes:
        latency_s: `itl_s`, times the streams there should be over those that ran: a stream that waits until there is
            room for its adapter gets no token either. Policies are compared by it.
        itl_s: mean time between two tokens of a running stream in steps that only decode.
        itl_p50_s: its median.
        itl_p99_s: its 99th percentile.
        all_itl_s: the mean with steps that compute prompts as well.
        all_latency_s: the same for streams that wait, as `latency_s`.
        streams: that ran, mean over time.
        tokens_per_s: decoded tokens over the time.
        tokens: decoded tokens.
        on_device: share of decoded tokens whose adapter's A or B was read on the device.
        by_strategy: share of decoded tokens by LoRA strategy.
        link_bytes_per_token: bytes that LoRA strategies moved for each decoded token, copies to the device included.
        copied_pages: pages of adapters and KV copied to the device between steps by a planner.
        plans: plans that were applied.
        plan_s: mean time of a plan in its thread.
        predicted_s: mean of what plans said of steps that only decode.
        first_quarter: drifting traffic: share of decoded tokens of popular adapters that were read on the device, in
            the first quarter of each period.
        last_quarter: the same in the last quarter.
    """

    latency_s: float
    itl_s: float
    itl_p50_s: float
    itl_p99_s: float
    all_itl_s: float
    all_latency_s: float
    streams: float
    tokens_per_s: float
    tokens: int
    on_device: float
    by_strategy: dict[str, float]
    link_bytes_per_token: float
    copied_pages: int
    plans: int
    plan_s: float | None
    predicted_s: float | None
    first_quarter: float | None
    last_quarter: float | None


def run_figures(
    watched: WatchedPlanner,
    *,
    concurrency: int,
    traffic: Traffic,
    index_of: dict[int, int],
    sizes: Sequence[int],
    room: int,
) -> RunFigures:
    """Figures of one run.

    Args:
        watched: saw it.
        concurrency: streams there should be.
        traffic: that was sent.
        index_of: adapter of the traffic by identity.
        sizes: bytes of each adapter.
        room: bytes of device memory for adapters.

    Raises:
        StartError: it was too short.
    """
    steps, every = [step for step in watched.steps if step.settled], watched.steps
    if not any(step.served for step in steps if not step.prefill_tokens):
        raise StartError("no step of a run only decoded: raise --requests or --new_tokens, or lower --warmup_requests")
    seconds = np.array([step.seconds for step in steps])
    tokens = np.array([len(step.served) for step in steps])
    rows = np.array([step.rows for step in steps])
    streams = float((rows * seconds).sum() / seconds.sum())
    pure = np.array([not step.prefill_tokens for step in steps])
    gaps, all_gaps = np.repeat(seconds[pure], tokens[pure]), np.repeat(seconds, tokens)
    strategies = [strategy for step in every for _, strategy in step.served]
    predicted = [step.predicted_s for step, only in zip(steps, pure, strict=True) if only and step.predicted_s]
    planned = [step.planned_s for step in every if step.planned_s is not None]
    quarters = _quarters(every, traffic, index_of, _popular(traffic, sizes, room))
    return RunFigures(
        latency_s=float(gaps.mean()) * concurrency / streams,
        all_itl_s=float(all_gaps.mean()),
        all_latency_s=float(all_gaps.mean()) * concurrency / streams,
        itl_s=float(gaps.mean()),
        itl_p50_s=float(np.percentile(gaps, 50)),
        itl_p99_s=float(np.percentile(gaps, 99)),
        streams=streams,
        tokens_per_s=float(tokens.sum() / seconds.sum()),
        tokens=len(strategies),
        on_device=sum(strategy in ON_DEVICE for strategy in strategies) / len(strategies),
        by_strategy={name: strategies.count(name) / len(strategies) for name in LORA},
        link_bytes_per_token=watched.link_bytes / len(strategies),
        copied_pages=sum(step.moved_pages for step in every),
        plans=len(planned),
        plan_s=statistics.mean(planned) if planned else None,
        predicted_s=statistics.mean(predicted) if predicted else None,
        first_quarter=quarters[0],
        last_quarter=quarters[1],
    )


def median_figures(runs: Sequence[RunFigures]) -> RunFigures:
    """The median over runs of every figure for itself."""
    columns = {name: [getattr(run, name) for run in runs] for name in RunFigures._fields if name != "by_strategy"}
    values: dict[str, Any] = {name: _median(column) for name, column in columns.items()}
    by_strategy = {name: statistics.median(run.by_strategy[name] for run in runs) for name in LORA}
    return RunFigures(**values, by_strategy=by_strategy)


def _median(column: Iterable[float | None]) -> float | None:
    known = [value for value in column if value is not None]
    return statistics.median(known) if known else None


def _popular(traffic: Traffic, sizes: Sequence[int], room: int) -> list[frozenset[int]]:
    """Of each period the most popular adapters, as many as the device can hold."""
    found = []
    for adapters in traffic.by_popularity:
        held = np.cumsum(np.asarray(sizes)[adapters]) <= room
        found.append(frozenset(adapters[held].tolist()))
    return found


def _quarters(
    steps: Sequence[Step], traffic: Traffic, index_of: dict[int, int], popular: Sequence[frozenset[int]]
) -> tuple[float | None, float | None]:
    """Of popular adapters, the share of tokens read on the device in first and last quarters of periods.

    Periods of which a part was not measured are left out, as is traffic that does not drift.
    """
    counts = np.zeros((2, 2), int)  # first or last quarter; tokens, and those read on the device
    length = traffic.period_requests
    for step in steps:
        period, place = divmod(step.started - 1, length)
        quarter = {0: 0, 3: 1}.get(4 * place // length)
        whole = steps[0].started <= period * length + 1
        if len(popular) == 1 or quarter is None or not whole:
            continue
        served = [strategy in ON_DEVICE for id_, strategy in step.served if index_of[id_] in popular[period]]
        counts[quarter] += len(served), sum(served)
    first, last = (int(on) / int(all_) if all_ else None for all_, on in counts)
    return first, last
