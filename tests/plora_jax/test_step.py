"""The step as a program: what it moves, and that it holds no weights."""

import jax
import numpy as np

from memory_pool import audit
from plora_jax.engine.batch import build_batch
from plora_jax.engine.plan import StepPlan
from plora_jax.engine.step import StepStrategies, make_step
from tests.plora_jax.conformance import deploy


def test_step_with_resident_and_local_moves_nothing_over_the_link():
    built = deploy("gemma2")
    executor = built.executor
    step = make_step(built.model, np.float32, StepStrategies("resident", "local", executor.kernels))
    for bucket in executor._buckets:
        batch, _, _ = build_batch(StepPlan(()), bucket, executor._shape, slots_of=lambda _: ())
        assert audit(step, executor._params, executor._pages, executor._rows(), batch) == (0, 0, 0)


def test_step_closes_over_no_large_constant():
    built = deploy("llama")
    executor = built.executor
    step = make_step(built.model, np.float32, StepStrategies("resident", "local", executor.kernels))
    batch, _, _ = build_batch(StepPlan(()), executor._buckets[-1], executor._shape, slots_of=lambda _: ())
    closed = jax.make_jaxpr(step)(executor._params, executor._pages, executor._rows(), batch)
    assert sum(np.asarray(c).nbytes for c in closed.consts) < 4096
