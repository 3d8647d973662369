"""What a calibration prints and draws: the fit against what was measured, function by function."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np

from launch.benchmarks.calibration import Calibrated, Timed, flops_per_s, link_rates
from memory_pool.calibration import FUNCTIONS, TERMS

_WIDTH = 22
_KIND_WIDTH = 24
_COLUMNS = {"call_s": ("us a call", 1e6), "piece_s": ("ns a piece", 1e9)}
_PER = {"byte_s": "byte", "again_byte_s": "byte again", "flop_s": "FLOP", "operand_byte_s": "operand"}


def report_text(found: Calibrated) -> str:
    """The machine, the coefficients, and how well they explain the measurements."""
    return "\n".join([*_machine(found), "", *_coefficients(found), "", *_fit(found.fitted)])


def by_kind(timed: Sequence[Timed]) -> dict[str, list[Timed]]:
    """Samples by what they measure, in the order of their first."""
    kinds: dict[str, list[Timed]] = {}
    for sample in timed:
        kinds.setdefault(sample.kind, []).append(sample)
    return kinds


def _machine(found: Calibrated) -> list[str]:
    hardware, streams = found.hardware, found.stream_bytes_per_s
    lines = [
        _line("machine", hardware.name),
        _line(
            "memory read",
            f"{hardware.device.memory_bytes_per_s / 1e9:.1f} GB/s by all cores, device and pool "
            f"(median; {min(streams) / 1e9:.1f} to {max(streams) / 1e9:.1f})",
        ),
    ]
    for t in found.timed:
        if t.kind == "matmul":
            lines.append(_line("product", f"{t.label}: {flops_per_s(t) / 1e9:.0f} GFLOP/s"))
    for way in ("to_pool", "to_device"):
        words = ", ".join(f"{size // 1024} KiB {rate / 1e9:.1f}" for size, rate in link_rates(found.timed, way).items())
        lines.append(_line(f"link {way}", f"{words} GB/s"))
    assert hardware.calibration is not None
    for name, points in hardware.calibration.base_steps.items():
        words = ", ".join(f"{rows:.0f} rows {1e3 * seconds:.1f}" for rows, seconds in points)
        lines.append(_line("base step", f"{name}: {words} ms"))
    return lines


def _coefficients(found: Calibrated) -> list[str]:
    """A row a function: calls and pieces in time, the rest in picoseconds of a byte or FLOP."""
    calibration = found.hardware.calibration
    assert calibration is not None
    heads = [_COLUMNS[term][0] if term in _COLUMNS else f"ps a {_PER[term]}" for term in TERMS]
    lines = [f"{'cost of':<{_KIND_WIDTH}}" + "".join(f"{head:>16}" for head in heads)]
    for name in FUNCTIONS:
        values = [
            calibration.coefficient(f"{name}.{term}") * (_COLUMNS[term][1] if term in _COLUMNS else 1e12)
            for term in TERMS
        ]
        lines.append(
            f"{name:<{_KIND_WIDTH}}" + "".join(f"{value:>16.2f}" if value else f"{'-':>16}" for value in values)
        )
    return lines


def _fit(timed: Sequence[Timed]) -> list[str]:
    lines = [f"{'fit of':<{_KIND_WIDTH}}{'points':>7}{'MAPE':>8}   worst: fitted, measured"]
    for kind, samples in by_kind(timed).items():
        worst = max(samples, key=lambda t: abs(t.error))
        lines.append(
            f"{kind:<{_KIND_WIDTH}}{len(samples):>7}{_mape(samples):>8.1%}   "
            f"{worst.error:+.0%}, {1e3 * worst.fitted_s:.2f}, {1e3 * worst.seconds:.2f} ms at {worst.label}"
        )
    return [*lines, f"{'all':<{_KIND_WIDTH}}{len(timed):>7}{_mape(timed):>8.1%}"]


def _mape(timed: Sequence[Timed]) -> float:
    return float(np.abs([t.error for t in timed]).mean())


def save_plot(found: Calibrated, path: pathlib.Path) -> None:
    """Draws fitted against measured times, and errors by function.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    times, errors = figure.subplots(1, 2, width_ratios=(1, 1))
    kinds = by_kind(found.fitted)
    for index, (kind, samples) in enumerate(kinds.items()):
        measured = np.array([t.seconds for t in samples]) * 1e3
        marker, color = "osD^vPX*"[index % 8], f"C{index % 10}"
        times.plot(measured, [1e3 * t.fitted_s for t in samples], marker, color=color, label=kind, ms=5, alpha=0.8)
        percent = [100 * t.error for t in samples]
        errors.plot(percent, np.full(len(samples), index), marker, color=color, ms=5, alpha=0.8)
    ends = [0.8e3 * min(t.seconds for t in found.fitted), 1.25e3 * max(t.seconds for t in found.fitted)]
    times.plot(ends, ends, color="black", lw=0.8)
    times.fill_between(ends, np.multiply(ends, 0.85), np.multiply(ends, 1.15), color="black", alpha=0.1, lw=0)
    times.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="fitted, ms", title=found.hardware.name)
    times.legend(fontsize=7)
    errors.axvspan(-15, 15, color="black", alpha=0.1, lw=0)
    errors.axvline(0, color="black", lw=0.8)
    errors.set(yticks=range(len(kinds)), yticklabels=list(kinds), xlabel="error of the fit, %")
    errors.invert_yaxis()
    figure.savefig(path, dpi=120)


def _line(label: str, text: str) -> str:
    return f"{label:<{_WIDTH}} {text}"
