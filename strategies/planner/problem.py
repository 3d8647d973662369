"""What a planner decides, as arrays, and the one definition of how long a step takes under its decision.

A step is a sequence of phases that wait for one another (qkv, attention, o, ...; a phase's figures are those of all
layers together). Adapters, KV and the base model load RESOURCES in every phase: the device's compute and memory, and
for each of the D pool devices its near-data compute, its memory, and its link in both directions. Resources work side
by side unless a group says that they add up:

    step = sum over phases of (max over groups and pool devices of the group's seconds + what is serial in the phase)

Cost models build a PlanProblem, planners solve it, `evaluate` says what a solution is worth: times are defined here and
nowhere else. Plain Python and numpy, float64 seconds and bytes.

Letters: N adapters, S strategies, F phases, G groups, D pool devices, R = 6 resources, A attention strategies.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from strategies.native import planner_calls
from strategies.native.planner_calls import ProblemView
from strategies.planner.implementation import either

RESOURCES = ("device_flops", "device_memory", "near_flops", "near_memory", "to_pool", "to_device")
DEVICE_RESOURCES = 2
"""The first two exist once, the others once a pool device."""

STRIPED = -1
"""Home of an adapter that lies on all pool devices."""

NOWHERE = -1
"""Current column of an adapter that no strategy serves yet."""

_SLACK = 1e-9
"""Of a budget: sums of bytes in float64 may be off by this."""


class PlanError(ValueError):
    """A problem that cannot be, or that no plan solves; says in one line what to change."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KvChoice:
    """The KV of the running sequences: a fraction P on the device, the rest served by an attention strategy.

    Attributes:
        strategies: names of the A attention strategies.
        phase: index of the phase that attention belongs to.
        device_bytes: of all KV; the fraction P takes P times as many.
        device_load_s: [R], attention over all KV while it is on the device.
        pool_load_s: [A, D, R], attention over all KV while it is in the pool; device columns are read from d = 0.
        pool_serial_s: [A], after everything else of the phase unless P is 1 (the merge).
        current_fraction: P before this plan.
        move_s: link seconds to copy all KV to the device, divided by the horizon in steps. Dropping copies is free.
        adapter_budget_bytes: limit for adapters alone; None: only the joint one.
        kv_budget_bytes: limit for KV alone; None: only the joint one.
        min_fraction: least P, in [0, 1]: pages that are being written are always on the device.
    """

    strategies: tuple[str, ...]
    phase: int
    device_bytes: float
    device_load_s: np.ndarray
    pool_load_s: np.ndarray
    pool_serial_s: np.ndarray
    current_fraction: float = 0.0
    move_s: float = 0.0
    adapter_budget_bytes: float | None = None
    kv_budget_bytes: float | None = None
    min_fraction: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PlanProblem:
    """Who can be served how, what it costs, and what fits.

    Attributes:
        strategies: S names of LoRA strategies: the columns.
        phases: F names.
        groups: names of resources that add up; every resource is in exactly one group.
        pool_shared: the D pool devices are one and the same: their loads add up too.
        load_s: [N, S, F, R] seconds of each resource; near and link columns load the adapter's home.
        serial_s: [N, S, F] seconds after everything else of the phase (the expand of `split`).
        home: [N] int, pool device of the adapter; STRIPED: each of the D devices gets `load_s`.
        fixed_load_s: [S, F, R], once a phase when an active adapter uses the strategy (launches, latency); near and
            link columns load every pool device.
        fixed_serial_s: [S, F], the same for what is serial.
        base_load_s: [F, D, R], base model and the rest; device columns are read from pool device 0.
        base_serial_s: [F].
        device_bytes: [N, S], device memory that the strategy needs for the adapter.
        allowed: [N, S] bool; at least one a row.
        active: [N] bool: has tokens in the coming steps. Idle adapters have expected loads, which may be 0.
        current: [N] int, column that serves it, or NOWHERE.
        move_s: [N, S] link seconds to get there from the current state, divided by the horizon in steps.
        budget_bytes: device memory for adapters and KV together.
        kv: the choice for KV.

    Raises:
        PlanError: shapes do not fit, a group is wrong, or an adapter may use no strategy.
    """

    strategies: tuple[str, ...]
    phases: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    pool_shared: bool
    load_s: np.ndarray
    serial_s: np.ndarray
    home: np.ndarray
    fixed_load_s: np.ndarray
    fixed_serial_s: np.ndarray
    base_load_s: np.ndarray
    base_serial_s: np.ndarray
    device_bytes: np.ndarray
    allowed: np.ndarray
    active: np.ndarray
    current: np.ndarray
    move_s: np.ndarray
    budget_bytes: float
    kv: KvChoice

    def __post_init__(self) -> None:
        if sorted(name for group in self.groups for name in group) != sorted(RESOURCES):
            raise PlanError(f"groups {self.groups} must have each of {', '.join(RESOURCES)} exactly once")
        n, s, f, d, r = len(self.home), len(self.strategies), len(self.phases), self.num_pool_devices, len(RESOURCES)
        a = len(self.kv.strategies)
        shapes = {
            "load_s": (n, s, f, r),
            "serial_s": (n, s, f),
            "fixed_load_s": (s, f, r),
            "fixed_serial_s": (s, f),
            "base_load_s": (f, d, r),
            "base_serial_s": (f,),
            "device_bytes": (n, s),
            "allowed": (n, s),
            "active": (n,),
            "current": (n,),
            "move_s": (n, s),
        }
        kv_shapes = {"device_load_s": (r,), "pool_load_s": (a, d, r), "pool_serial_s": (a,)}
        for owner, table in ((self, shapes), (self.kv, kv_shapes)):
            for name, shape in table.items():
                if np.shape(getattr(owner, name)) != shape:
                    raise PlanError(f"{name} has shape {np.shape(getattr(owner, name))}, it must be {shape}")
        if n and not self.allowed.any(axis=1).all():
            raise PlanError(f"adapter {int(self.allowed.any(axis=1).argmin())} may use no strategy: allow at least one")

    @property
    def num_adapters(self) -> int:
        return len(self.home)

    @property
    def num_pool_devices(self) -> int:
        """D."""
        return self.base_load_s.shape[1]

    @functools.cached_property
    def view(self) -> ProblemView:
        """What native functions see of it."""
        return planner_calls.view_of_problem(self)

    @functools.cached_property
    def group_matrix(self) -> np.ndarray:
        """[R, G], 1 where the resource is in the group."""
        return np.array([[float(name in group) for group in self.groups] for name in RESOURCES])

    @functools.cached_property
    def loaded(self) -> np.ndarray:
        """[M] rows that load anything in any column: idle adapters that nobody expects do not."""
        n, (s, f, r) = len(self.home), self.load_s.shape[1:]
        load, serial = self.load_s.reshape(n, s * f * r), self.serial_s.reshape(n, s * f)
        return np.flatnonzero(load @ np.ones(s * f * r) + serial @ np.ones(s * f))

    @functools.cached_property
    def adapter_budget_bytes(self) -> float:
        """Device memory that adapters can have at all: the rest belongs to the KV that must be there."""
        rest = self.budget_bytes - self.kv.min_fraction * self.kv.device_bytes
        return min(rest, np.inf if self.kv.adapter_budget_bytes is None else self.kv.adapter_budget_bytes)

    def max_fraction(self, adapter_bytes: float) -> float:
        """Largest P that fits beside adapters of so many bytes; below `kv.min_fraction` when they do not fit."""
        if self.kv.device_bytes <= 0:
            return 1.0
        room = min(
            self.budget_bytes - adapter_bytes, np.inf if self.kv.kv_budget_bytes is None else self.kv.kv_budget_bytes
        )
        fraction = room / self.kv.device_bytes
        if fraction < self.kv.min_fraction and room >= self.kv.min_fraction * self.kv.device_bytes - self.slack_bytes:
            return self.kv.min_fraction
        return min(1.0, fraction)

    @property
    def slack_bytes(self) -> float:
        """What sums of bytes may be off by."""
        return _SLACK * max(1.0, self.budget_bytes)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """A decision and what it is worth.

    Attributes:
        strategy: [N] int8, column of each adapter.
        attention: name of the attention strategy for KV that is not on the device.
        kv_fraction: P.
        step_s: predicted time of a step.
        objective_s: the same plus the cost of the moves: what planners minimise.
        device_bytes: of adapters and KV.
        phase_s: [F], their sum is `step_s`.
        bottleneck: the group that each phase waits for, with its pool device if it has one: "near_flops@2".
    """

    strategy: np.ndarray
    attention: str
    kv_fraction: float
    step_s: float
    objective_s: float
    device_bytes: float
    phase_s: np.ndarray
    bottleneck: tuple[str, ...]


@either(planner_calls.chosen)
def chosen(problem: PlanProblem, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """What rows [M] take in their columns [M].

    Returns:
        loads: [D + 1, F, R] seconds by home, the last: of striped rows.
        serial: [F] seconds.
        bytes, move_s: of all.
    """
    num_pool, (s, f, r) = problem.num_pool_devices, problem.load_s.shape[1:]
    at, home = rows * s + columns, problem.home[rows]
    at_home = (np.where(home == STRIPED, num_pool, home) == np.arange(num_pool + 1)[:, None]).astype(float)
    loads = (at_home @ problem.load_s.reshape(-1, f * r).take(at, axis=0)).reshape(num_pool + 1, f, r)
    serial = problem.serial_s.reshape(-1, f).take(at, axis=0).sum(axis=0)
    return loads, serial, float(problem.device_bytes.take(at).sum()), float(problem.move_s.take(at).sum())


def resource_loads(
    problem: PlanProblem, strategy: np.ndarray, *, attention: str, kv_fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds that a decision loads every resource with, before groups.

    Returns:
        loads: [F, D, R] (D is 1 when `pool_shared`), device columns the same for all D.
        serial: [F].
    """
    rows = problem.loaded
    by_home, of_rows, _, _ = chosen(problem, rows, strategy[rows])
    used = np.bincount(strategy[problem.active], minlength=len(problem.strategies)) > 0
    charges = problem.fixed_load_s[used].sum(axis=0)
    serial = problem.base_serial_s + of_rows + problem.fixed_serial_s[used].sum(axis=0)
    loads = problem.base_load_s + (charges + by_home[-1])[:, None] + np.swapaxes(by_home[:-1], 0, 1)
    on_device = problem.base_load_s[:, 0] + charges + by_home.sum(axis=0)
    loads[:, :, :DEVICE_RESOURCES] = on_device[:, None, :DEVICE_RESOURCES]

    kv, index = problem.kv, problem.kv.strategies.index(attention)
    in_pool = kv.pool_load_s[index].copy()
    in_pool[:, :DEVICE_RESOURCES] = in_pool[0, :DEVICE_RESOURCES]
    kv_load = (1 - kv_fraction) * in_pool
    kv_load[:, :DEVICE_RESOURCES] += kv_fraction * kv.device_load_s[:DEVICE_RESOURCES]
    loads[kv.phase] += kv_load
    if kv_fraction < 1:
        serial[kv.phase] += kv.pool_serial_s[index]
    if problem.pool_shared:
        loads[:, 0, DEVICE_RESOURCES:] = loads[:, :, DEVICE_RESOURCES:].sum(axis=1)
        loads = loads[:, :1]
    return loads, serial


def evaluate(problem: PlanProblem, strategy: np.ndarray, attention: str, kv_fraction: float) -> Plan:
    """What a decision is worth; it need not be allowed or fit (see `violations`).

    Args:
        problem: what is decided.
        strategy: [N] int, column of each adapter.
        attention: one of the problem's attention strategies.
        kv_fraction: P, in [0, 1].
    """
    loads, serial = resource_loads(problem, strategy, attention=attention, kv_fraction=kv_fraction)
    by_group = loads @ problem.group_matrix
    num_phases, num_pool, num_groups = by_group.shape
    flat = by_group.reshape(num_phases, num_pool * num_groups)
    worst = flat.argmax(axis=1)
    phase_s = flat.max(axis=1) + serial
    names = _names(problem.groups, num_pool, apart=not problem.pool_shared)
    at = np.arange(problem.num_adapters) * len(problem.strategies) + strategy
    kv = problem.kv
    step_s = float(phase_s.sum())
    moved = float(problem.move_s.take(at).sum()) + kv.move_s * max(0.0, kv_fraction - kv.current_fraction)
    return Plan(
        strategy=np.asarray(strategy, dtype=np.int8),
        attention=attention,
        kv_fraction=float(kv_fraction),
        step_s=step_s,
        objective_s=step_s + moved,
        device_bytes=float(problem.device_bytes.take(at).sum()) + kv_fraction * kv.device_bytes,
        phase_s=phase_s,
        bottleneck=tuple(names[place] for place in worst.tolist()),
    )


@functools.lru_cache(maxsize=64)
def _names(groups: tuple[tuple[str, ...], ...], num_pool: int, *, apart: bool) -> list[str]:
    """Names of all groups, those of each pool device after those of the one before it."""
    in_pool = [any(RESOURCES.index(name) >= DEVICE_RESOURCES for name in names) for names in groups]
    return [
        "+".join(names) + (f"@{device}" if pool and apart else "")
        for device in range(num_pool)
        for names, pool in zip(groups, in_pool, strict=True)
    ]


def violations(problem: PlanProblem, plan: Plan) -> list[str]:
    """Why a plan cannot be carried out, one line each; empty if it can."""
    found = []
    kv, rows = problem.kv, np.arange(problem.num_adapters)
    if problem.num_adapters and not (fine := problem.allowed[rows, plan.strategy]).all():
        row = int(fine.argmin())
        found.append(f"adapter {row} may not use {problem.strategies[plan.strategy[row]]}")
    adapter_bytes = float(problem.device_bytes[rows, plan.strategy].sum())
    kv_bytes = plan.kv_fraction * kv.device_bytes
    limits = (
        ("adapters and KV", adapter_bytes + kv_bytes, problem.budget_bytes),
        ("adapters", adapter_bytes, kv.adapter_budget_bytes),
        ("KV", kv_bytes, kv.kv_budget_bytes),
    )
    for what, used, limit in limits:
        if limit is not None and used > limit + _SLACK * max(1.0, limit):
            found.append(f"{what} take {used:.0f} bytes of the device, {limit:.0f} are allowed")
    if not kv.min_fraction - _SLACK <= plan.kv_fraction <= 1:
        found.append(f"KV fraction {plan.kv_fraction} is not between {kv.min_fraction} and 1")
    return found
