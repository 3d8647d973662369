"""Mode `calibrated`: the work that programs really do, times what it was measured to take on this machine.

A function takes the sum of its terms, so compute and reads add up on either side. What a lane costs whoever is in it
(calls, all rows of the program) is charged once; adapters add what depends on them. Chunks of `fetch` are full but for
half a chunk or less of every projection, and rounds of `local` but for half a round: what rounding up costs on average.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from memory_pool.calibration import Calibration
from memory_pool.hardware import HardwareSpec
from strategies.cost.attention_work import KvLoad, attention_work
from strategies.cost.columns import (
    ATTENTION_COLUMNS,
    DEVICE_FLOPS,
    DEVICE_MEMORY,
    DISTRIBUTED,
    LOCAL,
    LORA_COLUMNS,
    NEAR_FLOPS,
    NEAR_MEMORY,
    SPLIT,
    TO_DEVICE,
    TO_POOL,
)
from strategies.cost.cost_model import AttentionLoads, LoraLoads, StepSize, additive_groups
from strategies.cost.features import AdapterFeatures
from strategies.cost.ideal import IdealModel
from strategies.cost.quantities import (
    ADAPTER_AMOUNTS,
    LANE_AMOUNTS,
    RECIPES,
    WIDE_BYTES,
    adapter_amounts,
    lane_amounts,
)
from strategies.cost.shapes import ModelShape
from strategies.lanes import SCRATCH_PAGES
from strategies.low_rank import CHUNK_ROWS
from strategies.planner.problem import RESOURCES

_SERIAL = len(RESOURCES)
"""Column of what comes after the rest of a phase."""
_PER_BYTE = ("byte_s", "again_byte_s")


@dataclasses.dataclass(frozen=True)
class CalibratedModel:
    """Measured costs.

    Attributes:
        shape: of the base model.
        hardware: what device and pool share, and how many pool devices there are.
        calibration: seconds of each function.
    """

    shape: ModelShape
    hardware: HardwareSpec
    calibration: Calibration
    mode = "calibrated"
    always_striped = False

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return additive_groups(self.hardware, device_adds=True)

    def adapters(
        self, features: AdapterFeatures, tokens: np.ndarray, *, striped: np.ndarray, size: StepSize
    ) -> LoraLoads:
        """As `CostModel.adapters`; an adapter that is striped has an equal part of its work on every pool device."""
        amounts = adapter_amounts(self.shape, features, tokens, rows=size.rows)
        count, phases = features.pieces.shape
        work = np.stack([amounts[name] for name in ADAPTER_AMOUNTS], axis=-1).reshape(
            count * phases, len(ADAPTER_AMOUNTS)
        )
        load_s = np.empty((count, len(LORA_COLUMNS), phases, len(RESOURCES)))
        for s in range(len(LORA_COLUMNS)):
            load_s[:, s] = (work @ self._of_adapters[:, s, :_SERIAL]).reshape(count, phases, len(RESOURCES))
        if striped.any():
            load_s[striped, ..., NEAR_FLOPS:] /= self.hardware.num_pool_devices
        serial_s = np.zeros(load_s.shape[:-1])
        serial_s[:, SPLIT] = (work @ self._of_adapters[:, SPLIT, _SERIAL]).reshape(count, phases)
        return LoraLoads(load_s, serial_s)

    def lanes(self, touched: np.ndarray, size: StepSize) -> LoraLoads:
        """As `CostModel.lanes`; a lane runs in all phases that adapters may change.

        Components come in multiples of the ranks' common divisor, and so does what is missing in the last chunk."""
        missing = 1 - math.gcd(size.grain, CHUNK_ROWS) / CHUNK_ROWS
        spare = 0.5 * missing * touched[self.shape.phase_of]
        amounts = lane_amounts(self.shape, rows=size.rows, max_rank=size.max_rank, spare_chunks=spare)
        work = np.stack([amounts[name] for name in LANE_AMOUNTS], axis=-1)
        found = np.einsum("fk,ksr->sfr", work, self._of_lanes)
        return LoraLoads(found[..., :_SERIAL], found[..., _SERIAL])

    def base(self, size: StepSize) -> np.ndarray:
        """As `CostModel.base`: the measured step by its rows, shared out as the phases' rooflines are; or products.

        Steps were measured with weights in the compute dtype: with others they take the time that their products differ
        by less.
        """
        load_s = np.zeros((len(self.shape.phases), len(RESOURCES)))
        attention_call = self.shape.attention.layers * self.calibration.device_attention.call_s
        load_s[self.shape.attention_phase, DEVICE_FLOPS] = attention_call
        points = self.calibration.base_steps.get(self.shape.name)
        if points is None:
            return load_s + self._products(size)
        rooflines = IdealModel(self.shape, self.hardware).base(size).max(axis=1)
        at, seconds = np.array(points, float).T
        step_s = float(np.interp(size.rows, at, seconds))
        if self.shape.weight_bytes is not None:
            measured = dataclasses.replace(self, shape=dataclasses.replace(self.shape, weight_bytes=None))
            step_s += float((self._products(size) - measured._products(size)).sum())
        load_s[:, DEVICE_FLOPS] += step_s * rooflines / rooflines.sum()
        return load_s

    def attention(self, kv: KvLoad) -> AttentionLoads:
        """As `CostModel.attention`. Calls are serial: they do not shrink with the part that is in the pool."""
        cost, attention = self.calibration, self.shape.attention
        work, layers, devices = attention_work(self.shape, kv), attention.layers, self.hardware.num_pool_devices
        shares = kv.share_of(devices)
        holders = int((shares > 0).sum())
        pieces = layers * work.sequences
        wide = kv.tokens * layers * attention.heads * (attention.value_dim + 2) * WIDE_BYTES
        device_s = np.zeros(len(RESOURCES))
        device_s[DEVICE_MEMORY] = work.read_bytes * cost.device_attention.byte_s
        device_s[DEVICE_FLOPS] = work.flops * cost.device_attention.flop_s + pieces * cost.device_attention.piece_s

        merge_s = layers * cost.merge.call_s + wide * cost.merge.operand_byte_s
        round_s = merge_s + layers * cost.device_attention.call_s + pieces * cost.device_attention.piece_s
        round_s += layers * (cost.near_rows.call_s + cost.to_device.call_s)
        page_bytes = work.stored_bytes / max(work.pages, 1.0)
        pool_s = np.zeros((len(ATTENTION_COLUMNS), devices, len(RESOURCES)))
        pool_s[LOCAL, :, NEAR_MEMORY] = work.stored_bytes * shares * cost.near_rows.byte_s
        pool_s[LOCAL, :, TO_DEVICE] = work.stored_bytes * shares * cost.to_device.byte_s
        pool_s[LOCAL, :, DEVICE_MEMORY] = device_s[DEVICE_MEMORY]
        pool_s[LOCAL, :, DEVICE_FLOPS] = (
            work.flops * cost.device_attention.flop_s + work.pages / SCRATCH_PAGES * round_s
        )
        pool_s[DISTRIBUTED, :, NEAR_MEMORY] = work.read_bytes * shares * cost.near_attention.byte_s
        pool_s[DISTRIBUTED, :, NEAR_FLOPS] = work.flops * shares * cost.near_attention.flop_s
        pool_s[DISTRIBUTED, shares > 0, NEAR_FLOPS] += pieces * cost.near_attention.piece_s
        pool_s[DISTRIBUTED, shares > 0, TO_POOL] = work.q_bytes * cost.to_pool.byte_s
        pool_s[DISTRIBUTED, shares > 0, TO_DEVICE] = work.out_bytes * cost.to_device.byte_s
        calls_s = layers * (cost.to_pool.call_s + 3 * cost.to_device.call_s + holders * cost.near_attention.call_s)
        spare_s = 0.5 * (round_s + SCRATCH_PAGES * page_bytes * (cost.near_rows.byte_s + cost.to_device.byte_s))
        serial_s = np.array([spare_s, calls_s + holders * merge_s]) * bool(work.sequences)
        return AttentionLoads(device_s, pool_s, serial_s)

    def crossing_s(self, num_bytes: np.ndarray | float) -> np.ndarray | float:
        return num_bytes * (self.calibration.near_rows.byte_s + self.calibration.to_device.byte_s)

    def _products(self, size: StepSize) -> np.ndarray:
        """[F, 6] of base weights by the measured products, and of lanes by their rows."""
        load_s, cost, item = np.zeros((len(self.shape.phases), len(RESOURCES))), self.calibration, self.shape.item_bytes
        for index, phase in enumerate(self.shape.phases):
            if not (phase.base_numbers or phase.expert_numbers):
                continue
            rows = size.sampled if phase.name == "head" else size.rows
            outputs = sum(matrix.outputs for matrix in phase.matrices)
            operands = phase.layers * rows * (phase.inputs + outputs) * item
            calls = phase.layers * max(1, len(phase.matrices))
            lanes = len(LORA_COLUMNS) * phase.layers * bool(phase.matrices)
            load_s[index, DEVICE_MEMORY] = phase.base_read(rows) * self.shape.bytes_of_weight * cost.matmul.byte_s
            load_s[index, DEVICE_FLOPS] = (
                calls * cost.matmul.call_s
                + phase.base_flops(rows) * cost.matmul.flop_s
                + operands * cost.matmul.operand_byte_s
                + lanes * (cost.lanes.call_s + rows * outputs * WIDE_BYTES * cost.lanes.operand_byte_s)
            )
        return load_s

    @functools.cached_property
    def _of_adapters(self) -> np.ndarray:
        """[amounts, S, 7] seconds of a unit, by resource and serial."""
        return self._unit_costs(ADAPTER_AMOUNTS)

    @functools.cached_property
    def _of_lanes(self) -> np.ndarray:
        return self._unit_costs(LANE_AMOUNTS)

    def _unit_costs(self, amounts: tuple[str, ...]) -> np.ndarray:
        costs = np.zeros((len(amounts), len(LORA_COLUMNS), len(RESOURCES) + 1))
        for s, strategy in enumerate(LORA_COLUMNS):
            for function, terms in RECIPES[strategy].items():
                for term, amount in terms:
                    if amount in amounts:
                        column = _column(function, term, serial=strategy == "split")
                        costs[amounts.index(amount), s, column] += self.calibration.coefficient(f"{function}.{term}")
        return costs


def _column(function: str, term: str, *, serial: bool) -> int:
    """The resource that a term of a function loads."""
    side, _, what = function.partition("_")
    if side == "to":
        return TO_POOL if what == "pool" else TO_DEVICE
    if side == "near":
        return NEAR_MEMORY if term in _PER_BYTE else NEAR_FLOPS
    if serial:
        return _SERIAL
    return DEVICE_MEMORY if term in _PER_BYTE else DEVICE_FLOPS
