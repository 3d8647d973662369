"""Measures this machine and fits the calibrated cost model to it: a hardware file from a few hundred timings.

Every program goes through all layers of a base model with cold pages, as a step does; what it does is counted as calls,
bytes and FLOPs of the cost model's functions, and one non-negative least squares over all of them gives the seconds of
each. Medians over rounds that each go over all programs.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from launch.benchmarks.calibration_points import Design, groups_of
from launch.benchmarks.calibration_programs import FRAME, Bench, Sample
from launch.benchmarks.machine import cpu_name, memory_bytes, usable_cores
from launch.benchmarks.program_timing import measure
from launch.console import StageLog
from memory_pool.calibration import calibration_of
from memory_pool.hardware import CORES, MEMORY, DeviceSpec, HardwareSpec, LinkSpec, PoolDeviceSpec
from strategies.cost import Measurement, fit_coefficients


class Timed(NamedTuple):
    """A sample with what it took.

    Attributes:
        kind: what it measures.
        label: its size in words.
        quantities: by flat name of the coefficient; empty for what is not in the fit.
        data_bytes: that a call reads or moves.
        runs_s: seconds of each run.
        seconds: their median.
        fitted_s: what the fit says.
    """

    kind: str
    label: str
    quantities: Mapping[str, float]
    data_bytes: int
    runs_s: tuple[float, ...]
    seconds: float
    fitted_s: float = float("nan")

    @property
    def error(self) -> float:
        """Of the fit, relative to what was measured."""
        return self.fitted_s / self.seconds - 1


class Calibrated(NamedTuple):
    """The result.

    Attributes:
        hardware: with its calibration.
        timed: every sample, those of the fit first.
        stream_bytes_per_s: of streaming reads of all pages by all cores.
    """

    hardware: HardwareSpec
    timed: Sequence[Timed]
    stream_bytes_per_s: Sequence[float]

    @property
    def fitted(self) -> Sequence[Timed]:
        """The samples of the fit."""
        return [t for t in self.timed if t.quantities]

    @property
    def mean_error(self) -> float:
        """Mean absolute error of the fit over its samples."""
        return float(np.abs([t.error for t in self.fitted]).mean())


def calibrate(bench: Bench, design: Design, *, name: str, runs: int, log: StageLog) -> Calibrated:
    """Measures and fits.

    Args:
        bench: base model and pages.
        design: what is measured.
        name: of the machine.
        runs: measured rounds.
        log: told how far it is.
    """
    timed, streams = _measure(bench, design, runs=runs, log=log)
    fitted = [t for t in timed if t.quantities]
    fit = fit_coefficients([Measurement(t.quantities, t.seconds) for t in fitted])
    fitted = [t._replace(fitted_s=t.seconds * (1 + e)) for t, e in zip(fitted, fit.errors, strict=True)]
    timed = [*fitted, *(t for t in timed if not t.quantities)]
    kept = {what: value for what, value in fit.coefficients.items() if not what.startswith(f"{FRAME}.")}
    calibration = calibration_of(kept, base_steps=_base_steps(bench, design, timed))
    found = Calibrated(_hardware(name, timed, streams), timed, streams)
    source = (
        f"{usable_cores()} cores of {cpu_name()}, {datetime.date.today().isoformat()}, {len(timed)} programs, "
        f"mean error of the fit {found.mean_error:.1%}"
    )
    calibration = dataclasses.replace(calibration, source=source)
    return found._replace(hardware=dataclasses.replace(found.hardware, calibration=calibration))


def _measure(bench: Bench, design: Design, *, runs: int, log: StageLog) -> tuple[list[Timed], list[float]]:
    groups: list[list[Sample]] = []
    entries = list(groups_of(design, bench))
    for number, (words, compiled) in enumerate(entries, 1):
        started = time.monotonic()
        groups.append(compiled())
        log.say(f"{number}/{len(entries)}", f"{words}: compiled in {time.monotonic() - started:.1f} s")

    def tell(run: int, seconds: float) -> None:
        log.say(f"run {run}/{runs}" if run else "warm-up", f"{seconds:.1f} s")

    results = measure([[s.program for s in group] for group in groups], bench.cold, runs=runs, tell=tell)
    timed = [
        Timed(sample.kind, sample.label, sample.quantities, timing.data_bytes, timing.runs_s, timing.median_s)
        for group, timings in zip(groups, results, strict=True)
        for sample, timing in zip(group, timings, strict=True)
    ]
    return timed, [rate for timings in results for rate in timings[0].stream_bytes_per_s]


def _hardware(name: str, timed: Sequence[Timed], streams: Sequence[float]) -> HardwareSpec:
    """What the samples say of device, link and pool, which are the same cores and memory here."""
    stream = float(np.median(streams))
    flops = max(flops_per_s(t) for t in timed if t.kind == "matmul")
    to_pool, to_device = (link_rates(timed, way) for way in ("to_pool", "to_device"))
    smallest = min(to_device)
    source = "measured by launch.calibrate"
    return HardwareSpec(
        name=name,
        device=DeviceSpec(
            flops_per_s=flops, memory_bytes_per_s=stream, memory_bytes=float(memory_bytes()), source=source
        ),
        link=LinkSpec(
            to_device_bytes_per_s=to_device[max(to_device)],
            to_pool_bytes_per_s=to_pool[max(to_pool)],
            latency_s=smallest / to_device[smallest],
            full_duplex=False,
            source=f"{source}: a copy in memory; latency is the time of {smallest} bytes",
        ),
        pool_device=PoolDeviceSpec(
            dram_bytes_per_s=stream,
            near_flops_per_s=flops,
            source=f"{source}: the device's cores and memory",
        ),
        shared=frozenset((CORES, MEMORY)),
    )


def _base_steps(bench: Bench, design: Design, timed: Sequence[Timed]) -> dict[str, list[tuple[float, float]]]:
    """Steps of the base model with lanes that are all empty."""
    if bench.base is None:
        return {}
    seconds = {(t.kind, t.label): t.seconds for t in timed}
    labels = {rows: f"{rows} rows" for rows in design.step_rows}
    return {
        bench.shape.name: [
            (float(rows), seconds["base step", label] + seconds["empty lanes", label]) for rows, label in labels.items()
        ]
    }


def flops_per_s(timed: Timed) -> float:
    """Rate of a product."""
    return timed.quantities["matmul.flop_s"] / timed.seconds


def link_rates(timed: Sequence[Timed], way: str) -> dict[int, float]:
    """Bytes per second by bytes of a crossing.

    Args:
        timed: all samples.
        way: "to_pool" or "to_device".
    """
    return {t.data_bytes: t.data_bytes / t.seconds for t in timed if t.kind == f"link {way}"}
