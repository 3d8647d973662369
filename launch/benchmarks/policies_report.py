"""What the policies benchmark prints and writes."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from launch.benchmarks.policies_case import AUTO, FAR
from launch.benchmarks.policies_figures import RunFigures, median_figures
from launch.benchmarks.report import System
from launch.console import in_bytes
from strategies.strategy_table import LORA

NEAR_BEST = 1.03
"""Of the lowest mean latency: what `auto` may be above it."""

MEAN_REGRET, WORST_REGRET = 1.05, 1.2

_LABEL_WIDTH = 24
_HEAD = f"{'policy':<10}{'ms':>8}{'over auto':>11}{'ITL':>8}{'p50':>8}{'p99':>8}{'all ITL':>9}{'over auto':>11}"
_HEAD += f"{'streams':>9}{'tokens/s':>10}{'on device':>11}{'link/token':>12}"


class Measured(NamedTuple):
    """The runs of one policy under one traffic.

    Attributes:
        traffic: kind.
        policy: name.
        runs: its runs.
        beside: the run of auto that took turns with each; empty without auto.
    """

    traffic: str
    policy: str
    runs: tuple[RunFigures, ...]
    beside: tuple[RunFigures, ...]

    @property
    def median(self) -> RunFigures:
        return median_figures(self.runs)

    @property
    def over_auto(self) -> float | None:
        """Median over the runs of its latency over that of auto beside it; None without auto."""
        return self._over(lambda run: run.latency_s)

    @property
    def all_over_auto(self) -> float | None:
        """The same with steps that compute prompts."""
        return self._over(lambda run: run.all_latency_s)

    def _over(self, of: Callable[[RunFigures], float]) -> float | None:
        if not self.beside:
            return None
        return statistics.median(of(run) / of(auto) for run, auto in zip(self.runs, self.beside, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoliciesReport:
    """One finished measurement.

    Attributes:
        case: the case in words.
        options: every option of the case, by flag.
        system: what answered.
        planning: the planner and its hardware.
        machine: where it ran, as `describe_machine`.
        software: versions.
        measured: by traffic and policy.
        compilations: programs compiled in traffic.
        command: command line that repeats it.
        measured_at: when.
    """

    case: str
    options: Mapping[str, Any]
    system: System
    planning: str
    machine: Mapping[str, str | int]
    software: Mapping[str, str]
    measured: Sequence[Measured]
    compilations: int
    command: str
    measured_at: datetime.datetime

    @property
    def traffics(self) -> list[str]:
        """Kinds of traffic that were measured."""
        return list(dict.fromkeys(entry.traffic for entry in self.measured))

    @property
    def ratios(self) -> dict[str, float]:
        """By traffic, the latency of `auto` over the lowest; what plans for another machine is left out."""
        return {traffic: max(1.0, *of.values()) for traffic in self.traffics if (of := self._auto_over(traffic))}

    @property
    def regrets(self) -> dict[str, float]:
        """By traffic, the latency of `auto` over that of the best fixed strategy."""
        fixed = {
            traffic: [ratio for policy, ratio in self._auto_over(traffic).items() if policy in LORA]
            for traffic in self.traffics
        }
        return {traffic: max(ratios) for traffic, ratios in fixed.items() if ratios}

    def _auto_over(self, traffic: str) -> dict[str, float]:
        """The latency of `auto` over that of each policy that it is held to."""
        return {
            entry.policy: 1 / over
            for entry in self.measured
            if entry.traffic == traffic and entry.policy not in (AUTO, FAR) and (over := entry.over_auto) is not None
        }

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values; times in seconds."""
        return {
            "benchmark": "policies",
            "case": self.case,
            "options": dict(self.options),
            "system": dataclasses.asdict(self.system),
            "planning": self.planning,
            "machine": dict(self.machine),
            "software": dict(self.software),
            "measured": [
                {
                    "traffic": entry.traffic,
                    "policy": entry.policy,
                    "over_auto": entry.over_auto,
                    "median": entry.median._asdict(),
                    "runs": [run._asdict() for run in entry.runs],
                    "auto_beside": [run._asdict() for run in entry.beside],
                }
                for entry in self.measured
            ],
            "ratio_to_lowest": self.ratios,
            "regret": self.regrets,
            "compilations_in_traffic": self.compilations,
            "command": self.command,
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
        }

    def as_text(self) -> str:
        """The same for people: a table for each traffic, what the plans said, and the verdict."""
        machine = self.machine
        hardware = f"{machine['cpu']}, {machine['cores']} cores, {in_bytes(float(machine['memory_bytes']))}"
        lines = [
            _line("case", self.case),
            _line("system", self.system.name),
            _line("device memory", _in_words({k: in_bytes(v) for k, v in self.system.device_bytes.items()})),
            _line("planner", self.planning),
            _line("hardware", hardware),
            _line("software", _in_words(self.software)),
        ]
        for traffic in self.traffics:
            lines += ["", *self._table(traffic)]
        lines += ["", *self._verdict(), ""]
        text = str(self.compilations) if not self.compilations else f"{self.compilations}, and must be 0"
        return "\n".join([*lines, _line("compilations in traffic", text), _line("command", self.command)])

    def _table(self, traffic: str) -> list[str]:
        entries = [entry for entry in self.measured if entry.traffic == traffic]
        notes = [note for entry in entries for note in _notes(entry.policy, entry.median)]
        return [f"{traffic} traffic", _HEAD, *map(_row, entries), *notes]

    def _verdict(self) -> list[str]:
        if not self.ratios:
            return ["verdict: there is nothing to hold auto to"]
        lines = []
        for traffic, ratio in self.ratios.items():
            said = "lowest" if ratio == 1 else f"{100 * (ratio - 1):.1f} % above the lowest"
            lines.append(f"verdict {traffic}: auto is {said}, {_met(ratio <= NEAR_BEST)} (at most 3 % wanted)")
        if self.regrets:
            mean, worst = statistics.mean(self.regrets.values()), max(self.regrets.values())
            met = _met(mean <= MEAN_REGRET and worst <= WORST_REGRET)
            wanted = f"at most {MEAN_REGRET} and {WORST_REGRET} wanted"
            lines.append(f"verdict regret: {mean:.3f} on average and {worst:.3f} at worst, {met} ({wanted})")
        return lines


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}} {text}"


def _in_words(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _met(is_met: bool) -> str:
    return "met" if is_met else "NOT met"


def _row(entry: Measured) -> str:
    run = entry.median
    times = "".join(f"{1000 * value:>8.2f}" for value in (run.itl_s, run.itl_p50_s, run.itl_p99_s))
    row = f"{entry.policy:<10}{1000 * run.latency_s:>8.2f}{_ratio(entry.over_auto)}{times}{1000 * run.all_itl_s:>9.2f}"
    row += f"{_ratio(entry.all_over_auto)}{run.streams:>9.1f}{run.tokens_per_s:>10.1f}"
    return f"{row}{100 * run.on_device:>9.1f} %{in_bytes(run.link_bytes_per_token):>12}"


def _ratio(over: float | None) -> str:
    return f"{'-' if over is None else f'{over:.3f}':>11}"


def _notes(policy: str, run: RunFigures) -> list[str]:
    """What stands under the table of a policy that plans; forced strategies have their KV planned alone."""
    notes: list[str] = []
    if policy in LORA:
        return notes
    if run.plans and run.plan_s is not None:
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in run.by_strategy.items())
        text = f"{policy}: {run.plans:.0f} plans of {1000 * run.plan_s:.1f} ms, {run.copied_pages:.0f} pages copied"
        if run.predicted_s is not None:
            text += f", a decode step predicted {1000 * run.predicted_s:.2f} ms, measured {1000 * run.itl_s:.2f}"
        notes.append(f"  {text}; {shares}")
    if run.first_quarter is not None and run.last_quarter is not None:
        first, last = 100 * run.first_quarter, 100 * run.last_quarter
        notes.append(
            f"  {policy}: of tokens of popular adapters {first:.0f} % were read on the device in first quarters of "
            f"periods, {last:.0f} % in last ones"
        )
    return notes
