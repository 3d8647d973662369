"""What a backend can do of what the pool needs, found out by trying it at start.

A tiny near-data function, which gathers pages of raw numbers as all of ours do, is compiled, checked against numpy and
timed. Where it does not work, copies of single blocks out of the pool and into it are tried: they compute nothing
there. Whatever goes wrong becomes part of the report: a start can then say what is missing instead of failing in its
first step.
"""

from __future__ import annotations

import dataclasses
import os
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
        emulation: why the pool is in device memory, where near-data functions run on the device; None when it is not.
        no_copies: why blocks of pool arrays cannot be copied either; None when they can, or near-data functions work.
    """

    platform: str
    memory_kinds: tuple[str, ...]
    problem: str | None
    call_s: float | None
    emulation: str | None = None
    no_copies: str | None = None

    @property
    def near_data(self) -> bool:
        """Near-data functions work, and give the right numbers."""
        return self.problem is None

    @property
    def reads_pool(self) -> bool:
        """The device gets at what is in the pool, by near-data functions or by copies of blocks."""
        return self.near_data or self.no_copies is None

    @property
    def link_is_emulated(self) -> bool:
        """Device and pool are the same memory: bytes over the link are counted, but nothing moves."""
        return self.platform == "cpu" or self.emulation is not None

    def as_text(self) -> str:
        """The report in one line."""
        kinds = ", ".join(self.memory_kinds) or "not told"
        parts = [f"{self.platform}: memory kinds {kinds}"]
        if self.emulation:
            parts.append(
                f"the pool is emulated ({self.emulation}): pool and device are the same memory: link bytes are "
                "counted, nothing moves"
            )
        if self.call_s is not None:
            how = "run on the device" if self.emulation else "work"
            parts.append(f"near-data functions {how}, {1e6 * self.call_s:.0f} us a call")
        else:
            parts.append(f"near-data functions do not work: {self.problem}")
            if self.reads_pool:
                parts.append("what is in the pool is copied to the device block by block, and all is computed there")
            else:
                parts.append(f"nor can what is in the pool be copied to the device: {self.no_copies}")
        if not self.emulation:
            emulated = "link bytes are emulated: device and pool are the same memory"
            parts.append(emulated if self.link_is_emulated else "the link is real")
        return "; ".join(parts)


class WrongResultError(ArithmeticError):
    """Something ran and gave other numbers than numpy."""


def try_near_data(device: Device, *, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = near_data) -> float:
    """Runs a tiny near-data function on a device, unless PLORA_NEAR_DATA=0 says that it has none.

    Args:
        device: of JAX.
        wrap: makes a near-data function of a function.

    Returns:
        Seconds of a call, median.

    Raises:
        NotImplementedError: PLORA_NEAR_DATA=0.
        WrongResultError: it ran and gave other numbers than numpy.
        Exception: whatever the backend raises.
    """
    if os.environ.get("PLORA_NEAR_DATA", "1") == "0":
        raise NotImplementedError("switched off by PLORA_NEAR_DATA=0")
    mesh, pages = _pages(device)
    x = np.random.default_rng(1).standard_normal((TOKENS, WIDTH)).astype(np.float32)
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


def try_copies(device: Device) -> None:
    """Writes a block into a pool array on a device and reads another in a loop, by copies alone.

    Raises:
        WrongResultError: other numbers came back than were written.
        Exception: whatever the backend raises.
    """
    mesh, pages = _pages(device)
    bits = pages.view(np.uint16)
    pool = link.store_in_pool(bits, mesh)

    def write(pool: jax.Array, block: jax.Array, page: jax.Array) -> jax.Array:
        return link.write_block(pool, block, (page, 0))

    def read(pool: jax.Array, table: jax.Array) -> jax.Array:
        return jax.lax.map(lambda page: link.read_block(pool, (page, 0), (1, WIDTH))[0], table)

    table = np.array([3, 6, 1], np.int32)
    arguments = (pool, bits[:1], np.int32(6))
    written = jax.jit(write, donate_argnums=0).lower(*arguments).compile()(*arguments)
    got = np.asarray(jax.jit(read).lower(written, table).compile()(written, table))
    if not np.array_equal(got, bits[[3, 0, 1]]):
        raise WrongResultError("a block that was copied into the pool comes back as other numbers")


def probe(
    device: Device | None = None,
    *,
    near: Callable[[Device], float] = try_near_data,
    copies: Callable[[Device], None] = try_copies,
) -> ProbeReport:
    """Tries a device. Does not raise: what fails is in the report.

    Args:
        device: by default the first of this process.
        near: tries near-data functions; returns seconds of a call.
        copies: tries copies of blocks, where near-data functions do not work.

    Cost:
        One small compilation and some twenty calls, well under a second on a CPU.
    """
    chosen: Device = jax.local_devices()[0] if device is None else device
    kinds: tuple[str, ...] = ()
    call_s = problem = no_copies = None
    # Backends refuse what they lack by many kinds of errors, some of their own.
    try:
        kinds = tuple(sorted(memory.kind for memory in chosen.addressable_memories()))
        call_s = near(chosen)
    except Exception as error:
        problem = _said(error)
    if problem is not None:
        try:
            copies(chosen)
        except Exception as error:
            no_copies = _said(error)
    return ProbeReport(
        platform=chosen.platform,
        memory_kinds=kinds,
        problem=problem,
        call_s=call_s,
        emulation=link.emulation(kinds),
        no_copies=no_copies,
    )


def _said(error: Exception) -> str:
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}".removesuffix(": ")


def _pages(device: Device) -> tuple[Mesh, np.ndarray]:
    """A mesh of the device, and pages of numbers, [PAGES, WIDTH] bfloat16."""
    pages = np.random.default_rng(0).standard_normal((PAGES, WIDTH)).astype(ml_dtypes.bfloat16)
    return Mesh(np.array([device]), (link.TENSOR_AXIS,)), pages


def _timed(compiled: Callable[..., jax.Array], arguments: Sequence[Any]) -> float:
    started = time.perf_counter()
    compiled(*arguments).block_until_ready()
    return time.perf_counter() - started
