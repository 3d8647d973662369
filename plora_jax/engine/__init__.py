"""Continuous batching: who runs when, what comes of it, and what clients get of that.

A request's way: Engine.submit (checks) -> EngineLoop -> Scheduler (plan) -> Executor (one jitted step) -> TokenStream
(text, stop conditions) -> Generation. Nothing here but executor.py and its parts knows JAX.
"""

from plora_jax.engine.adapter_table import AdapterStatus
from plora_jax.engine.budget import SchedulerConfig
from plora_jax.engine.clock import Clock, SystemClock
from plora_jax.engine.engine import Engine
from plora_jax.engine.errors import (
    AdapterExistsError,
    EngineDeadError,
    GenerationFailedError,
    NoPlanError,
    OverloadedError,
    UnknownAdapterError,
)
from plora_jax.engine.generation import Generation, GenerationTimes, assemble
from plora_jax.engine.outputs import Completion, Delta, TokenLogprobs
from plora_jax.engine.params import RequestError, SamplingParams
from plora_jax.engine.plan import Executor, Row, RowResult, Sequence, StepPlan
from plora_jax.engine.residency import AdapterResidency, AdapterStorage
from plora_jax.engine.scheduler import Scheduler
from plora_jax.engine.stats import EngineStats, Observations

__all__ = [
    "AdapterExistsError",
    "AdapterResidency",
    "AdapterStatus",
    "AdapterStorage",
    "Clock",
    "Completion",
    "Delta",
    "Engine",
    "EngineDeadError",
    "EngineStats",
    "Executor",
    "Generation",
    "GenerationFailedError",
    "GenerationTimes",
    "NoPlanError",
    "Observations",
    "OverloadedError",
    "RequestError",
    "Row",
    "RowResult",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "StepPlan",
    "SystemClock",
    "TokenLogprobs",
    "UnknownAdapterError",
    "assemble",
]
