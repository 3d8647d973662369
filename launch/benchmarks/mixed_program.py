"""A step whose adapters are served by several strategies at once, as a planner may choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from launch.benchmarks.cold_pages import ColdPages
from launch.benchmarks.strategy_programs import (
    LoraPoint,
    Model,
    Program,
    all_lanes,
    compile_step,
    lane_of,
    random_numbers,
)
from strategies.kernel_tables import KernelSet
from strategies.lanes import BASE, LoraLane, Memory
from strategies.setting import LoraSetting
from strategies.strategy_table import LORA


def mixed_program(
    name: str, adapters: Mapping[str, int], point: LoraPoint, *, model: Model, cold: ColdPages, kernels: KernelSet
) -> Program:
    """The adapters of a point of the grid, some of them by each strategy.

    Args:
        name: of the program.
        adapters: how many by strategy, together those of the point.
        point: of the grid.
        model: its projections.
        cold: deals the pages.
        kernels: implementations.
    """
    inputs = tuple(random_numbers((point.rows, model.layout.in_width(group[0])), model) for group in model.groups)
    settings = [LoraSetting(model.layout, group, point.rank, kernels, kernels) for group in model.groups]

    def step(memory: Memory, inputs: Any, lanes: dict[str, LoraLane], control: dict[str, LoraLane]) -> jax.Array:
        return all_lanes(memory, inputs, lanes, control, settings=settings)

    def arguments() -> tuple[Any, ...]:
        lanes = _lanes(adapters, point, model, cold)
        return Memory(cold.memory.pool, cold.memory.adapters, cold.memory.kv), inputs, lanes, lanes

    call = compile_step(step, cold, arguments(), in_pool=(3,))
    layout = model.layout
    numbers = sum(layout.in_width(target) + layout.out_width(target) for target in model.targets)
    data_bytes = point.adapters * point.rank * layout.num_layers * layout.dtype.itemsize * numbers
    return Program(name, call, arguments, data_bytes)


def _lanes(adapters: Mapping[str, int], point: LoraPoint, model: Model, cold: ColdPages) -> dict[str, LoraLane]:
    """Lanes of neighbours: the tokens of an adapter are where they are when one strategy serves all."""
    spaces = {True: "device", False: "pool"}
    whole = np.full(point.rows, BASE, np.int32)
    tokens = point.adapters * point.tokens_per_adapter
    whole[:tokens] = np.arange(tokens) % point.adapters
    lanes, first = {}, 0
    for name, count in adapters.items():
        needs = LORA[name].needs
        lane = lane_of(point._replace(adapters=count), model, cold, a_space=spaces[needs.a], b_space=spaces[needs.b])
        mine = (whole >= first) & (whole < first + count)
        lanes[name] = lane._replace(owner=np.where(mine, whole - first, BASE).astype(np.int32))
        first += count
    return lanes
