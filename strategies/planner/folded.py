"""A planning problem as the optimizer computes with it: rows that need a decision, places that can matter, sums.

A place is a group on a pool device in a phase. Most can never be the longest of their phase, whatever is decided: only
the K others are kept, so a decision of a thousand adapters is a sum of a thousand rows of K numbers. Rows that are idle
and expected to stay so take no part: they get a strategy that takes nothing of them, and what they have on the device
stays there as far as the plan of the others leaves room. Rows whose strategy is settled are part of the base.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from strategies.native import planner_calls
from strategies.native.planner_calls import FoldedView
from strategies.planner.implementation import either
from strategies.planner.problem import DEVICE_RESOURCES, RESOURCES, STRIPED, PlanProblem, chosen

_TIE = 1e-9
"""Of the base step: what decides between columns that cost the same (stay, then few bytes)."""

_ROUNDING_BYTES = 1e-5
"""Running sums of bytes may be off by this."""


class Layout(NamedTuple):
    """How loads of resources become loads of all P places of one structure of problems.

    Attributes:
        device: [F * R, P], resources of the device.
        pool: [F * R, P], resources of pool devices.
        here: [H, P], how often work at a home (the last: striped) loads the place's pool device; 1 for places that
            have device resources alone.
        exists: [P] bool; groups without pool resources count on pool device 0 alone.
        phase: [P]; starts: [F], where each begins.
    """

    device: np.ndarray
    pool: np.ndarray
    here: np.ndarray
    exists: np.ndarray
    phase: np.ndarray
    starts: np.ndarray

    def places(self, sums: np.ndarray) -> np.ndarray:
        """Sums by home [..., H, F * R] as loads of places [..., P]."""
        return sums.sum(axis=-2) @ self.device + ((sums @ self.pool) * self.here).sum(axis=-2)

    def work(self, load: np.ndarray, rows: np.ndarray, home: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Loads of some rows [M] of all [N, S, F * R] as loads of some places [M, S, K]."""
        return work_at_places(load, rows, home, self.device[:, keep], self.pool[:, keep], self.here[:, keep])


@either(planner_calls.work_at_places)
def work_at_places(
    load: np.ndarray, rows: np.ndarray, home: np.ndarray, device: np.ndarray, pool: np.ndarray, here: np.ndarray
) -> np.ndarray:
    """[M, S, K] from rows [M] of loads [N, S, F * R], their homes [M], and the matrices of K places of a `Layout`."""
    load = load.take(rows, axis=0)
    flat, shape = load.reshape(-1, load.shape[-1]), (*load.shape[:2], here.shape[1])
    return (flat @ pool).reshape(shape) * here[home][:, None, :] + (flat @ device).reshape(shape)


@either(planner_calls.extremes)
def extremes(
    load: np.ndarray, rows: np.ndarray, home: np.ndarray, homes: int, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sums by home [H, F * R] of the most, and of the least, that some rows load in columns that they may have.

    Args:
        load: [N, S, F * R].
        rows: [M], those that count.
        home: [M] of these.
        homes: H.
        allowed: [M, S].
    """
    load = load.take(rows, axis=0)
    at_home = (home == np.arange(homes)[:, None]).astype(float)
    open_ = allowed[..., None]
    highest, lowest = (load * open_).max(axis=1), np.where(open_, load, np.inf).min(axis=1)
    return at_home @ highest, at_home @ lowest


@functools.lru_cache(maxsize=64)
def _layout(num_phases: int, num_pool: int, groups: tuple[tuple[str, ...], ...], *, pool_shared: bool) -> Layout:
    matrix = np.array([[float(name in group) for group in groups] for name in RESOURCES])
    on_device = np.arange(len(RESOURCES))[:, None] < DEVICE_RESOURCES
    spread = np.vstack([np.eye(num_pool), np.ones((1, num_pool))])
    spread = spread.sum(axis=1, keepdims=True) if pool_shared else spread
    parts = spread.shape[1]

    def by_phase(of_resource: np.ndarray) -> np.ndarray:
        return np.kron(np.eye(num_phases), np.tile(of_resource, parts))

    first = np.repeat(np.arange(parts) == 0, len(groups))
    in_pool = (matrix * ~on_device).any(axis=0)
    here = np.where(np.tile(in_pool, parts), np.repeat(spread, len(groups), axis=1), 1.0)
    return Layout(
        by_phase(matrix * on_device),
        by_phase(matrix * ~on_device),
        np.tile(here, num_phases),
        np.tile(first | np.tile(in_pool, parts), num_phases),
        np.repeat(np.arange(num_phases), parts * len(groups)),
        np.arange(num_phases) * (parts * len(groups)),
    )


@either(planner_calls.least_sums)
def least_sums(values: np.ndarray, active: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """[U] sums over rows of the least of values [M, S] in each of the sets [U, S] of columns, in any if not active."""
    acting, idle = values[active].T, values[~active].min(axis=1).sum()
    return np.array([acting[columns].min(axis=0, initial=np.inf).sum() + idle for columns in sets])


@either(planner_calls.own)
def own(problem: PlanProblem, rows: np.ndarray, tie: float, tie_byte: float) -> np.ndarray:
    """[M, S] seconds of rows that no other choice changes, and what decides ties; inf where not allowed.

    Args:
        problem: where rows [M] are from.
        rows: [M].
        tie: seconds less where a row stays.
        tie_byte: seconds a byte more.
    """
    serial, current = problem.serial_s.take(rows, axis=0), problem.current.take(rows)
    seconds = serial @ np.ones(serial.shape[-1]) + problem.move_s.take(rows, axis=0)
    seconds += tie_byte * problem.device_bytes.take(rows, axis=0)
    stays = np.flatnonzero(current >= 0)
    seconds[stays, current[stays]] -= tie
    seconds[~problem.allowed.take(rows, axis=0)] = np.inf
    return seconds


class Folded:
    """Arrays derived from a PlanProblem; read-only after construction.

    Args:
        problem: where they come from.
        rest: [N] columns of rows that take no part; None: one that takes no memory and no move.
        settled: rows whose columns are known, and these; none where None.
        fold_idle: rows that nobody expects take no part; False: all rows are live.

    Attributes:
        live: [M], rows of the problem that are decided; all others below are by this order.
        rows: [M], 0 to M - 1.
        work: [M, S, K] seconds that a choice loads places with.
        own: [M, S] seconds that no other choice changes: serial time and moves; inf where not allowed.
        allowed, bytes: [M, S].
        active, home: [M].
        budget_bytes: for adapters and KV, without the bytes of rows that are not decided.
        adapter_budget_bytes: the most that adapters can have of it.
        adapter_limit_bytes: of the limit for adapters alone; None: there is none.
        slack_bytes: what running sums of bytes may be off by.
        rest_bytes: of rows that are not decided.
        most_kv: P at most, if there is room.
        keep: [K] places among all of them.
        starts: [F], where each phase begins among the K; `phase_of` [K] is the same by place.
        kv_places: those of attention's phase, a slice of the K.
        base: [K].
        fixed: [S, K] and fixed_serial: [S], while an active adapter uses the column.
        kv_device: [K], kv_pool: [A, K]; 0 but in the phase of attention.
        serial_s: of the base, and all that settled rows take besides loads.
    """

    def __init__(
        self,
        problem: PlanProblem,
        rest: np.ndarray | None = None,
        *,
        settled: tuple[np.ndarray, np.ndarray] | None = None,
        fold_idle: bool = True,
    ) -> None:
        self.problem = problem
        dormant, column = _dormant(problem)
        self._rest = np.full(len(dormant), column) if rest is None else rest.copy()
        dormant &= fold_idle
        self._dormant = np.flatnonzero(dormant)
        self._settled, columns = (np.zeros(0, int), 0) if settled is None else settled
        self._rest[self._settled], dormant[self._settled] = columns, True
        self.live = np.flatnonzero(~dormant)
        n, s = len(self.live), problem.load_s.shape[1]
        self.num_columns, self.rows = s, np.arange(n)
        everyone = n == len(dormant)

        def of_live(values: np.ndarray) -> np.ndarray:
            return values if everyone else values.take(self.live, axis=0)

        self.allowed, self.bytes = of_live(problem.allowed), of_live(problem.device_bytes)
        self.active, home = of_live(problem.active), of_live(problem.home)
        d = problem.num_pool_devices
        self.home = np.where(home == STRIPED, d, home)
        loads, serial, bytes_, move_s = chosen(problem, self._settled, self._rest[self._settled])
        self._budgets(bytes_)
        self.fixed_serial = problem.fixed_serial_s.sum(axis=1)
        self.serial_s = float(problem.base_serial_s.sum() + serial.sum()) + move_s
        tie = _TIE * (float(problem.base_load_s.max(axis=(1, 2)).sum()) + self.serial_s)
        self.own = own(problem, self.live, tie, tie / max(float(self.bytes.max(initial=0.0)), 1.0))
        self._places(layout_of(problem), loads)
        self.has_fixed = bool(self.fixed.any() or self.fixed_serial.any())

    def _budgets(self, settled_bytes: float) -> None:
        problem, kv = self.problem, self.problem.kv
        dormant = self._dormant
        self.rest_bytes = settled_bytes + float(problem.device_bytes[dormant, self._rest[dormant]].sum())
        self.budget_bytes = problem.budget_bytes - self.rest_bytes
        self.most_kv = 1.0
        if kv.kv_budget_bytes is not None and kv.device_bytes > 0:
            self.most_kv = max(kv.min_fraction, min(1.0, kv.kv_budget_bytes / kv.device_bytes))
        self.adapter_budget_bytes = problem.adapter_budget_bytes - self.rest_bytes
        self.slack_bytes = _ROUNDING_BYTES + 1e-10 * problem.budget_bytes
        own_limit = kv.adapter_budget_bytes
        self.adapter_limit_bytes = None if own_limit is None else own_limit - self.rest_bytes

    def _places(self, layout: Layout, settled: np.ndarray) -> None:
        """Everything by place, of those that can be the longest of their phase; `settled` [D + 1, F, R] are loads."""
        problem, kv = self.problem, self.problem.kv
        s, num_kv, d = self.num_columns, len(kv.strategies), problem.num_pool_devices
        f, r = len(problem.phases), len(RESOURCES)
        load = problem.load_s.reshape(-1, s, f * r)
        sums = np.zeros((s + num_kv + 4, d + 1, f, r))
        sums[:s, d] = problem.fixed_load_s
        by_device = np.swapaxes(problem.base_load_s, 0, 1)
        sums[s, :d, :, DEVICE_RESOURCES:] = by_device[..., DEVICE_RESOURCES:]
        sums[s, 0, :, :DEVICE_RESOURCES] = by_device[0, :, :DEVICE_RESOURCES]
        sums[s] += settled
        sums[s + 1, d, kv.phase, :DEVICE_RESOURCES] = kv.device_load_s[:DEVICE_RESOURCES]
        sums[s + 2 : -2, :d, kv.phase, DEVICE_RESOURCES:] = kv.pool_load_s[..., DEVICE_RESOURCES:]
        sums[s + 2 : -2, 0, kv.phase, :DEVICE_RESOURCES] = kv.pool_load_s[:, 0, :DEVICE_RESOURCES]
        highest, lowest = extremes(load, self.live, self.home, d + 1, self.allowed)
        sums[-2], sums[-1] = highest.reshape(d + 1, f, r), lowest.reshape(d + 1, f, r)
        loads = layout.places(sums.reshape(len(sums), d + 1, f * r))
        self.keep = that_matter(loads, layout.exists, layout.starts, s)
        loads = np.ascontiguousarray(loads[:, self.keep])
        self.fixed, self.base, self.kv_device, self.kv_pool = loads[:s], loads[s], loads[s + 1], loads[s + 2 : -2]
        self.phase_of = layout.phase[self.keep]
        self.starts = np.searchsorted(self.phase_of, np.arange(f))
        ends = np.append(self.starts, len(self.keep))
        self.kv_places = slice(int(ends[kv.phase]), int(ends[kv.phase + 1]))
        self.work = layout.work(load, self.live, self.home, self.keep)

    @functools.cached_property
    def by_home(self) -> np.ndarray:
        """[M] ranks of rows: neighbours have one home, and are about as large."""
        ranks = np.empty(len(self.rows))
        ranks[np.lexsort((self.own.min(axis=1) + self.bytes.sum(axis=1), self.home))] = self.rows
        return ranks

    @functools.cached_property
    def most_bytes(self) -> float:
        """Of all rows in their largest columns."""
        return float(np.ascontiguousarray(self.bytes.T).max(axis=0, initial=0.0).sum())

    @functools.cached_property
    def view(self) -> FoldedView:
        """What native functions see of it."""
        return planner_calls.view_of(self)

    def fraction(self, adapter_bytes, wanted: float):
        """P beside adapters of so many bytes, `wanted` at most; for any shape."""
        kv = self.problem.kv
        if kv.device_bytes <= 0:
            return np.full(np.shape(adapter_bytes), wanted)
        room = (self.budget_bytes - adapter_bytes) / kv.device_bytes
        return np.minimum(np.maximum(room, kv.min_fraction), max(wanted, kv.min_fraction))

    def costs(self, prices: np.ndarray) -> np.ndarray:
        """[M, S] seconds of every choice when a second of load on a place costs `prices` [K]; inf: not allowed."""
        return self.work @ prices + self.own

    def longest(self, loads: np.ndarray) -> np.ndarray:
        """Loads [..., K] as the sum over phases of the longest place, [...]."""
        return np.maximum.reduceat(loads, self.starts, axis=-1).sum(axis=-1)

    def soft_longest(self, loads: np.ndarray, rate: float) -> np.ndarray:
        """The same where places near the longest count, within 1 / `rate` seconds of it."""
        longest = np.maximum.reduceat(loads, self.starts, axis=-1)
        above = np.exp(rate * (loads - longest[..., self.phase_of]))
        return longest.sum(axis=-1) + np.log(np.add.reduceat(above, self.starts, axis=-1)).sum(axis=-1) / rate

    def all_columns(self, columns: np.ndarray, kv_bytes: float) -> np.ndarray:
        """[N] columns of all rows of the problem; idle ones stay where they are as far as there is room.

        Args:
            columns: [M] of live rows.
            kv_bytes: of KV on the device.
        """
        out = self._rest.copy()
        out[self.live] = columns
        rest, problem = self._dormant, self.problem
        current = problem.current[rest]
        stays = (current >= 0) & (current != self._rest[rest]) & problem.allowed[rest, current]
        rest, current = rest[stays], current[stays]
        if len(rest):
            used = float(self.bytes[self.rows, columns].sum())
            room = self.budget_bytes - used - kv_bytes
            if self.adapter_limit_bytes is not None:
                room = min(room, self.adapter_limit_bytes - used)
            more = problem.device_bytes[rest, current] - problem.device_bytes[rest, self._rest[rest]]
            order = np.argsort(more, kind="stable")
            fitting = order[: int(np.searchsorted(np.cumsum(more[order]), room, side="right"))]
            out[rest[fitting]] = current[fitting]
        return out


def layout_of(problem: PlanProblem) -> Layout:
    return _layout(len(problem.phases), problem.num_pool_devices, problem.groups, pool_shared=problem.pool_shared)


def num_places(problem: PlanProblem) -> int:
    """How many places there are in all."""
    return len(layout_of(problem).phase)


@either(planner_calls.sample)
def sample(folded: Folded, number: int) -> np.ndarray:
    """[2 * number] of more rows: the heaviest ones, and as many that stand for the others, home by home."""
    bytes_, seconds = folded.bytes.sum(axis=1), folded.work.sum(axis=(1, 2))
    size = seconds / max(float(seconds.sum()), 1e-300) + bytes_ / max(float(bytes_.sum()), 1.0)
    order = np.argsort(-size, kind="stable")
    light = np.sort(order[number:])
    light = light[np.lexsort((size[light], folded.home[light]))]
    picked = light[((np.arange(number) + 0.5) * (len(light) / number)).astype(int)]
    return np.concatenate([order[:number], picked])


def _dormant(problem: PlanProblem) -> tuple[np.ndarray, int]:
    """[N] bool, idle rows that nobody expects; the column that takes nothing of them: no memory, and no move."""
    nothing = problem.allowed & (problem.device_bytes <= 0) & (problem.move_s <= 0)
    column = int((np.ones(len(nothing)) @ nothing).argmax())
    dormant = ~problem.active & nothing[:, column]
    dormant[problem.loaded] = False
    return dormant, column


@either(planner_calls.that_matter)
def that_matter(loads: np.ndarray, exists: np.ndarray, starts: np.ndarray, columns: int) -> np.ndarray:
    """Places that can be longer than every other of their phase, and the one that is longest at least.

    Args:
        loads: [S + ways + 3, P] of fixed charges, the base, ways to serve KV, the most and the least of all adapters.
        exists: [P] bool.
        starts: [F], where phases begin among the P.
        columns: S.
    """
    s, of_place = columns, np.repeat(np.arange(len(starts)), np.diff(starts, append=len(exists)))
    ways = loads[s + 1 : -2]
    low = np.where(exists, loads[s] + loads[-1] + ways.min(axis=0), -np.inf)
    high = loads[s] + loads[-2] + ways.max(axis=0) + loads[:s].sum(axis=0)
    highest = np.maximum.reduceat(low, starts)[of_place]
    matter = high > highest
    leading = np.flatnonzero(low == highest)
    matter[leading[np.searchsorted(of_place[leading], np.arange(len(starts)))]] = True
    return np.flatnonzero(exists & matter)
