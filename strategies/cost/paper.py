"""The published cost formulas as they are: arXiv 2608.05483 v1.

A matrix has D inputs and D outputs there; here 2 D is I + O. L is in every near-data time of every matrix and adapter,
the pool's reads of A and B are not counted, and near-data compute is divided by the number of pool devices.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from memory_pool.hardware import HardwareSpec
from strategies.cost.attention_work import KvLoad
from strategies.cost.columns import DEVICE_MEMORY, LORA_COLUMNS, TO_POOL
from strategies.cost.cost_model import AttentionLoads, LoraLoads, StepSize
from strategies.cost.features import AdapterFeatures
from strategies.cost.ideal import IdealModel
from strategies.cost.shapes import ModelShape
from strategies.planner.problem import RESOURCES

_NEVER = 1e3
"""Seconds in place of infinity, where there is no near-data compute."""


def matrix_times(
    tokens: np.ndarray | float,
    rank: np.ndarray | float,
    inputs: np.ndarray | float,
    outputs: np.ndarray | float,
    *,
    hardware: HardwareSpec,
    item_bytes: int = 2,
) -> np.ndarray:
    """Seconds of one adapter's matrix by each strategy.

    Args:
        tokens: b; all four broadcast.
        rank: r.
        inputs: I.
        outputs: O.
        hardware: of the step; one rate of the link for both directions, that to the device.
        item_bytes: S.

    Returns:
        [4, ...] by strategy: resident, fetch, near_data, split; infinite where there is no near-data compute.
    """
    pool, device = pool_times(tokens, rank, inputs, outputs, hardware=hardware, item_bytes=item_bytes)
    return np.maximum(pool, device)


def pool_times(
    tokens: np.ndarray | float,
    rank: np.ndarray | float,
    inputs: np.ndarray | float,
    outputs: np.ndarray | float,
    *,
    hardware: HardwareSpec,
    item_bytes: int = 2,
    lora_item_bytes: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The two sides that the formulas take the larger of: link and near-data work, and the device's.

    Args:
        As `matrix_times`; `lora_item_bytes` of a number of A and B, None for `item_bytes`.

    Returns:
        pool: [4, ...] seconds of link and near-data work.
        device: [4, ...] seconds of the device.
    """
    b, r, i, o = np.broadcast_arrays(*(np.asarray(value, float) for value in (tokens, rank, inputs, outputs)))
    has = (b > 0) & (r > 0)
    device, link = hardware.device, hardware.link
    wide = 2 * b * r * (i + o) / device.flops_per_s
    stored = lora_item_bytes or item_bytes
    numbers = r * (i + o) * stored
    latency, rate = link.latency_s, link.to_device_bytes_per_s
    near = hardware.pool_device.near_flops_per_s * hardware.num_pool_devices
    with np.errstate(divide="ignore", invalid="ignore"):
        both_near, shrink_near = 2 * b * r * (i + o) / near, 2 * b * r * i / near
    nothing = np.zeros_like(wide)
    expand = np.maximum(2 * b * r * o / device.flops_per_s, r * o * stored / device.memory_bytes_per_s)
    pool = [
        nothing,
        latency + numbers / rate,
        latency + b * (i + o) * item_bytes / rate + both_near,
        latency + b * (i + r) * item_bytes / rate + shrink_near,
    ]
    on_device = [np.maximum(wide, numbers / device.memory_bytes_per_s), wide, nothing, expand]
    return np.where(has, np.stack(pool), 0.0), np.where(has, np.stack(on_device), 0.0)


def weight_read_floor(parameters: float, batch: int, *, hardware: HardwareSpec, item_bytes: int = 2) -> float:
    """Tokens per second that reading all weights once a step allows.

    Args:
        parameters: of the base model.
        batch: sequences, one token each.
        hardware: whose device memory is read.
        item_bytes: of a parameter.
    """
    return batch * hardware.device.memory_bytes_per_s / (parameters * item_bytes)


@dataclasses.dataclass(frozen=True)
class PaperModel:
    """The published formulas for adapters; base weights and attention, of which there are none, as in `ideal`.

    The larger of the two sides of a formula is left to the groups: link and near-data seconds load the pool, where they
    are in the column of the link to the pool, and the device's its memory. Every adapter is striped.
    """

    shape: ModelShape
    hardware: HardwareSpec
    mode = "paper"
    always_striped = True

    @functools.cached_property
    def _ideal(self) -> IdealModel:
        return IdealModel(self.shape, self.hardware)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return self._ideal.groups

    def adapters(
        self, features: AdapterFeatures, tokens: np.ndarray, *, striped: np.ndarray, size: StepSize
    ) -> LoraLoads:
        """As `CostModel.adapters`; a matrix with experts is one matrix."""
        del striped, size
        inputs, outputs = (np.array([getattr(m, side) for m in self.shape.matrices]) for side in ("inputs", "outputs"))
        sides = pool_times(
            tokens[:, None],
            features.ranks,
            inputs,
            outputs,
            hardware=self.hardware,
            item_bytes=self.shape.item_bytes,
            lora_item_bytes=self.shape.lora_item_bytes,
        )
        layers = np.zeros((len(self.shape.names), len(self.shape.phases)))
        layers[np.arange(len(layers)), self.shape.phase_of] = [self.shape.phases[f].layers for f in self.shape.phase_of]
        load_s = np.zeros((len(tokens), len(LORA_COLUMNS), len(self.shape.phases), len(RESOURCES)))
        for column, side in zip((TO_POOL, DEVICE_MEMORY), sides, strict=True):
            load_s[..., column] = (np.minimum(side, _NEVER) @ layers).swapaxes(0, 1)
        return LoraLoads(load_s, np.zeros(load_s.shape[:-1]))

    def lanes(self, touched: np.ndarray, size: StepSize) -> LoraLoads:
        """As `CostModel.lanes`: nothing, as every adapter pays its latency."""
        del touched, size
        shape = (len(LORA_COLUMNS), len(self.shape.phases), len(RESOURCES))
        return LoraLoads(np.zeros(shape), np.zeros(shape[:-1]))

    def base(self, size: StepSize) -> np.ndarray:
        return self._ideal.base(size)

    def attention(self, kv: KvLoad) -> AttentionLoads:
        return self._ideal.attention(kv)

    def crossing_s(self, num_bytes: np.ndarray | float) -> np.ndarray | float:
        return num_bytes / self.hardware.link.to_device_bytes_per_s
