"""Whether what the operator sets aside can be had: the budgets of the pool and of the device beside what there is."""

from __future__ import annotations

from typing import NamedTuple

from memory_pool.link import AllocationError
from plora_jax.engine.engine_config import EngineConfig

MB, GB = 2**20, 2**30


class Room(NamedTuple):
    """Memory of a machine, bytes; None where nothing tells.

    Attributes:
        host: of the machine.
        device: of each device; None where it is the machine's.
        pool_on_device: the pool is emulated in device memory.
    """

    host: int | None
    device: int | None
    pool_on_device: bool = False


class _Budget(NamedTuple):
    flag: str
    value: float
    nbytes: int


def memory_problems(config: EngineConfig, room: Room) -> list[str]:
    """Budgets that are beyond the memory there is, with the flags that ask for them.

    Args:
        config: of the engine.
        room: what there is.
    """
    shards = config.tensor_parallel_size
    pool, device = _pool_budget(config), _device_budgets(config)
    if room.device is None:
        on_host = [pool, *(budget._replace(nbytes=budget.nbytes * shards) for budget in device)]
        return _problems(on_host, room.host, "this machine")
    if room.pool_on_device:
        return _problems([pool._replace(nbytes=pool.nbytes // shards), *device], room.device, "a device")
    return _problems([pool], room.host, "this machine") + _problems(device, room.device, "a device")


def allocation_problem(config: EngineConfig, error: AllocationError, *, pool_on_device: bool = False) -> str:
    """What to change where an array of pages could not be had."""
    budgets = [_pool_budget(config)] if error.in_pool or pool_on_device else []
    budgets += [] if error.in_pool else _device_budgets(config)
    flags = " or ".join(f"--{budget.flag} {budget.value}" for budget in budgets)
    return f"{error}: lower {flags}"


def _pool_budget(config: EngineConfig) -> _Budget:
    return _Budget("pool_memory_gb", config.pool_memory_gb, int(config.pool_memory_gb * GB))


def _device_budgets(config: EngineConfig) -> list[_Budget]:
    flags = ("device_adapter_mb", "device_kv_mb") if config.enable_lora else ("device_kv_mb",)
    return [_Budget(flag, getattr(config, flag), getattr(config, flag) * MB) for flag in flags]


def _problems(budgets: list[_Budget], most: int | None, whose: str) -> list[str]:
    if most is None:
        return []
    alone = [
        f"--{budget.flag} {budget.value} asks for {budget.nbytes / GB:.1f} GB of memory, and {whose} has "
        f"{most / GB:.1f} GB: lower it"
        for budget in budgets
        if budget.nbytes > most
    ]
    total = sum(budget.nbytes for budget in budgets)
    if alone or total <= most:
        return alone
    flags = ", ".join(f"--{budget.flag} {budget.value}" for budget in budgets)
    return [f"{flags} ask for {total / GB:.1f} GB of memory together, and {whose} has {most / GB:.1f} GB: lower one"]
