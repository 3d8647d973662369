"""Runs the conformance pack through the paged engine and keeps the logits on the way."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from memory_pool.link import TENSOR_AXIS
from plora_jax.adapters import load_adapter
from plora_jax.engine import Engine, SamplingParams
from plora_jax.engine.buckets import pick_bucket
from plora_jax.engine.build import Deployment, EngineConfig, build_engine
from plora_jax.engine.plan import RowResult, StepPlan
from plora_jax.engine.step import PagedContext, open_parcels

PACK = Path(__file__).parent.parent / "data" / "conformance"
INDEX = json.loads((PACK / "index.json").read_text())
MODELS = list(INDEX["models"])
NOT_SERVED = {
    "lora_bias": "lora_bias",
    "bias_all_qwen2": "bias",
    "modules_to_save_head": "modules_to_save",
    "dora": "DoRA",
}
SERVED = [name for name in INDEX["adapters"] if name not in NOT_SERVED]
PREFERRED = ("resident", "near_data")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=1)


class LogitsRecorder:
    """An executor that keeps the logits of every token it computes, by adapter, prompt and position.

    The logits come from the step's own parts (parcels, paged context, decoder) before sampling. Requests must ask for
    prompt log-probabilities, which is when adapters of the head see every token of a prompt.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.inner = deployment.executor
        self._memory = deployment.memory
        self._logits = {bucket: self._make(bucket) for bucket in self.inner.buckets}
        self.by_sequence: dict[tuple, dict[int, np.ndarray]] = defaultdict(dict)

    def _make(self, bucket):
        decoder, packing = self.inner.decoder, self.inner.programs[bucket].packing

        def logits(params, pool, adapters, kv, parcels):
            inputs = open_parcels(parcels, packing)
            # Those that `deploy` has: the other lanes are empty, and leaving them out halves the compilation.
            served = (inputs.lora, inputs.lora_control)
            lora, control = ({p: {n: x[n] for n in PREFERRED if n in x} for p, x in y.items()} for y in served)
            inputs = inputs._replace(lora=lora, lora_control=control)
            context = PagedContext(decoder, inputs, pool, adapters, setting=self.inner.setting)
            x = decoder.embed(params, inputs.tokens.tokens, np.float32, context=context)
            hidden, _ = decoder.layers(params, x, kv, context)
            rows = bucket.decode_rows

            def adapt(logits):
                adapted = context.adapt_logits(logits[:rows], hidden[:rows], "head")
                if not bucket.prefill_tokens:
                    return adapted
                return jnp.concatenate([adapted, context.adapt_logits(logits[rows:], hidden[rows:], "prompt")])

            return decoder.logits(params, hidden, adapt=adapt)

        sharded, whole = PartitionSpec(TENSOR_AXIS), PartitionSpec()
        specs = (decoder.parallel.param_specs(), sharded, sharded, sharded, whole)
        mesh = self._memory.mesh
        return jax.jit(jax.shard_map(logits, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False))

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def execute(self, plan: StepPlan) -> list[RowResult]:
        inner, memory = self.inner, self._memory
        bucket = pick_bucket(inner.buckets, plan)
        built = inner.programs[bucket].builder.build(plan, placed=inner._placed)
        words = {
            name: jax.device_put(inner.programs[bucket].packing[name].pack(p.tree), inner._space[p.in_pool])
            for name, p in built.parcels.items()
        }
        arrays = inner._params, memory.pool, memory.adapters, memory.kv
        logits = np.asarray(self._logits[bucket](*arrays, words))
        for row, first in zip(plan.rows, built.firsts, strict=True):
            key = (row.sequence.adapter_id, tuple(row.sequence.prompt_ids))
            for i in range(row.count):
                self.by_sequence[key][row.start + i] = logits[first + i]
        return inner.execute(plan)


def deploy(model: str, **options) -> Deployment:
    """A small deployment of a pack model in float32, which plans nothing unless it is asked to.

    Adapters are served by the first of PREFERRED that has room, unless `options` say otherwise.
    """
    settings = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "device_kv_mb": 4,
        "pool_memory_gb": 0.125,
        "device_adapter_mb": 4,
        "compilation_cache_dir": None,
    }
    forced = {"lora_strategy": PREFERRED[0], "attention_strategy": "distributed"}
    built = build_engine(EngineConfig(model=str(PACK / "models" / model), **(settings | forced | options)))
    if built.adapters and "lora_strategy" not in options:
        built.adapters._preferred = PREFERRED
    return built


def engine_over(deployment: Deployment, executor, *, chunk: int | None, planner=None) -> Engine:
    """A fresh engine over a deployment's programs and pages, with another prefill chunk."""
    old = deployment.engine
    return Engine(
        executor=executor,
        scheduler_config=dataclasses.replace(old.scheduler_config, prefill_chunk_tokens=chunk),
        kv=deployment.kv,
        tokenizer=old.tokenizer,
        adapters=deployment.adapters,
        load_adapter=lambda name, path: load_adapter(
            path, name=name, config=deployment.model, max_lora_rank=64, dtype=np.float32
        ),
        vocab_size=old.vocab_size,
        eos_token_ids=old.eos_token_ids,
        model_name=old.model_name,
        planner=planner,
    )


def adapters_of(model: str) -> list[str]:
    return [name for name in SERVED if INDEX["adapters"][name]["base"] == model]


def golden(name: str | None, model: str) -> dict[str, np.ndarray]:
    folder = PACK / "models" / model if name is None else PACK / "adapters" / name
    with np.load(folder / "golden.npz") as file:
        return dict(file)
