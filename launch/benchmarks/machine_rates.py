"""What this machine's memory and matrix units reach: the limits that a breakdown holds a step's parts against.

Measured in the process and at the time of the measurement, since both change on a shared machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from launch.benchmarks.cold_pages import cold_size
from launch.benchmarks.machine import usable_cores
from plora_jax.model.layers import matmul
from strategies import products

_MOST_BYTES = 2**30
_ROWS, _WIDTH = 512, 2048
_READS, _PRODUCTS = 4, 12


class MachineRates(NamedTuple):
    """Measured rates of all cores.

    Attributes:
        memory_bytes_per_s: of a streaming read from memory.
        flops_per_s: of a large product of the compute dtype, by the best way that the engine has.
    """

    memory_bytes_per_s: float
    flops_per_s: float

    def seconds(self, num_bytes: float, flops: float) -> tuple[float, str]:
        """The least time for so many bytes and operations, and which of the two decides, "memory" or "arithmetic"."""
        memory_s, arithmetic_s = num_bytes / self.memory_bytes_per_s, flops / self.flops_per_s
        return max((memory_s, "memory"), (arithmetic_s, "arithmetic"))


def measure_rates(dtype: np.dtype) -> MachineRates:
    """Measures the machine for about a second.

    Args:
        dtype: of products.
    """
    return MachineRates(_memory_bytes_per_s(), _flops_per_s(dtype))


def _memory_bytes_per_s() -> float:
    size = min(cold_size(None).num_bytes, _MOST_BYTES)
    words = np.ones(size // 4, np.uint32)
    parts = np.array_split(words, usable_cores())
    with ThreadPoolExecutor(len(parts)) as threads:

        def read() -> None:
            list(threads.map(np.maximum.reduce, parts))

        return words.nbytes / _best_s(read, _READS)


def _flops_per_s(dtype: np.dtype) -> float:
    x = jnp.ones((_ROWS, _WIDTH), dtype)
    weight = jnp.ones((1, _WIDTH, _WIDTH), dtype)
    ways: list[Callable[[], jax.Array]] = []
    plain = jax.jit(matmul)
    ways.append(lambda: plain(x, weight[0]))
    if products.unsupported(weight.shape, dtype) is None:
        packed, layer = products.pack(weight), jnp.int32(0)
        call = jax.jit(lambda x, packed, layer: products.products(x, [packed], layer)[0])
        ways.append(lambda: call(x, packed, layer))
    flops = 2.0 * _ROWS * _WIDTH * _WIDTH
    return max(flops / _best_s(lambda way=way: way().block_until_ready(), _PRODUCTS) for way in ways)


def _best_s(function: Callable[[], object], runs: int) -> float:
    """Seconds of the quickest of some calls, after one to warm up."""
    function()
    taken = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        taken.append(time.perf_counter() - started)
    return min(taken)
