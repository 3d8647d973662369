"""Columns of the arrays of a plan problem: LoRA strategies, attention strategies, resources."""

from __future__ import annotations

import numpy as np

from strategies.planner.problem import RESOURCES

LORA_COLUMNS = ("resident", "fetch", "near_data", "split")
RESIDENT, FETCH, NEAR_DATA, SPLIT = range(4)
ATTENTION_COLUMNS = ("local", "distributed")
LOCAL, DISTRIBUTED = range(2)
DEVICE_FLOPS, DEVICE_MEMORY, NEAR_FLOPS, NEAR_MEMORY, TO_POOL, TO_DEVICE = range(len(RESOURCES))

NEEDS_A, NEEDS_B = np.array([1.0, 0.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.0, 1.0])
"""Matrices that a strategy has in device memory."""


def roofline(load_s: np.ndarray, flops: int, memory: int) -> None:
    """Leaves the larger of compute and reads, which one function does at the same time, and sets the other to 0.

    Args:
        load_s: [..., 6], changed in place.
        flops: column of compute.
        memory: column of reads.
    """
    compute_bound = load_s[..., flops] > load_s[..., memory]
    load_s[..., memory][compute_bound] = 0.0
    load_s[..., flops][~compute_bound] = 0.0
