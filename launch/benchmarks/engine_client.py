"""Requests to an engine in this process: its background thread steps, one asyncio loop takes the pieces.

That is how the server uses the engine too; what is left out is HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np

from launch.benchmarks.case import ThroughputCase, split_names
from launch.benchmarks.measurement import Job, RequestRecord, answer_all
from launch.benchmarks.synthetic import ALL_LINEAR, needed_adapter_mb, synthetic_adapter
from launch.console import StageLog
from launch.flags import StartError
from plora_jax.adapters import Adapter, load_adapter
from plora_jax.checkpoints import load_config
from plora_jax.config import ModelConfig
from plora_jax.engine.build import Deployment, EngineConfig, build_engine, page_layout
from plora_jax.engine.compile import counter
from plora_jax.engine.engine import Engine
from plora_jax.engine.errors import GenerationFailedError
from plora_jax.engine.params import SamplingParams
from plora_jax.parallel import TensorParallel


class EngineTarget:
    """A started engine that answers jobs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, jobs: Sequence[Job], *, concurrency: int | None) -> list[RequestRecord]:
        """As `Target.run`.

        Raises:
            RequestError: a job does not fit the model.
            GenerationFailedError: the engine could not answer one.
        """
        return asyncio.run(answer_all(jobs, concurrency=concurrency or len(jobs), answer=self._run_one))

    def compilations(self) -> int:
        return counter.count

    def preemptions(self) -> int:
        return self._engine.stats().preemptions

    async def _run_one(self, job: Job, sent_s: float) -> RequestRecord:
        sampling = SamplingParams(temperature=0.0, max_tokens=job.new_tokens, ignore_eos=True)
        piece_s: list[float] = []
        tokens = 0
        generation = self._engine.submit(job.prompt_ids, sampling, adapter=job.model)
        async for delta in generation:
            if delta.finish_reason in ("error", "abort"):
                raise GenerationFailedError(delta.error or "the engine gave a request up")
            piece_s.append(time.perf_counter())
            tokens += len(delta.token_ids)
        return RequestRecord(len(job.prompt_ids), tokens, sent_s, piece_s)


@contextlib.contextmanager
def running_engine(case: ThroughputCase, engine: EngineConfig, log: StageLog) -> Iterator[Deployment]:
    """An engine that holds the adapters of a case, started.

    Args:
        case: says which adapters, and how much device memory for them.
        engine: everything else.
        log: told how far the start is.

    Raises:
        StartError: the model, the adapters or the limits cannot be.
    """
    try:
        model = load_config(engine.model)
        adapters = CaseAdapters(case, model)
        config = adapters.fit(engine)
        deployment = build_engine(config, progress=log)
        deployment.wait_until_settled()
        log.end()
        adapters.put_into(deployment.engine, log)
    except (ValueError, OSError) as error:
        raise StartError(str(error)) from error
    finally:
        log.end()
    if case.trace is None:
        _check_context(case, deployment)
    deployment.engine.start()
    try:
        yield deployment
    finally:
        deployment.engine.shutdown()


def _check_context(case: ThroughputCase, deployment: Deployment) -> None:
    needed, holds = case.prompt_tokens + case.new_tokens, deployment.engine.max_model_len
    if needed > holds:
        raise StartError(
            f"--prompt_tokens {case.prompt_tokens} and --new_tokens {case.new_tokens} are {needed} tokens, and a "
            f"sequence holds {holds}: lower them, or raise --max_model_len and --pool_memory_gb as far as the model "
            "goes"
        )


class CaseAdapters:
    """The adapters of a case: read from disk at once, or made one by one, for many of them fill the memory.

    Args:
        case: says which.
        model: the base model that they are for.

    Raises:
        StartError: targets that the model has not, or two directories of one name.
        FileNotFoundError, AdapterError: a directory that cannot be served.
    """

    def __init__(self, case: ThroughputCase, model: ModelConfig) -> None:
        self._case, self._model = case, model
        self._targets = targets_of(case, model)
        self._read = [load_adapter(path, name=path.resolve().name, config=model) for path in case.directories]
        names = [adapter.name for adapter in self._read]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise StartError(f"--adapter_dirs names {twice[0]!r} twice: each directory needs a name of its own")
        self._ranks = [adapter.max_rank for adapter in self._read] or case.ranks

    def fit(self, engine: EngineConfig) -> EngineConfig:
        """The engine's configuration with room for all adapters and requests of the case."""
        case = self._case
        parallel = TensorParallel(self._model, engine.tensor_parallel_size)
        wide = engine.dtype == "float32" or (engine.dtype == "auto" and self._model.dtype == "float32")
        # bfloat16 and float16 pages are of one size.
        dtype = np.dtype(np.float32 if wide else np.float16)
        layout = page_layout(parallel, engine, dtype=dtype)
        needed = max(engine.device_adapter_mb, needed_adapter_mb(self._ranks_by_name(), layout))
        return dataclasses.replace(
            engine,
            enable_lora=bool(self._ranks) if case.enable_lora is None else case.enable_lora,
            device_adapter_mb=case.device_adapter_mb or needed,
            max_lora_rank=max([engine.max_lora_rank, *self._ranks]),
            max_waiting=max(engine.max_waiting, case.requests),
        )

    def put_into(self, engine: Engine, log: StageLog) -> None:
        """Loads them all into an engine."""
        if not self._ranks:
            return
        log.stage("adapters")
        for number, adapter in enumerate(self._each(), start=1):
            engine.add_adapter(adapter)
            log.advance(number, len(self._ranks))

    def _ranks_by_name(self) -> list[dict[str, int]]:
        """Of each adapter, its rank by projection, the largest of any layer."""
        if not self._read:
            return [dict.fromkeys(self._targets, rank) for rank in self._ranks]
        found: list[dict[str, int]] = [{} for _ in self._read]
        for ranks, adapter in zip(found, self._read, strict=True):
            for (_, name), matrices in adapter.modules.items():
                ranks[name] = max(ranks.get(name, 0), matrices.rank)
        return found

    def _each(self) -> Iterator[Adapter]:
        if self._read:
            yield from self._read
            return
        for index, rank in enumerate(self._ranks):
            yield synthetic_adapter(index, rank=rank, targets=self._targets, config=self._model)


def targets_of(case: ThroughputCase, model: ModelConfig) -> list[str]:
    """Projections of a case's synthetic adapters.

    Raises:
        StartError: the model has no such projection.
    """
    if case.adapter_targets == ALL_LINEAR:
        return list(model.projections)
    names = split_names([case.adapter_targets])
    unknown = [name for name in names if name not in model.projections]
    if unknown or not names:
        known = ", ".join(model.projections)
        raise StartError(
            f"--adapter_targets {case.adapter_targets!r} names no projection of this model: choose from {known}, "
            f"or {ALL_LINEAR}"
        )
    return names
