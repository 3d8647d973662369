"""What a backend can do of what the pool needs, found out by trying it at start.

A tiny near-data function, which gathers pages of raw numbers as all of ours do, is compiled, checked against numpy and
timed. Whatever goes wrong becomes part of the report: a start can then say what is missing instead of failing in its
first step.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from memory_pool import link
from memory_pool.near import near_data
from memory_pool.raw import from_raw

PAGES, WIDTH, TOKENS, CALLS = 8, 64, 8, 20


class Device(Protocol):
    """What the probe asks a JAX device."""

    @property
    def platform(self) -> str: ...

    def addressable_memories(self) -> Sequence[Any]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What was found.

    Attributes:
        platform: of the device: cpu, gpu, tpu, ...
        memory_kinds: that it reaches.
        problem: why near-data functions do not work; None when they do.
        call_s: of a call of the tiny near-data function with its transfers, median; None when it does not work.
    """

    platform: str
    memory_kinds: tuple[str, ...]
    problem: str | None
    call_s: float | None

    @property
    def near_data(self) -> bool:
        """Near-data functions work, and give the right numbers."""
        return self.problem is None

    @property
    def link_is_emulated(self) -> bool:
        """Device and pool are the same memory: bytes over the link are counted, but nothing moves."""
        return self.platform == "cpu"

    def as_text(self) -> str:
        """The report in one line."""
        kinds = ", ".join(self.memory_kinds) or "not told"
        parts = [f"{self.platform}: memory kinds {kinds}"]
        if self.call_s is not None:
            parts.append(f"near-data functions work, {1e6 * self.call_s:.0f} us a call")
        else:
            parts.append(f"near-data functions do not work: {self.problem}")
            parts.append("pages in the pool cannot be read, so only what is on the device serves")
        if self.link_is_emulated:
            parts.append("link bytes are emulated: device and pool are the same memory")
        else:
            parts.append("the link is real" if link.POOL_KIND in self.memory_kinds else "there is no link")
        return "; ".join(parts)


def probe(
    device: Device | None = None, *, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = near_data
) -> ProbeReport:
    """Tries near-data compute on a device. Does not raise: what fails is in the report.

    Args:
        device: by default the first of this process.
        wrap: makes a near-data function of a function.

    Cost:
        One small compilation and some twenty calls, well under a second on a CPU.
    """
    chosen: Device = jax.local_devices()[0] if device is None else device
    kinds: tuple[str, ...] = ()
    call_s = None
    try:
        kinds = tuple(sorted(memory.kind for memory in chosen.addressable_memories()))
        if link.POOL_KIND in kinds:
            call_s = _try(chosen, wrap)
            problem = None
        else:
            problem = f"the backend has no memory kind {link.POOL_KIND}"
    # Backends refuse what they lack by many kinds of errors, some of their own.
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        problem = f"{type(error).__name__}: {said[0]}".removesuffix(": ")
    return ProbeReport(platform=chosen.platform, memory_kinds=kinds, problem=problem, call_s=call_s)


class WrongResultError(ArithmeticError):
    """A near-data function ran and gave other numbers than numpy."""


def _try(device: Device, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> float:
    """Seconds of a call; raises what the backend raises, and WrongResultError."""
    mesh = Mesh(np.array([device]), (link.TENSOR_AXIS,))
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((PAGES, WIDTH)).astype(ml_dtypes.bfloat16)
    x = rng.standard_normal((TOKENS, WIDTH)).astype(np.float32)
    table = np.array([5, 0, 7, 2], np.int32)
    pool = link.store_in_pool(pages.view(np.uint16), mesh)

    def multiply(pool: jax.Array, x: jax.Array, table: jax.Array) -> jax.Array:
        rows = from_raw(pool.at[table].get(mode="promise_in_bounds"), ml_dtypes.bfloat16)
        return jnp.einsum("TW,PW->TP", x, rows.astype(np.float32), precision="highest")

    def step(pool: jax.Array, x: jax.Array, table: jax.Array) -> jax.Array:
        return link.to_device(wrap(multiply)(pool, link.to_pool(x), link.to_pool(table)))

    arguments = (pool, x, table)
    compiled = jax.jit(step).lower(*arguments).compile()
    got, want = np.asarray(compiled(*arguments)), x @ pages[table].astype(np.float32).T
    if got.shape != want.shape or not np.allclose(got, want, rtol=1e-3, atol=1e-3):
        raise WrongResultError("a near-data function gives other numbers than numpy")
    return statistics.median(_timed(compiled, arguments) for _ in range(CALLS))


def _timed(compiled: Callable[..., jax.Array], arguments: Sequence[Any]) -> float:
    started = time.perf_counter()
    compiled(*arguments).block_until_ready()
    return time.perf_counter() - started
