"""Puts the planner of an engine together, where anything is left to plan."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from memory_pool.adapter_pool import AdapterPool
from memory_pool.kv_pool import KvPool
from memory_pool.near_unit import NearDataUnit
from memory_pool.page_memory import PageMemory
from plora_jax.config import ModelConfig
from plora_jax.engine.adapter_rows import AdapterRows
from plora_jax.engine.engine_config import EngineConfig
from plora_jax.engine.machine import find_hardware, shape_of_model
from plora_jax.engine.near_guard import AttentionChoice
from plora_jax.engine.plan_worker import PlanWorker, make_policy
from plora_jax.engine.planning import EnginePlanner
from plora_jax.model import WEIGHT_BYTES
from strategies.cost import cost_model


def make_planner(
    config: EngineConfig,
    model: ModelConfig,
    *,
    name: str,
    memory: PageMemory,
    adapters: AdapterPool | None,
    kv: KvPool,
    attention: AttentionChoice,
    unit: NearDataUnit,
    decode_rows: Sequence[int],
) -> EnginePlanner | None:
    """The planner of an engine; None where both strategies are forced.

    Args:
        config: of the engine.
        model: of the whole base model.
        name: of the model, under which a calibration has its steps.
        memory: page arrays, whose sizes are the budgets.
        adapters: where adapters are; None without LoRA.
        kv: KV pages.
        attention: the choice that steps read.
        unit: near the data.
        decode_rows: rows of the compiled programs that only decode, ascending.

    Raises:
        HardwareError: there is no such hardware or link, or a file does not describe one.
    """
    planned = adapters if config.lora_strategy == "auto" else None
    if planned is None and config.attention_strategy != "auto":
        return None
    layout, device = memory.layout, jax.local_devices()[0]
    hardware = find_hardware(
        config.hardware,
        config.link,
        platform=device.platform,
        device_kind=device.device_kind,
        pool_devices=config.pool_devices,
    )
    mode = "ideal" if hardware.calibration is None else "calibrated"
    shape = shape_of_model(
        model,
        name=name,
        item_bytes=np.dtype(layout.dtype).itemsize,
        weight_bytes=WEIGHT_BYTES[config.quantization],
        lora_item_bytes=layout.adapter_dtype.itemsize,
        kv_item_bytes=layout.kv_item_bytes,
        shards=memory.num_shards,
    )
    worker = PlanWorker(
        cost_model(shape, hardware, mode),
        make_policy(config.planner, interval_steps=config.plan_interval_steps),
        # A page of each array is never given out.
        adapter_bytes=(memory.num_adapter_pages - 1) * layout.page_bytes,
        kv_bytes=(memory.num_kv_pages - 1) * layout.page_bytes,
        attention=None if config.attention_strategy == "auto" else config.attention_strategy,
    )
    return EnginePlanner(
        worker,
        kv=kv,
        attention=attention,
        unit=unit,
        adapters=planned,
        rows=AdapterRows(planned, shape, names=layout.names, page_bytes=layout.page_bytes),
        decode_rows=decode_rows,
        interval_steps=config.plan_interval_steps,
        most_pages=memory.copy_pages,
        about=f"{config.planner}, for hardware {hardware.name}, cost model {mode}",
    )
