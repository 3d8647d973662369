"""Puts an engine together from one configuration: model, adapter store, executor, scheduler."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from memory_pool.adapter_pool import AdapterPool
from memory_pool.kv_pool import KvPool
from memory_pool.layout import PageLayout
from memory_pool.ledger import Ledger
from memory_pool.link import TENSOR_AXIS, AllocationError
from memory_pool.machine_memory import device_bytes, host_bytes
from memory_pool.near_unit import NearDataUnit
from memory_pool.page_memory import PageMemory
from memory_pool.pages import PageAllocator
from memory_pool.pool_pages import PoolPages
from memory_pool.probe import ProbeReport, probe
from plora_jax.adapters import Adapter, load_adapter
from plora_jax.checkpoints import find_model, load_config, numpy_dtype, resolve_dtype
from plora_jax.config import ModelConfig
from plora_jax.engine.buckets import PREFILL_BLOCK
from plora_jax.engine.budget import SchedulerConfig
from plora_jax.engine.build_planner import make_planner
from plora_jax.engine.build_weights import read_weights, served_shapes
from plora_jax.engine.compile import use_persistent_cache
from plora_jax.engine.engine import Engine
from plora_jax.engine.engine_config import EngineConfig
from plora_jax.engine.executor import JaxExecutor
from plora_jax.engine.kept_programs import STEPS_FOLDER, KeptPrograms
from plora_jax.engine.memory_budgets import Room, allocation_problem, memory_problems
from plora_jax.engine.near_guard import AttentionChoice, NearDataGuard, backend_problems
from plora_jax.engine.planning import EnginePlanner
from plora_jax.engine.start import Beside, Progress, StagesInTurn
from plora_jax.engine.traffic import groups_of
from plora_jax.model import quantization_problem
from plora_jax.parallel import EMBEDDING, HEAD, TensorParallel
from plora_jax.tokenizer import load_tokenizer
from strategies.strategy_table import LORA

MB, GB = 2**20, 2**30

UNPLANNED_LORA, UNPLANNED_WHILE_ALL_FIT = "near_data", "resident"
"""Serve adapters that no plan has come to: nothing waits, and nothing is copied; or, while the device has room for all
adapters, none has to stay in the pool."""

UNPLANNED_ATTENTION = "distributed"
"""Pages that the device does not hold are read where they are until a plan says otherwise."""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """An engine and what it stands on.

    Attributes:
        engine: not started yet.
        config: as given.
        model: numbers of the base model.
        dtype: compute dtype.
        memory: page arrays.
        adapters: where adapters are; None without LoRA.
        kv: KV pages.
        ledger: bytes that crossed the link.
        executor: carries out steps.
        probe: what the backend can do of what the pool needs.
        near_data: the compute near the data; `fail` it to see how the engine goes on without.
        weight_bytes: bytes of the base weights as they serve, all devices together.
        planning: who plans and for which machine; None where both strategies are forced.
        planner_of: another planner of the same engine, by a configuration of which only the strategies, the planner
            and its hardware count; None where both strategies are forced.
        settling: moves memory to huge pages beside what else goes on; nobody needs to wait for it.
    """

    engine: Engine
    config: EngineConfig
    model: ModelConfig
    dtype: str
    memory: PageMemory
    adapters: AdapterPool | None
    kv: KvPool
    ledger: Ledger
    executor: JaxExecutor
    probe: ProbeReport
    near_data: NearDataUnit
    weight_bytes: int
    planning: str | None
    planner_of: Callable[[EngineConfig], EnginePlanner | None]
    settling: threading.Thread

    def wait_until_settled(self) -> None:
        """Waits until memory lies on huge pages: until then, seconds after a start, steps take up to twice as long."""
        self.settling.join()

    @property
    def precision(self) -> str:
        """The compute dtype, and those of what is quantised: "bfloat16, int8 weights, int8 KV"."""
        config, parts = self.config, [self.dtype]
        parts += [f"{config.quantization} weights"] if config.quantization != "none" else []
        parts += [f"{config.lora_dtype} adapters"] if config.lora_dtype != "auto" else []
        parts += [f"{config.kv_cache_dtype} KV"] if config.kv_cache_dtype != "auto" else []
        return ", ".join(parts)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool has room for beside the adapters."""
        return (self.kv.num_held_pages + self.kv.num_free_pages) * self.config.page_tokens

    def device_bytes(self) -> dict[str, int]:
        """Device memory by what it holds, all devices together."""
        return {
            "weights": self.weight_bytes,
            "adapter": self.memory.adapters.nbytes if self.adapters else 0,
            "kv": self.memory.kv.nbytes,
        }

    def pool_bytes(self) -> dict[str, int]:
        """Bytes taken in the pool by what they hold."""
        return {
            "adapter": self.adapters.pool_bytes if self.adapters else 0,
            "kv": self.kv.num_held_pages * self.memory.page_bytes,
        }


def build_engine(
    config: EngineConfig, *, model_name: str | None = None, progress: Progress | None = None
) -> Deployment:
    """Loads the model and compiles every program, so that traffic compiles nothing.

    Args:
        config: what the operator set.
        model_name: what clients call the base model; by default the last part of its path.
        progress: told how far the start is.

    Raises:
        ValueError: a configuration that cannot be; names the fields and what to change.
        FileNotFoundError, ConfigError, WeightsError, TokenizerError: what reading the model raises.
    """
    config.validate()
    progress = progress or Progress()
    cache = use_persistent_cache(config.compilation_cache_dir) if config.compilation_cache_dir else None
    stages = StagesInTurn(progress, "weights", "programs")
    source, model = find_model(config.model), load_config(config.model)
    parallel = TensorParallel(model, config.tensor_parallel_size)
    if problem := quantization_problem(model, config.quantization):
        raise ValueError(problem)
    mesh, report = _mesh(config.tensor_parallel_size), probe()
    room = Room(host_bytes(), device_bytes(mesh.devices.flat[0]), pool_on_device=report.emulation is not None)
    if problems := [*backend_problems(config, report), *memory_problems(config, room)]:
        raise ValueError("; ".join(problems))
    dtype = numpy_dtype(resolve_dtype(config.dtype, model))
    layout = page_layout(parallel, config, dtype=dtype)
    sizes, limits = _sizes(config, layout), _limits(config, model, layout)
    # The programs need to know the shapes of the weights, not the weights.
    with Beside(functools.partial(read_weights, config, parallel, mesh, stages)) as reading:
        memory = _page_memory(config, layout, mesh, sizes, near=report.near_data, pool_on_device=room.pool_on_device)
        reading.check()
        pages, ledger = PoolPages(config.pool_devices, sizes.pool_pages), Ledger()
        longest = -(-limits.max_model_len // config.page_tokens)
        adapters = _adapter_pool(config, memory, pages, ledger=ledger, keep_for_kv=longest)
        kv = KvPool(
            pages,
            PageAllocator(sizes.kv_pages),
            memory,
            page_tokens=config.page_tokens,
            token_bytes=memory.page_bytes // config.page_tokens,
            ledger=ledger,
        )
        unit, attention = NearDataUnit(), _attention(config)
        guard = NearDataGuard(unit, adapters, attention)
        if report.problem is not None:
            unit.fail(f"at start: {report.problem}")
            guard.check()

        def advance(done: int, total: int) -> None:
            reading.check()
            stages.advance("programs", done, total)

        kept = KeptPrograms(cache and cache / STEPS_FOLDER, list(mesh.devices.flat))
        executor = JaxExecutor(
            model,
            served_shapes(config, parallel, mesh, dtype=dtype, read=lambda: reading.result()[1]),
            dtype=dtype,
            memory=memory,
            max_num_seqs=config.max_num_seqs,
            max_prefill_tokens=limits.max_prefill_tokens,
            max_model_len=limits.max_model_len,
            max_lora_rank=config.max_lora_rank,
            adapters=adapters,
            attention_of=attention,
            ledger=ledger,
            guard=guard,
            kept=kept,
            progress=advance,
        )
        stages.end("programs")
        tokenizer = load_tokenizer(source)
        outer, params = reading.result()
    executor.serve(params)
    name = default_model_name(source)
    planner_of = functools.partial(
        make_planner,
        model=model,
        name=name,
        memory=memory,
        adapters=adapters,
        kv=kv,
        attention=attention,
        unit=unit,
        decode_rows=[bucket.decode_rows for bucket in executor.buckets if not bucket.prefill_tokens],
    )
    planner = planner_of(config)
    engine = Engine(
        executor=executor,
        scheduler_config=limits,
        kv=kv,
        tokenizer=tokenizer,
        adapters=adapters,
        load_adapter=_adapter_reader(model, outer, dtype=dtype, max_lora_rank=config.max_lora_rank),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        model_name=model_name or name,
        seed=config.seed,
        planner=planner,
    )
    return Deployment(
        engine=engine,
        config=config,
        model=model,
        dtype=str(dtype),
        memory=memory,
        adapters=adapters,
        kv=kv,
        ledger=ledger,
        executor=executor,
        probe=report,
        near_data=unit,
        weight_bytes=sum(executor.weight_bytes().values()),
        planning=planner.about if planner else None,
        planner_of=planner_of,
        settling=executor.settle(),
    )


def page_layout(parallel: TensorParallel, config: EngineConfig, *, dtype: np.dtype) -> PageLayout:
    """The pages of a model's KV and adapters on one shard.

    Args:
        parallel: how the model is cut.
        config: of which the sizes of KV pages and the dtypes count.
        dtype: of adapters, and of KV, unless they are int8.

    Raises:
        ValueError: int8 keys of this head dim, or rows of int8 adapters, are no whole numbers of `dtype`.
    """
    shard, int8_kv = parallel.shard_config, config.kv_cache_dtype == "int8"
    if int8_kv and shard.head_dim % dtype.itemsize:
        raise ValueError(
            f"--kv_cache_dtype int8 needs a head dim that is a multiple of {dtype.itemsize} beside {dtype}, and that "
            f"of {shard.architecture} is {shard.head_dim}: use --kv_cache_dtype auto"
        )
    int8_adapters = config.lora_dtype == "int8"
    shares = [share for cut in parallel.cuts.values() if not cut.spread for share in (cut.out[0], cut.inputs[0])]
    odd = sorted({stop - start for start, stop in shares if (stop - start) % dtype.itemsize})
    if int8_adapters and odd:
        raise ValueError(
            f"--lora_dtype int8 needs widths that are multiples of {dtype.itemsize} beside {dtype}, and projections of "
            f"{shard.architecture} on a shard have {', '.join(map(str, odd))}: use --lora_dtype auto"
        )
    return PageLayout(
        num_layers=shard.num_layers,
        page_tokens=config.page_tokens,
        kv_heads=shard.num_kv_heads,
        head_dim=shard.head_dim,
        projections=parallel.cuts,
        dtype=dtype,
        int8_kv=int8_kv,
        int8_adapters=int8_adapters,
    )


def _mesh(num_shards: int) -> Mesh:
    devices = jax.local_devices()
    if len(devices) < num_shards:
        hint = ""
        if devices[0].platform == "cpu":
            hint = f", or set XLA_FLAGS=--xla_force_host_platform_device_count={num_shards} to try it on the CPU"
        raise ValueError(
            f"--tensor_parallel_size {num_shards} needs as many devices, and this machine has {len(devices)} "
            f"({devices[0].platform}): lower it{hint}"
        )
    return Mesh(np.array(devices[:num_shards]), (TENSOR_AXIS,))


def default_model_name(source: Path) -> str:
    """The last part of the model's path, without quantisation and suffix: "SmolLM2-135M-Instruct"."""
    return source.name.split(".")[0] if source.is_file() else source.resolve().name


class _Sizes(NamedTuple):
    """Pages of each memory, the reserved ones included."""

    pool_pages: int
    adapter_pages: int
    kv_pages: int


def _sizes(config: EngineConfig, layout: PageLayout) -> _Sizes:
    whole = layout.page_bytes * config.tensor_parallel_size
    sizes = _Sizes(
        pool_pages=int(config.pool_memory_gb * GB) // (whole * config.pool_devices),
        adapter_pages=config.device_adapter_mb * MB // layout.page_bytes if config.enable_lora else 1,
        kv_pages=config.device_kv_mb * MB // layout.page_bytes,
    )
    problems = []
    if sizes.pool_pages < 2:
        need = 2 * whole * config.pool_devices / GB
        problems.append(
            f"--pool_memory_gb {config.pool_memory_gb} is less than two pages of {whole} bytes on each of "
            f"{config.pool_devices} pool devices: raise it to {need:.3g} or more"
        )
    if sizes.kv_pages < 2:
        need = -(-2 * layout.page_bytes // MB)
        problems.append(
            f"--device_kv_mb {config.device_kv_mb} is less than two pages of {layout.page_bytes} bytes: raise it to "
            f"{need} or more"
        )
    if problems:
        raise ValueError("; ".join(problems))
    return sizes


def _page_memory(
    config: EngineConfig, layout: PageLayout, mesh: Mesh, sizes: _Sizes, *, near: bool, pool_on_device: bool
) -> PageMemory:
    try:
        return PageMemory(layout, mesh, pool_devices=config.pool_devices, near=near, **sizes._asdict())
    except AllocationError as error:
        raise ValueError(allocation_problem(config, error, pool_on_device=pool_on_device)) from error


def _limits(config: EngineConfig, model: ModelConfig, layout: PageLayout) -> SchedulerConfig:
    whole = layout.page_bytes * config.tensor_parallel_size
    held = (int(config.pool_memory_gb * GB) // (whole * config.pool_devices) - 1) * config.pool_devices
    held *= config.page_tokens
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ValueError(
            f"--max_model_len {config.max_model_len} is above the model's own limit of {model.max_position} tokens: "
            "lower it or leave it out"
        )
    longest = config.max_model_len or min(model.max_position, held)
    if held < max(longest, 1):
        need = (-(-longest // config.page_tokens) + config.pool_devices) * whole / GB
        raise ValueError(
            f"--pool_memory_gb {config.pool_memory_gb} holds the keys and values of {max(held, 0)} tokens, fewer than "
            f"one sequence of --max_model_len {longest}: raise --pool_memory_gb to {need:.3g} or more, or lower "
            "--max_model_len"
        )
    # A step never holds more prefill tokens than one for every token that can be in flight.
    prefill = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_tokens=-(-prefill // PREFILL_BLOCK) * PREFILL_BLOCK,
        prefill_block=PREFILL_BLOCK,
        page_tokens=config.page_tokens,
        max_model_len=longest,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_waiting=config.max_waiting,
    )


def _adapter_pool(
    config: EngineConfig, memory: PageMemory, pages: PoolPages, *, ledger: Ledger, keep_for_kv: int
) -> AdapterPool | None:
    if not config.enable_lora:
        return None
    return AdapterPool(
        memory,
        pages,
        ledger=ledger,
        needs={name: strategy.needs for name, strategy in LORA.items()},
        preferred=(preferred_strategy(config),),
        while_all_fit=strategy_while_all_fit(config),
        groups=[*groups_of(memory.layout), (EMBEDDING,), (HEAD,)],
        max_rank=config.max_lora_rank,
        placement="striped" if config.pool_placement == "striped" else "pinned",
        keep_for_kv=keep_for_kv,
    )


def preferred_strategy(config: EngineConfig) -> str:
    """The LoRA strategy that serves an adapter as long as no plan has come to it."""
    return UNPLANNED_LORA if config.lora_strategy == "auto" else config.lora_strategy


def strategy_while_all_fit(config: EngineConfig) -> str | None:
    """The one that serves it while the device has room for all adapters; None for the same."""
    return UNPLANNED_WHILE_ALL_FIT if config.lora_strategy == "auto" else None


def _attention(config: EngineConfig) -> AttentionChoice:
    forced = config.attention_strategy
    return AttentionChoice(UNPLANNED_ATTENTION if forced == "auto" else forced)


def _adapter_reader(
    model: ModelConfig, outer: Mapping[str, Any], *, dtype: np.dtype, max_lora_rank: int
) -> Callable[[str, str], Adapter]:
    def read(name: str, path: str) -> Adapter:
        return load_adapter(
            path, name=name, config=model, max_lora_rank=max_lora_rank, dtype=dtype, base_weights=lambda: outer
        )

    return read
