"""What really runs in a lane, counted: how many calls, bytes and FLOPs each calibrated function has in a step.

Programs work on all rows of a compiled step, send them whole, and stream rank components in whole chunks; so most of a
lane's costs do not depend on its tokens. A strategy is a recipe: which functions it calls, and which amount of work
each of their terms has. The same recipes serve the fit of a calibration (`lane_quantities`, exact, by flat name of the
coefficient) and plan problems (`strategies.cost.calibrated`, linear in the adapters).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memory_pool.calibration import Calibration
from strategies.cost.attention_work import KvLoad, attention_work
from strategies.cost.features import EXPAND_TOKENS, SHRINK_TOKENS, AdapterFeatures, adapter_work, passes
from strategies.cost.shapes import ModelShape
from strategies.lanes import SCRATCH_PAGES
from strategies.low_rank import CHUNK_ROWS

WIDE_BYTES = 4
"""Of a float32 result."""

Terms = tuple[tuple[str, str], ...]
"""(term of a FunctionCost, amount of work)."""

ADAPTER_AMOUNTS = (
    "pieces",
    "a",
    "b",
    "a_again",
    "b_again",
    "a_flops",
    "b_flops",
    "chunks",
    "streams",
    "chunk_bytes",
    "chunk_flops",
)
"""Amounts that each adapter adds: its matrices, bytes read and read again, FLOPs, its part of whole chunks."""
LANE_AMOUNTS = (
    "calls",
    "matrices",
    "x",
    "y",
    "m",
    "wide",
    "chunks",
    "streams",
    "chunk_bytes",
    "chunk_flops",
)
"""Amounts of a lane as such: calls, matrices, bytes of rows; of streams, what chunks that are not full add."""

_DELTA: Terms = (
    ("call_s", "calls"),
    ("piece_s", "pieces"),
    ("byte_s", "a"),
    ("byte_s", "b"),
    ("again_byte_s", "a_again"),
    ("again_byte_s", "b_again"),
    ("flop_s", "a_flops"),
    ("flop_s", "b_flops"),
    ("operand_byte_s", "x"),
    ("operand_byte_s", "wide"),
)
_SHRINK: Terms = (
    ("call_s", "calls"),
    ("piece_s", "pieces"),
    ("byte_s", "a"),
    ("again_byte_s", "a_again"),
    ("flop_s", "a_flops"),
    ("operand_byte_s", "x"),
    ("operand_byte_s", "m"),
)
_EXPAND: Terms = (
    ("call_s", "calls"),
    ("piece_s", "pieces"),
    ("byte_s", "b"),
    ("again_byte_s", "b_again"),
    ("flop_s", "b_flops"),
    ("operand_byte_s", "m"),
    ("operand_byte_s", "wide"),
)
_CHUNK: Terms = (("call_s", "chunks"), ("byte_s", "chunk_bytes"), ("flop_s", "chunk_flops"), ("operand_byte_s", "wide"))
_STREAM: Terms = (("call_s", "streams"), ("byte_s", "chunk_bytes"))
_SEND: Terms = (("call_s", "calls"), ("byte_s", "x"))

KERNELS: Mapping[str, Terms] = {
    "device_delta": _DELTA,
    "device_expand": _EXPAND,
    "near_delta": _DELTA,
    "near_shrink": _SHRINK,
}
"""Functions that can be measured on their own."""

RECIPES: Mapping[str, Mapping[str, Terms]] = {
    "resident": {"device_delta": _DELTA},
    "fetch": {"near_rows": _STREAM, "to_device": _STREAM, "device_chunk": _CHUNK},
    "near_data": {
        "to_pool": _SEND,
        "near_delta": _DELTA,
        "to_device": (("call_s", "matrices"), ("byte_s", "y")),
    },
    "split": {
        "to_pool": _SEND,
        "near_shrink": _SHRINK,
        "to_device": (("call_s", "calls"), ("byte_s", "m")),
        "device_expand": _EXPAND,
    },
}
"""Functions of each LoRA strategy."""


def adapter_amounts(
    shape: ModelShape, features: AdapterFeatures, tokens: np.ndarray, *, rows: int
) -> dict[str, np.ndarray]:
    """ADAPTER_AMOUNTS of each adapter and phase, [N, F]; chunks as if they were all full.

    Args:
        shape: of the base model.
        features: of N adapters.
        tokens: [N]; below 1 the chance of having one.
        rows: of the program.
    """
    work = adapter_work(shape, features, tokens)
    column = tokens[:, None]
    present = np.minimum(column, 1.0)
    streamed = work.a_bytes + work.b_bytes
    chunks = present * features.components / CHUNK_ROWS
    again = {side: np.maximum(passes(column, side) - 1, 0) for side in (SHRINK_TOKENS, EXPAND_TOKENS)}
    return {
        "pieces": present * features.pieces,
        "a": work.a_bytes,
        "b": work.b_bytes,
        "a_again": again[SHRINK_TOKENS] * features.a_bytes,
        "b_again": again[EXPAND_TOKENS] * features.b_bytes,
        "a_flops": work.a_flops,
        "b_flops": work.b_flops,
        "chunks": chunks,
        "streams": 2 * chunks,
        "chunk_bytes": streamed,
        "chunk_flops": 2 * rows / shape.bytes_of_lora * streamed,
    }


def lane_amounts(shape: ModelShape, *, rows: int, max_rank: int, spare_chunks: np.ndarray) -> dict[str, np.ndarray]:
    """LANE_AMOUNTS of each phase, [F].

    Args:
        shape: of the base model.
        rows: of the program.
        max_rank: widest product with A that it has room for.
        spare_chunks: [J], chunks of each projection in a layer beyond those that its components would fill.
    """
    item, phases = shape.item_bytes, shape.phases
    layers = np.array([phase.layers * bool(phase.matrices) for phase in phases], float)
    count, into, outputs, chunks, chunk_numbers = np.zeros((5, len(phases)))
    np.add.at(count, shape.phase_of, 1)
    np.add.at(outputs, shape.phase_of, [m.outputs for m in shape.matrices])
    np.add.at(chunks, shape.phase_of, spare_chunks)
    np.add.at(chunk_numbers, shape.phase_of, spare_chunks * [m.inputs + m.outputs for m in shape.matrices])
    into[:] = [phase.inputs * phase.input_rows for phase in phases]
    numbers = layers * chunk_numbers * CHUNK_ROWS
    return {
        "calls": layers,
        "matrices": layers * count,
        "x": layers * rows * into * item,
        "y": layers * rows * outputs * item,
        "m": layers * rows * max_rank * count * item,
        "wide": layers * rows * outputs * WIDE_BYTES,
        "chunks": layers * chunks,
        "streams": 2 * layers * chunks,
        "chunk_bytes": numbers * shape.bytes_of_lora,
        "chunk_flops": 2 * rows * numbers,
    }


def lane_quantities(
    shape: ModelShape,
    features: AdapterFeatures,
    tokens: np.ndarray,
    *,
    strategy: str,
    rows: int,
    max_rank: int | None = None,
) -> dict[str, float]:
    """What one strategy's lane does in a step, by flat name of the coefficient.

    Args:
        shape: of the base model.
        features: of the adapters of the lane, all of which have tokens.
        tokens: [N].
        strategy: a LoRA strategy, or one of KERNELS.
        rows: of the program.
        max_rank: that the program has room for; None for the widest of the lane.
    """
    tokens = np.asarray(tokens, float)
    totals = features.ranks.sum(axis=0) / CHUNK_ROWS
    room = int(features.ranks.max()) if max_rank is None else max_rank
    amounts = adapter_amounts(shape, features, tokens, rows=rows)
    common = lane_amounts(shape, rows=rows, max_rank=room, spare_chunks=np.ceil(totals) - totals)
    total = {name: float(values.sum()) for name, values in amounts.items()}
    for name, values in common.items():
        total[name] = total.get(name, 0.0) + float(values.sum())
    recipe = RECIPES[strategy] if strategy in RECIPES else {strategy: KERNELS[strategy]}
    found: dict[str, float] = {}
    for function, terms in recipe.items():
        for term, amount in terms:
            name = f"{function}.{term}"
            found[name] = found.get(name, 0.0) + total[amount]
    return found


def attention_quantities(shape: ModelShape, kv: KvLoad, *, strategy: str, pool_devices: int = 1) -> dict[str, float]:
    """What attention does in a step with all KV in one place, by flat name of the coefficient.

    Args:
        shape: of the base model.
        kv: of the running sequences.
        strategy: "device" (all KV there), "near" (the near-data function alone), "local" or "distributed".
        pool_devices: D that have KV.

    Raises:
        ValueError: there is no such strategy.
    """
    work, layers = attention_work(shape, kv), shape.attention.layers
    wide = kv.tokens * layers * shape.attention.heads * (shape.attention.value_dim + 2) * WIDE_BYTES
    where = "near" if strategy in ("near", "distributed") else "device"
    calls = pool_devices if where == "near" else 1
    found = {
        f"{where}_attention.call_s": float(calls * layers),
        f"{where}_attention.piece_s": float(calls * layers * work.sequences),
        f"{where}_attention.byte_s": work.read_bytes,
        f"{where}_attention.flop_s": work.flops,
    }
    if strategy == "distributed":
        found |= {
            "to_pool.call_s": float(layers),
            "to_pool.byte_s": pool_devices * work.q_bytes,
            "to_device.call_s": 3.0 * layers,
            "to_device.byte_s": pool_devices * work.out_bytes,
            "merge.call_s": float(pool_devices * layers),
            "merge.operand_byte_s": float(pool_devices * wide),
        }
    elif strategy == "local":
        rounds = float(np.ceil(work.pages / SCRATCH_PAGES))
        crossing = rounds * SCRATCH_PAGES * work.stored_bytes / max(work.pages, 1.0)
        found |= {
            "device_attention.call_s": rounds * layers,
            "device_attention.piece_s": rounds * layers * work.sequences,
            "merge.call_s": rounds * layers,
            "merge.operand_byte_s": rounds * wide,
        }
        for function in ("near_rows", "to_device"):
            found |= {f"{function}.call_s": rounds * layers, f"{function}.byte_s": crossing}
    elif strategy not in ("device", "near"):
        raise ValueError(f"attention {strategy!r} is unknown: choose device, near, local or distributed")
    return found


def predicted_s(calibration: Calibration, quantities: Mapping[str, float]) -> float:
    """Seconds of quantities when functions run one after another."""
    return sum(calibration.coefficient(name) * amount for name, amount in quantities.items())
