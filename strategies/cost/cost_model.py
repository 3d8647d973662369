"""What every mode of the cost model gives: seconds of each resource, for adapters, lanes, base model and attention."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from memory_pool.hardware import CORES, MEMORY, HardwareSpec
from strategies.cost.attention_work import KvLoad
from strategies.cost.features import AdapterFeatures
from strategies.cost.shapes import ModelShape
from strategies.planner.problem import RESOURCES


class StepSize(NamedTuple):
    """How large a step is.

    Attributes:
        tokens: of all sequences.
        rows: that the program works on: tokens and padding.
        sampled: rows that the head is applied to.
        max_rank: widest product with A that the program has room for.
        striped: adapters lie on all pool devices.
        grain: number that divides the ranks of all adapters with tokens.
    """

    tokens: int
    rows: int
    sampled: int
    max_rank: int
    striped: bool = False
    grain: int = 1


class LoraLoads(NamedTuple):
    """Seconds of N adapters (or of a lane as such, without the axis N), by strategy and phase.

    Attributes:
        load_s: [N, S, F, 6], of each resource.
        serial_s: [N, S, F], after all others of the phase.
    """

    load_s: np.ndarray
    serial_s: np.ndarray


class AttentionLoads(NamedTuple):
    """Seconds of attention.

    Attributes:
        device_s: [6], all KV on the device.
        pool_s: [A, D, 6], all KV in the pool, by attention strategy.
        serial_s: [A], once any KV is there.
    """

    device_s: np.ndarray
    pool_s: np.ndarray
    serial_s: np.ndarray


class CostModel(Protocol):
    """What work costs on a machine. Pure: the same arguments give the same seconds."""

    @property
    def mode(self) -> str:
        """ "paper", "ideal" or "calibrated"."""
        ...

    @property
    def shape(self) -> ModelShape: ...

    @property
    def hardware(self) -> HardwareSpec: ...

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Resources whose seconds add up."""
        ...

    @property
    def always_striped(self) -> bool:
        """Whether an adapter's home makes no difference: the formulas spread all of them over the pool devices."""
        ...

    def adapters(
        self, features: AdapterFeatures, tokens: np.ndarray, *, striped: np.ndarray, size: StepSize
    ) -> LoraLoads:
        """Seconds that adapters add.

        Args:
            features: of N adapters.
            tokens: [N] in the step; below 1 the chance of having one.
            striped: [N] bool, over all pool devices; else on one.
            size: of the step.
        """
        ...

    def lanes(self, touched: np.ndarray, size: StepSize) -> LoraLoads:
        """Seconds of a strategy's lane once it has an adapter with tokens: [S, F, 6] and [S, F].

        Args:
            touched: [F] bool, phases with a matrix that some adapter changes.
            size: of the step.
        """
        ...

    def base(self, size: StepSize) -> np.ndarray:
        """[F, 6] seconds of the base model and of whatever is always there; near and link columns are 0."""
        ...

    def attention(self, kv: KvLoad) -> AttentionLoads:
        """Seconds of the attention of a step."""
        ...

    def crossing_s(self, num_bytes: np.ndarray | float) -> np.ndarray | float:
        """Seconds in which one link brings bytes of the pool to the device, in a stream."""
        ...


def additive_groups(hardware: HardwareSpec, *, device_adds: bool) -> tuple[tuple[str, ...], ...]:
    """Groups where near-data functions wait for their operands, and the device for their results.

    Args:
        hardware: what device and pool share joins groups; both, and everything adds up.
        device_adds: compute and reads of the device add up too.
    """
    flops, memory, near_flops, near_memory, to_pool, to_device = RESOURCES
    shared = hardware.shared
    if shared == {CORES, MEMORY}:
        return (RESOURCES,)
    if CORES in shared:
        return (
            ((flops, memory, near_flops), (near_memory, to_pool, to_device))
            if device_adds
            else (
                (flops, near_flops),
                (memory,),
                (near_memory, to_pool, to_device),
            )
        )
    if MEMORY in shared:
        return (
            ((flops, memory, near_memory, to_pool, to_device), (near_flops,))
            if device_adds
            else (
                (flops,),
                (memory, near_memory, to_pool, to_device),
                (near_flops,),
            )
        )
    pool = (near_flops, near_memory, to_pool, to_device)
    return ((flops, memory), pool) if device_adds else ((flops,), (memory,), pool)
