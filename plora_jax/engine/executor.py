"""Carries out plans with JAX: packs a plan, runs the compiled step of its bucket, unpacks what was sampled."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from memory_pool import AdapterStore, allocate, device_sharding, raw_dtype
from plora_jax.config import ModelConfig
from plora_jax.engine.batch import (
    PREFILL_BLOCK,
    BatchShape,
    Bucket,
    StepBatch,
    build_batch,
    lattice,
    pick_bucket,
)
from plora_jax.engine.outputs import TokenLogprobs
from plora_jax.engine.plan import Row, RowResult, StepPlan
from plora_jax.engine.step import PromptLogprobs, StepResult, StepStrategies, make_step
from plora_jax.model import Params, stack_as_raw
from strategies import Kernels, KvPages, choose_kernels


def kv_page_bytes(config: ModelConfig, page_tokens: int, dtype: Any) -> int:
    """Bytes of one KV page: keys and values of `page_tokens` tokens in all layers."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return per_token * page_tokens * np.dtype(dtype).itemsize


class JaxExecutor:
    """The real executor.

    Args:
        config: of the model.
        params: parameter tree on the device.
        dtype: compute dtype of activations, KV and adapters.
        mesh: devices.
        num_pages: KV pages on the device, page 0 included.
        page_tokens: G.
        max_num_seqs: rows of a step.
        max_prefill_tokens: prefill slots of the largest bucket.
        max_model_len: longest sequence, tokens.
        adapters: store whose device rows the step reads; None serves the base model only.
        kernels: implementations to use; by default the best for the platform.
        progress: told (programs compiled, programs in all) during warm-up.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        dtype: Any,
        mesh: Mesh,
        num_pages: int,
        page_tokens: int,
        max_num_seqs: int,
        max_prefill_tokens: int,
        max_model_len: int,
        adapters: AdapterStore | None,
        kernels: Kernels | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._params, self._adapters, self._dtype, self._mesh = stack_as_raw(params), adapters, np.dtype(dtype), mesh
        self._shape = BatchShape(max_model_len, page_tokens, adapters.num_slots if adapters else 1)
        self._buckets = lattice(max_num_seqs, max_prefill_tokens)
        self._width = max_num_seqs
        self.kernels = kernels or choose_kernels()
        shape = (config.num_layers, num_pages, config.num_kv_heads, page_tokens, config.head_dim)
        self._pages = KvPages(
            *(allocate(shape, raw_dtype(dtype), device_sharding(mesh)) for _ in range(2)),
        )
        self._programs = self._compile_all(config, progress)

    @property
    def max_decode_rows(self) -> int:
        return self._width

    @property
    def max_prefill_tokens(self) -> int:
        return self._buckets[-1].prefill_tokens

    @property
    def prefill_block(self) -> int:
        return PREFILL_BLOCK

    @property
    def kv_bytes(self) -> int:
        """Bytes of device memory set aside for KV pages."""
        return sum(p.nbytes for p in self._pages)

    def execute(self, plan: StepPlan) -> list[RowResult]:
        """Runs one step.

        Args:
            plan: rows that fit the largest bucket; their adapters are acquired and their pages allocated.

        Returns:
            One result a row, in order.
        """
        bucket = pick_bucket(self._buckets, plan)
        slots_of = self._adapters.slots if self._adapters else _no_slots
        batch, sampled, firsts = build_batch(plan, bucket, self._shape, slots_of=slots_of)
        self._pages, result = self._programs[bucket](self._params, self._pages, self._rows(), batch)
        return _unpack(plan.rows, result, batch, sampled=sampled, firsts=firsts)

    def _rows(self) -> Mapping[str, Any]:
        return self._adapters.device_rows if self._adapters else {}

    def _compile_all(self, config: ModelConfig, progress: Callable[[int, int], None] | None) -> dict[Bucket, Any]:
        step = make_step(config, self._dtype, StepStrategies("resident", "local", self.kernels))
        jitted = jax.jit(step, donate_argnames="pages")
        # float32 means float32: accelerators otherwise round the operands of a product to fewer bits.
        exact = self._dtype == np.float32
        lowered = {}
        for bucket in self._buckets:
            batch, _, _ = build_batch(StepPlan(()), bucket, self._shape, slots_of=_no_slots)
            args = jax.tree.map(self._abstract, (self._params, self._pages, self._rows(), batch))
            with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
                lowered[bucket] = jitted.lower(*args)
        programs = {}
        with ThreadPoolExecutor(min(len(lowered), os.cpu_count() or 1)) as threads:
            running = {threads.submit(program.compile): bucket for bucket, program in lowered.items()}
            for done in as_completed(running):
                programs[running[done]] = done.result()
                if progress:
                    progress(len(programs), len(lowered))
        return programs

    def _abstract(self, x: Any) -> jax.ShapeDtypeStruct:
        sharding = x.sharding if isinstance(x, jax.Array) else device_sharding(self._mesh)
        return jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=sharding)


def _no_slots(_: int) -> Sequence[int]:
    return ()


def _unpack(
    rows: Sequence[Row], result: StepResult, batch: StepBatch, *, sampled: Sequence[int], firsts: Sequence[int]
) -> list[RowResult]:
    # The wide arrays stay on the device unless somebody asked for them.
    token_ids = np.asarray(result.sampled.token_ids).tolist()
    top = jax.device_get(result.sampled) if batch.sampling.any_logprobs else None
    prompt = jax.device_get(result.prompt) if batch.any_prompt_logprobs else None
    decode_rows = batch.decode.positions.shape[0]
    out = []
    for row, index, first in zip(rows, sampled, firsts, strict=True):
        token_id = token_ids[index] if index >= 0 else None
        logprobs = None
        wanted = row.sequence.sampling.logprobs
        if token_id is not None and wanted is not None and top is not None:
            logprobs = _entry(token_id, top.logprobs[index], top.top_ids[index], top.top_logprobs[index], wanted)
        scored = () if prompt is None else _prompt_entries(row, prompt, batch, first - decode_rows)
        out.append(RowResult(token_id, logprobs, scored))
    return out


def _entry(token_id: int, logprob: Any, top_ids: np.ndarray, top_logprobs: np.ndarray, wanted: int) -> TokenLogprobs:
    top = tuple(zip(top_ids[:wanted].tolist(), top_logprobs[:wanted].tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprob), top)


def _prompt_entries(row: Row, prompt: PromptLogprobs, batch: StepBatch, slot: int) -> list[TokenLogprobs]:
    """Entries for the prompt tokens at positions start + 1 .. start + count."""
    wanted = row.sequence.sampling.prompt_logprobs
    if row.decode or wanted is None:
        return []
    count = min(row.count, len(row.sequence.prompt_ids) - row.start - 1)
    return [
        _entry(int(batch.prompt_targets[i]), prompt.logprobs[i], prompt.top_ids[i], prompt.top_logprobs[i], wanted)
        for i in range(slot, slot + max(count, 0))
    ]
