"""What a calibration measures: points inside and around what steps have, few enough for two minutes.

Compilation takes half of the time, so shapes are few; `fetch` takes many times as long as the others and is measured on
some points only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from launch.benchmarks.calibration_programs import (
    Bench,
    Sample,
    attention_samples,
    base_sample,
    lanes_sample,
    link_samples,
    matmul_sample,
)
from launch.benchmarks.strategy_programs import AttentionPoint, LoraPoint, lora_programs
from strategies.cost import adapter_features, lane_quantities

_FUNCTIONS = {"shrink": "near_shrink", "expand": "device_expand", "delta": "near_delta"}
"""Functions of the cost model that near-data programs of the strategies benchmark are; where device and pool are the
same cores, an expand near the data is one on the device."""


class Design(NamedTuple):
    """The points.

    Attributes:
        lora: of all strategies.
        without_fetch: of all but `fetch`.
        attention: of device and near-data attention, and of the attention strategies.
        more_attention: of the first two only.
        link_bytes: sizes of a crossing.
        matmul_rows: rows of products.
        step_rows: rows of steps of the base model, and of empty lanes.
    """

    lora: tuple[LoraPoint, ...]
    without_fetch: tuple[LoraPoint, ...]
    attention: tuple[AttentionPoint, ...]
    more_attention: tuple[AttentionPoint, ...]
    link_bytes: tuple[int, ...]
    matmul_rows: tuple[int, ...]
    step_rows: tuple[int, ...]


USUAL = Design(
    lora=(
        LoraPoint(4, 1, 16),
        LoraPoint(12, 1, 32),
        LoraPoint(12, 3, 16),
        LoraPoint(20, 5, 16),
        LoraPoint(32, 1, 10),
        LoraPoint(32, 4, 20),
    ),
    without_fetch=(
        LoraPoint(6, 2, 20),
        LoraPoint(10, 4, 36),
        LoraPoint(24, 6, 6),
        LoraPoint(48, 1, 36),
        LoraPoint(48, 4, 28),
        LoraPoint(80, 1, 6),
        LoraPoint(80, 4, 12),
    ),
    attention=(AttentionPoint(256, 8), AttentionPoint(384, 40), AttentionPoint(1024, 16)),
    more_attention=(AttentionPoint(1536, 36), AttentionPoint(3072, 4)),
    link_bytes=(16 << 10, 256 << 10, 4 << 20, 64 << 20),
    matmul_rows=(8, 32, 128),
    step_rows=(8, 32, 128),
)

TINY = Design(
    lora=(LoraPoint(4, 1, 3), LoraPoint(12, 4, 3)),
    without_fetch=(LoraPoint(8, 2, 4),),
    attention=(AttentionPoint(40, 2),),
    more_attention=(AttentionPoint(200, 3),),
    link_bytes=(4 << 10, 64 << 10),
    matmul_rows=(8,),
    step_rows=(8, 16),
)
"""For tests of the command."""


def groups_of(design: Design, bench: Bench) -> Iterator[tuple[str, Callable[[], list[Sample]]]]:
    """What is compiled and timed together: words, and a function that compiles."""
    for point, fetch in [*((p, True) for p in design.lora), *((p, False) for p in design.without_fetch)]:
        words = f"rank {point.rank}, {point.tokens_per_adapter} tokens each, {point.adapters} adapters"
        yield words, lambda point=point, fetch=fetch, words=words: _lora(bench, point, fetch=fetch, label=words)
    for point, more in [*((p, True) for p in design.attention), *((p, False) for p in design.more_attention)]:
        words = f"attention of {point.sequences} x {point.context} tokens"
        yield words, lambda point=point, more=more: attention_samples(bench, point, strategies=more)
    yield "link", lambda: [sample for size in design.link_bytes for sample in link_samples(bench, size)]
    yield "products", lambda: [matmul_sample(bench, rows=rows, **s) for rows, s in _products(design, bench)]
    yield "empty lanes", lambda: [lanes_sample(bench, rows) for rows in design.step_rows]
    if (base := bench.base) is not None:
        yield "base steps", lambda: [base_sample(bench, base, rows) for rows in design.step_rows]


def _lora(bench: Bench, point: LoraPoint, *, fetch: bool, label: str) -> list[Sample]:
    features = adapter_features(bench.shape, np.full((point.adapters, len(bench.shape.names)), point.rank))
    tokens = np.full(point.adapters, float(point.tokens_per_adapter))
    programs = lora_programs(point, bench.model, bench.cold, bench.kernels, leave_out=() if fetch else ("fetch",))
    found = []
    for program in programs:
        name = _FUNCTIONS.get(program.name, program.name)
        quantities = lane_quantities(bench.shape, features, tokens, strategy=name, rows=point.rows)
        found.append(Sample(program.name, label, program, quantities))
    return found


def _products(design: Design, bench: Bench) -> Iterator[tuple[int, dict[str, int]]]:
    """The narrowest and the widest matrix of the layers."""
    matrices = sorted(bench.shape.matrices, key=lambda matrix: matrix.inputs * matrix.outputs)
    for rows, matrix in itertools.product(design.matmul_rows, (matrices[0], matrices[-1])):
        yield rows, {"inputs": matrix.inputs, "outputs": matrix.outputs}
