"""Mode `ideal`: rooflines of a hardware spec for everybody, with nothing lost but the link's latency.

Every function takes the longer of its compute and its reads, with real shapes. On the device they may overlap with
those of other functions: its compute and its memory are resources of their own. A near-data function waits for its
operands and the device for its results, so a pool device's links and near-data work add up within a phase, as in the
published formulas; with `pipelined` the operands of one adapter cross while another's are computed, both directions at
once, and every resource is on its own.

A stream (A and B of `fetch`, pages of `local`) goes at the rate of the link or of the pool's memory, whichever is less,
and through the device's cache. The latency of the link is paid once a layer and phase that anything crosses in.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from memory_pool.hardware import CORES, MEMORY, HardwareSpec
from strategies.cost.attention_work import AttentionWork, KvLoad, attention_work
from strategies.cost.columns import (
    ATTENTION_COLUMNS,
    DEVICE_FLOPS,
    DEVICE_MEMORY,
    DISTRIBUTED,
    FETCH,
    LOCAL,
    LORA_COLUMNS,
    NEAR_DATA,
    NEAR_FLOPS,
    NEAR_MEMORY,
    RESIDENT,
    SPLIT,
    TO_DEVICE,
    TO_POOL,
    roofline,
)
from strategies.cost.cost_model import AttentionLoads, LoraLoads, StepSize, additive_groups
from strategies.cost.features import AdapterFeatures, adapter_work
from strategies.cost.shapes import ModelShape
from strategies.planner.problem import RESOURCES

_NEVER = 1e3
"""Seconds of near-data work where there is no near-data compute; such strategies are not allowed anyway."""


@dataclasses.dataclass(frozen=True)
class IdealModel:
    """Rooflines.

    Attributes:
        shape: of the base model.
        hardware: whose rates count.
        pipelined: operands cross while others are computed, in both directions at once.
        dtype: whose FLOP/s of the device count.
    """

    shape: ModelShape
    hardware: HardwareSpec
    pipelined: bool = False
    dtype: str = "bfloat16"
    mode = "ideal"
    always_striped = False

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        if not self.pipelined or self.hardware.shared:
            return additive_groups(self.hardware, device_adds=False)
        if self.hardware.link.full_duplex:
            return tuple((name,) for name in RESOURCES)
        return (*((name,) for name in RESOURCES[:TO_POOL]), RESOURCES[TO_POOL:])

    def adapters(
        self, features: AdapterFeatures, tokens: np.ndarray, *, striped: np.ndarray, size: StepSize
    ) -> LoraLoads:
        """As `CostModel.adapters`. Striped by rank: x goes to every pool device and each sends a part of y back."""
        del size
        work = adapter_work(self.shape, features, tokens)
        load_s = np.zeros((len(tokens), len(LORA_COLUMNS), len(self.shape.phases), len(RESOURCES)))
        serial_s = np.zeros(load_s.shape[:-1])
        each = np.where(striped, 1 / self.hardware.num_pool_devices, 1.0)[:, None]
        weights, flops = work.a_bytes + work.b_bytes, work.a_flops + work.b_flops
        rate, memory = self._device_flops, self.hardware.device.memory_bytes_per_s
        load_s[:, RESIDENT, :, DEVICE_MEMORY] = weights / memory
        load_s[:, RESIDENT, :, DEVICE_FLOPS] = load_s[:, FETCH, :, DEVICE_FLOPS] = flops / rate
        load_s[:, FETCH, :, TO_DEVICE] = self.crossing_s(weights * each)
        again = self._buffer_rounds(tokens)
        for strategy, read, done, back in (
            (NEAR_DATA, weights, flops, work.y_bytes),
            (SPLIT, work.a_bytes, work.a_flops, work.m_bytes * each),
        ):
            load_s[:, strategy, :, TO_POOL] = work.x_bytes / self.hardware.link.to_pool_bytes_per_s
            load_s[:, strategy, :, TO_DEVICE] = back / self.hardware.link.to_device_bytes_per_s
            load_s[:, strategy, :, NEAR_MEMORY] = read * again * each / self.hardware.pool_device.dram_bytes_per_s
            load_s[:, strategy, :, NEAR_FLOPS] = self._near(done * each)
        if not self.pipelined:
            roofline(load_s, NEAR_FLOPS, NEAR_MEMORY)
        self._add_up_device(load_s)
        serial_s[:, SPLIT] = np.maximum(work.b_flops / rate, work.b_bytes / memory)
        return LoraLoads(load_s, serial_s)

    def lanes(self, touched: np.ndarray, size: StepSize) -> LoraLoads:
        """As `CostModel.lanes`: the link's latency a layer."""
        del size
        layers = np.array([phase.layers for phase in self.shape.phases], float) * touched
        load_s = np.zeros((len(LORA_COLUMNS), len(layers), len(RESOURCES)))
        load_s[[NEAR_DATA, SPLIT], :, TO_POOL] = layers * self.hardware.link.latency_s
        load_s[FETCH, :, TO_DEVICE] = layers * self.hardware.link.latency_s
        return LoraLoads(load_s, np.zeros(load_s.shape[:-1]))

    def base(self, size: StepSize) -> np.ndarray:
        """As `CostModel.base`: weights read once, and their products."""
        load_s = np.zeros((len(self.shape.phases), len(RESOURCES)))
        for index, phase in enumerate(self.shape.phases):
            rows = size.sampled if phase.name == "head" else size.tokens
            read_bytes = phase.base_read(rows) * self.shape.bytes_of_weight
            load_s[index, DEVICE_MEMORY] = read_bytes / self.hardware.device.memory_bytes_per_s
            load_s[index, DEVICE_FLOPS] = phase.base_flops(rows) / self._device_flops
        self._add_up_device(load_s)
        return load_s

    def attention(self, kv: KvLoad) -> AttentionLoads:
        """As `CostModel.attention`. Every pool device gets all queries, whatever P is; here they shrink with 1 - P."""
        work, devices = attention_work(self.shape, kv), self.hardware.num_pool_devices
        device_s = np.zeros(len(RESOURCES))
        device_s[DEVICE_MEMORY] = work.read_bytes / self.hardware.device.memory_bytes_per_s
        device_s[DEVICE_FLOPS] = work.flops / self._device_flops
        self._add_up_device(device_s)
        shares = kv.share_of(devices)
        pool_s = np.zeros((len(ATTENTION_COLUMNS), devices, len(RESOURCES)))
        pool_s[LOCAL, :, TO_DEVICE] = self.crossing_s(work.read_bytes * shares)
        pool_s[LOCAL, :, DEVICE_FLOPS] = work.flops / self._device_flops
        pool_s[DISTRIBUTED, :, NEAR_MEMORY] = work.read_bytes * shares / self.hardware.pool_device.dram_bytes_per_s
        pool_s[DISTRIBUTED, :, NEAR_FLOPS] = self._near(work.flops * shares)
        holds = shares > 0
        pool_s[DISTRIBUTED, holds, TO_POOL] = work.q_bytes / self.hardware.link.to_pool_bytes_per_s
        pool_s[DISTRIBUTED, holds, TO_DEVICE] = work.out_bytes / self.hardware.link.to_device_bytes_per_s
        if not self.pipelined:
            roofline(pool_s, NEAR_FLOPS, NEAR_MEMORY)
        return AttentionLoads(device_s, pool_s, self._attention_serial(work, int(holds.sum())))

    def crossing_s(self, num_bytes: np.ndarray | float) -> np.ndarray | float:
        link, pool = self.hardware.link, self.hardware.pool_device
        return num_bytes / min(link.to_device_bytes_per_s, pool.dram_bytes_per_s)

    def _attention_serial(self, work: AttentionWork, holders: int) -> np.ndarray:
        """Latency a layer; the merge reads what every pool device sent."""
        latency = self.shape.attention.layers * self.hardware.link.latency_s if work.sequences else 0.0
        merge = holders * work.out_bytes / self.hardware.device.memory_bytes_per_s
        return np.array([latency, latency + merge])

    def _buffer_rounds(self, tokens: np.ndarray) -> np.ndarray | float:
        """How often near-data compute reads A and B: once for as many rows of x as its buffer holds."""
        buffer = self.hardware.pool_device.buffer_bytes
        if buffer is None:
            return 1.0
        widths = np.array([phase.inputs * self.shape.item_bytes for phase in self.shape.phases], float)
        return np.maximum(tokens[:, None] * widths / buffer, 1.0)

    @functools.cached_property
    def _device_flops(self) -> float:
        return self.hardware.device.flops(self.dtype)

    def _near(self, flops: np.ndarray) -> np.ndarray:
        rate = self.hardware.pool_device.near_flops_per_s
        return flops / rate if rate else np.where(flops > 0, _NEVER, 0.0)

    def _add_up_device(self, load_s: np.ndarray) -> None:
        """Where everything is in one group, a function still takes the longer of compute and reads."""
        if self.hardware.shared == {CORES, MEMORY}:
            roofline(load_s, DEVICE_FLOPS, DEVICE_MEMORY)
