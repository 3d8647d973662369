"""Puts an engine together from one configuration: model, adapter store, executor, scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memory_pool import AdapterStore, Ledger, PageAllocator, device_sharding, one_device_mesh
from plora_jax.adapters import Adapter, load_adapter
from plora_jax.checkpoints import DEFAULT_MODEL, LoadedModel, load_model
from plora_jax.config import ModelConfig
from plora_jax.engine.batch import PREFILL_BLOCK
from plora_jax.engine.budget import SchedulerConfig
from plora_jax.engine.compile import use_persistent_cache
from plora_jax.engine.engine import Engine
from plora_jax.engine.executor import JaxExecutor, kv_page_bytes
from plora_jax.tokenizer import load_tokenizer

DEFAULT_CACHE_DIR = "~/.cache/plora_jax/xla"
MB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an operator may set of an engine.

    Attributes:
        model: "default", a Hugging Face directory, a GGUF file or an Orbax checkpoint directory.
        dtype: "auto" (as published; bfloat16 for float16 and quantised files), "bfloat16" or "float32"; of weights,
            activations, KV and adapters.
        max_model_len: longest sequence, prompt and output together, tokens; None for the model's own limit, or what
            device_kv_mb holds where that is less.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: decode rows and prefill tokens of one step.
        prefill_chunk_tokens: longest part of one prompt in one step; None for whatever fits the step.
        max_waiting: sequences that may wait; more are refused.
        seed: of the random draws of requests that bring no seed.
        enable_lora: serve adapters.
        max_lora_rank: largest rank of an adapter.
        device_adapter_mb: device memory for adapters, MB of 2^20 bytes.
        device_kv_mb: device memory for KV pages, MB of 2^20 bytes.
        page_tokens: tokens of a KV page; a power of two, at most 128.
        compilation_cache_dir: where compiled programs are kept between runs; None keeps none.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    prefill_chunk_tokens: int | None = None
    max_waiting: int = 1024
    seed: int = 0
    enable_lora: bool = True
    max_lora_rank: int = 64
    device_adapter_mb: int = 256
    device_kv_mb: int = 512
    page_tokens: int = 16
    compilation_cache_dir: str | None = DEFAULT_CACHE_DIR

    def validate(self) -> None:
        """Raises ValueError naming every field that cannot be, its value and what is allowed."""
        problems = [
            f"--{name} must be at least 1, got {value}"
            for name in (
                "max_model_len",
                "max_num_seqs",
                "max_num_batched_tokens",
                "prefill_chunk_tokens",
                "max_lora_rank",
                "device_adapter_mb",
                "device_kv_mb",
            )
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.page_tokens not in (1, 2, 4, 8, 16, 32, 64, 128):
            problems.append(f"--page_tokens must be a power of two up to 128, got {self.page_tokens}")
        if self.dtype not in ("auto", "bfloat16", "float32"):
            problems.append(f"--dtype must be auto, bfloat16 or float32, got {self.dtype!r}")
        if not problems and self.max_num_batched_tokens < self.max_num_seqs:
            problems.append(
                f"--max_num_batched_tokens {self.max_num_batched_tokens} is below --max_num_seqs {self.max_num_seqs}: "
                "a step could not hold one token of every sequence"
            )
        if problems:
            raise ValueError("; ".join(problems))


class Progress:
    """Told how far the start is; the base class says nothing."""

    def stage(self, name: str) -> None:
        """A stage begins: "weights", "programs" or "adapters"."""

    def advance(self, done: int, total: int) -> None:
        """Done so far in this stage, in bytes or programs."""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """An engine and what it stands on.

    Attributes:
        engine: not started yet.
        config: as given.
        model: numbers of the base model.
        dtype: compute dtype.
        store: adapters; None without LoRA.
        ledger: bytes that crossed the link.
        executor: carries out steps.
        num_pages: KV pages that sequences may take.
        weight_bytes: bytes of the base weights on the device.
    """

    engine: Engine
    config: EngineConfig
    model: ModelConfig
    dtype: str
    store: AdapterStore | None
    ledger: Ledger
    executor: JaxExecutor
    num_pages: int
    weight_bytes: int

    def device_bytes(self) -> dict[str, int]:
        """Device memory by what it holds."""
        return {
            "weights": self.weight_bytes,
            "adapter": self.store.device_bytes if self.store else 0,
            "kv": self.executor.kv_bytes,
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
    if config.compilation_cache_dir:
        use_persistent_cache(config.compilation_cache_dir)
    mesh = one_device_mesh()
    progress.stage("weights")
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        progress=progress.advance,
        sharding_of=lambda path, shape: device_sharding(mesh),
    )
    dtype = np.dtype(loaded.params["embedding"].dtype)
    limits, num_pages = _limits(config, loaded.config, dtype)
    ledger = Ledger()
    store = _store(config, loaded.config, dtype=dtype, mesh=mesh, ledger=ledger)
    progress.stage("programs")
    executor = JaxExecutor(
        loaded.config,
        loaded.params,
        dtype=dtype,
        mesh=mesh,
        num_pages=num_pages,
        page_tokens=config.page_tokens,
        max_num_seqs=config.max_num_seqs,
        max_prefill_tokens=limits.max_prefill_tokens,
        max_model_len=limits.max_model_len,
        adapters=store,
        progress=progress.advance,
    )
    engine = Engine(
        executor=executor,
        scheduler_config=limits,
        pages=PageAllocator(num_pages, reserved=1),
        tokenizer=load_tokenizer(loaded.source),
        adapters=store,
        load_adapter=_adapter_reader(loaded.config, dtype=dtype, max_lora_rank=config.max_lora_rank),
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=loaded.config.eos_token_ids,
        model_name=model_name or default_model_name(loaded),
        seed=config.seed,
    )
    weight_bytes = _tree_bytes(loaded.params)
    return Deployment(engine, config, loaded.config, str(dtype), store, ledger, executor, num_pages - 1, weight_bytes)


def default_model_name(loaded: LoadedModel) -> str:
    """The last part of the model's path, without quantisation and suffix: "SmolLM2-135M-Instruct"."""
    source = Path(loaded.source)
    return source.name.split(".")[0] if source.is_file() else source.resolve().name


def _limits(config: EngineConfig, model: ModelConfig, dtype: np.dtype) -> tuple[SchedulerConfig, int]:
    """Scheduler limits and the number of KV pages, page 0 included."""
    page_bytes = kv_page_bytes(model, config.page_tokens, dtype)
    num_pages = config.device_kv_mb * MB // page_bytes
    held = (num_pages - 1) * config.page_tokens
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ValueError(
            f"--max_model_len {config.max_model_len} is above the model's own limit of {model.max_position} tokens: "
            "lower it or leave it out"
        )
    longest = config.max_model_len or min(model.max_position, held)
    if held < max(longest, 1):
        need = -(-(-(-longest // config.page_tokens) + 1) * page_bytes // MB)
        raise ValueError(
            f"--device_kv_mb {config.device_kv_mb} holds {max(held, 0)} tokens, fewer than one sequence of "
            f"--max_model_len {longest}: raise --device_kv_mb to {need} or lower --max_model_len"
        )
    # A step never holds more prefill tokens than one for every token that can be in flight.
    prefill = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_tokens=-(-prefill // PREFILL_BLOCK) * PREFILL_BLOCK,
        prefill_block=PREFILL_BLOCK,
        page_tokens=config.page_tokens,
        max_model_len=longest,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_waiting=config.max_waiting,
    )
    return limits, num_pages


def _store(
    config: EngineConfig, model: ModelConfig, *, dtype: np.dtype, mesh: Any, ledger: Ledger
) -> AdapterStore | None:
    if not config.enable_lora:
        return None
    return AdapterStore(
        model.projections,
        model.num_layers,
        dtype=dtype,
        mesh=mesh,
        device_bytes=config.device_adapter_mb * MB,
        ledger=ledger,
    )


def _adapter_reader(model: ModelConfig, *, dtype: np.dtype, max_lora_rank: int) -> Callable[[str, str], Adapter]:
    def read(name: str, path: str) -> Adapter:
        return load_adapter(path, name=name, config=model, max_lora_rank=max_lora_rank, dtype=dtype)

    return read


def _tree_bytes(tree: Any) -> int:
    if isinstance(tree, dict):
        return sum(_tree_bytes(v) for v in tree.values())
    return tree.nbytes
