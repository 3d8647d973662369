"""What an operator may set of an engine, and which values cannot be."""

from __future__ import annotations

import dataclasses

from memory_pool.figures import HardwareError
from memory_pool.hardware import parse_hardware, parse_link
from plora_jax.checkpoints import DEFAULT_MODEL
from plora_jax.engine.plan_worker import POLICIES
from plora_jax.model import QUANTIZATIONS
from strategies.strategy_table import ATTENTION, LORA

KV_CACHE_DTYPES = LORA_DTYPES = ("auto", "int8")
DEFAULT_CACHE_DIR = "~/.cache/plora_jax/programs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an operator may set of an engine.

    Attributes:
        model: "default", a Hugging Face directory, a GGUF file or an Orbax checkpoint directory.
        dtype: "auto" (as published; bfloat16 for float16 and quantised files), "bfloat16" or "float32"; of weights,
            activations, KV and adapters.
        quantization: of base weights, beside any dtype: "none"; "int8": projections and head as 8-bit integers with a
            scale for each output, rounded at the start, activations as 16-bit integers by token; steps read half the
            bytes of bfloat16. "gguf": the 4-bit blocks of a GGUF file (Q4_0, Q4_1, Q4_K) as they are, activations as
            8-bit integers by blocks of 32, and int8 for whatever the file has otherwise; steps read a third, so few
            requests at once are fastest so, and many with int8. `launch.bench quality` measures what each loses for any
            model. Embeddings, norms, adapters and KV keep their dtype.
        lora_dtype: "auto" (as dtype says), or "int8": adapters as 8-bit integers, rounded once, when they are loaded,
            with a scale for each row of A and for each B. They take half the bytes of bfloat16 in the pool, on the
            device and in every step, and their part of a result changes by some 1 %.
        kv_cache_dtype: "auto" (as dtype says), or "int8": keys and values as 8-bit integers with a scale for each token
            and head, rounded once, when they are written. Pages take little more than half the bytes of bfloat16, so
            the pool and device_kv_mb hold nearly twice the tokens.
        max_model_len: longest sequence, prompt and output together, tokens; None for the model's own limit, or what
            device_kv_mb holds where that is less.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: decode rows and prefill tokens of one step.
        prefill_chunk_tokens: longest part of one prompt in one step; None for whatever fits the step.
        max_waiting: sequences that may wait; more are refused.
        seed: of the random draws of requests that bring no seed.
        enable_lora: serve adapters.
        max_lora_rank: largest rank of an adapter.
        lora_strategy: "auto" (planned for all adapters together while the server runs), or one that is preferred:
            "resident", "fetch", "near_data" or "split". An adapter waits for room while others hold it; one that can
            never have room is served by fetch.
        attention_strategy: what attends to KV pages that are not on the device: "auto" (planned, as is how many are),
            "local" or "distributed".
        hardware: what plans are made for: a preset, a file as launch.calibrate writes it, or "auto": this machine's
            file where there is one, else the preset of its device.
        link: a preset, or GB/s:latency_ns, instead of the hardware's link.
        planner: who plans: "joint" (all adapters and KV at once), "paper" (its memory manager) or "lru".
        plan_interval_steps: least steps between two plans.
        tensor_parallel_size: devices that share the model; heads and FFN width must divide by it.
        pool_memory_gb: memory of the pool, GB of 2^30 bytes, all devices together: every adapter and the KV cache.
        pool_devices: pool devices that the memory belongs to, in equal parts.
        pool_placement: "pinned" (an adapter lies on one pool device) or "striped" (by rank over all of them).
        device_adapter_mb: device memory for adapters, MB of 2^20 bytes, of each device.
        device_kv_mb: device memory for KV pages, MB of 2^20 bytes, of each device.
        page_tokens: tokens of a KV page; a power of two, at most 128.
        compilation_cache_dir: where compiled programs are kept between runs; an empty one keeps none.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    quantization: str = "none"
    lora_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    prefill_chunk_tokens: int | None = None
    max_waiting: int = 1024
    seed: int = 0
    enable_lora: bool = True
    max_lora_rank: int = 64
    lora_strategy: str = "auto"
    attention_strategy: str = "auto"
    hardware: str = "auto"
    link: str | None = None
    planner: str = "joint"
    plan_interval_steps: int = 16
    tensor_parallel_size: int = 1
    pool_memory_gb: float = 2.0
    pool_devices: int = 1
    pool_placement: str = "pinned"
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
                "tensor_parallel_size",
                "pool_devices",
                "plan_interval_steps",
                "device_adapter_mb",
                "device_kv_mb",
            )
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.page_tokens not in (1, 2, 4, 8, 16, 32, 64, 128):
            problems.append(f"--page_tokens must be a power of two up to 128, got {self.page_tokens}")
        if self.dtype not in ("auto", "bfloat16", "float32"):
            problems.append(f"--dtype must be auto, bfloat16 or float32, got {self.dtype!r}")
        if not self.pool_memory_gb > 0:
            problems.append(f"--pool_memory_gb must be above 0, got {self.pool_memory_gb}")
        for name, choices in (
            ("quantization", QUANTIZATIONS),
            ("lora_dtype", LORA_DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("lora_strategy", ("auto", *LORA)),
            ("attention_strategy", ("auto", *ATTENTION)),
            ("pool_placement", ("pinned", "striped")),
            ("planner", POLICIES),
        ):
            if (value := getattr(self, name)) not in choices:
                problems.append(f"--{name} must be one of {', '.join(choices)}, got {value!r}")
        problems += self._hardware_problems()
        if not problems and self.max_num_batched_tokens < self.max_num_seqs:
            problems.append(
                f"--max_num_batched_tokens {self.max_num_batched_tokens} is below --max_num_seqs {self.max_num_seqs}: "
                "a step could not hold one token of every sequence"
            )
        if problems:
            raise ValueError("; ".join(problems))

    def _hardware_problems(self) -> list[str]:
        problems = []
        try:
            if self.hardware != "auto":
                parse_hardware(self.hardware)
        except HardwareError as error:
            problems.append(f"--hardware: {error}")
        try:
            if self.link is not None:
                parse_link(self.link)
        except HardwareError as error:
            problems.append(f"--link: {error}")
        return problems
