"""Runs the conformance pack through the paged engine and keeps the logits on the way."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path

import jax
import numpy as np

from memory_pool import PageAllocator
from plora_jax.adapters import load_adapter
from plora_jax.engine import Engine, SamplingParams
from plora_jax.engine.batch import build_batch, pick_bucket
from plora_jax.engine.build import Deployment, EngineConfig, build_engine
from plora_jax.engine.executor import JaxExecutor
from plora_jax.engine.plan import RowResult, StepPlan
from plora_jax.engine.step import PagedContext, StepStrategies
from plora_jax.model import Decoder

PACK = Path(__file__).parent.parent / "data" / "conformance"
INDEX = json.loads((PACK / "index.json").read_text())
MODELS = list(INDEX["models"])
NOT_SERVED = {
    "lora_bias": "lora_bias",
    "bias_all_qwen2": "bias",
    "modules_to_save_head": "modules_to_save",
    "embed_head_lora": "embed",
    "dora": "DoRA",
}
SERVED = [name for name in INDEX["adapters"] if name not in NOT_SERVED]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class LogitsRecorder:
    """An executor that keeps the logits of every token it computes, by sequence and position.

    The logits come from the step's own parts (packed batch, paged context, decoder) before sampling.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.inner = deployment.executor
        config, kernels = deployment.model, self.inner.kernels
        decoder = Decoder(config)

        def logits(params, pages, rows, batch):
            context = PagedContext(config, batch, rows, strategies=StepStrategies("resident", "local", kernels))
            hidden, _ = decoder.layers(params, decoder.embed(params, batch.tokens, np.float32), pages, context)
            return decoder.logits(params, hidden)

        self._logits = jax.jit(logits)
        self.by_sequence: dict[tuple, dict[int, np.ndarray]] = defaultdict(dict)

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def execute(self, plan: StepPlan) -> list[RowResult]:
        inner: JaxExecutor = self.inner
        bucket = pick_bucket(inner._buckets, plan)
        slots_of = inner._adapters.slots
        batch, _, firsts = build_batch(plan, bucket, inner._shape, slots_of=slots_of)
        logits = np.asarray(self._logits(inner._params, inner._pages, inner._rows(), batch))
        for row, first in zip(plan.rows, firsts, strict=True):
            key = (row.sequence.adapter_id, tuple(row.sequence.prompt_ids))
            for i in range(row.count):
                self.by_sequence[key][row.start + i] = logits[first + i]
        return inner.execute(plan)


def deploy(model: str, **options) -> Deployment:
    """A small deployment of a pack model in float32."""
    settings = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "device_kv_mb": 4,
        "device_adapter_mb": 4,
        "compilation_cache_dir": None,
    }
    return build_engine(EngineConfig(model=str(PACK / "models" / model), **(settings | options)))


def engine_over(deployment: Deployment, executor, *, chunk: int | None) -> Engine:
    """A fresh engine over a deployment's programs, with another prefill chunk."""
    old = deployment.engine
    return Engine(
        executor=executor,
        scheduler_config=dataclasses.replace(old.scheduler_config, prefill_chunk_tokens=chunk),
        pages=PageAllocator(deployment.num_pages + 1, reserved=1),
        tokenizer=old.tokenizer,
        adapters=deployment.store,
        load_adapter=lambda name, path: load_adapter(
            path, name=name, config=deployment.model, max_lora_rank=64, dtype=np.float32
        ),
        vocab_size=old.vocab_size,
        eos_token_ids=old.eos_token_ids,
        model_name=old.model_name,
    )


def adapters_of(model: str) -> list[str]:
    return [name for name in SERVED if INDEX["adapters"][name]["base"] == model]


def golden(name: str | None, model: str) -> dict[str, np.ndarray]:
    folder = PACK / "models" / model if name is None else PACK / "adapters" / name
    with np.load(folder / "golden.npz") as file:
        return dict(file)
