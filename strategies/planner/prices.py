"""What a second of load and a byte of device memory are worth, from the linear relaxation of a planning problem.

Strategies that may have active users are a set of `columns` that is decided outside: their fixed charges are then part
of the base, and what remains is linear but for "one strategy an adapter". At any prices, cheap sums bound from below
what every such set and every attention strategy can reach at best (`lower_bounds`).
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np

from strategies.native import planner_calls
from strategies.planner.folded import Folded, least_sums
from strategies.planner.implementation import either
from strategies.planner.relaxation import Relaxation


class Prices(NamedTuple):
    """Prices of what adapters share.

    Attributes:
        places: [K], of a second of load; at most 1 in all a phase.
        joint: seconds a byte of device memory.
        adapters: the same on top for adapters, where they have a limit of their own.
        softness: seconds from its cheapest strategy within which an adapter is undecided.
    """

    places: np.ndarray
    joint: float
    adapters: float
    softness: float

    @property
    def adapter_byte(self) -> float:
        """Seconds a byte of an adapter."""
        return self.joint + self.adapters


class Node(NamedTuple):
    """A part of all plans.

    Attributes:
        attention: index of the attention strategy.
        columns: [S] bool, strategies that active adapters may use.
        whole: all KV is on the device; otherwise partial results are always merged.
        charged: their fixed charges count; without, a bound of all sets and a first idea of prices.
    """

    attention: int
    columns: np.ndarray
    whole: bool = False
    charged: bool = True


class Nodes(list[Node]):
    """Parts of all plans; not changed once they are looked at."""

    @functools.cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Attention [U] int64, columns [U, S] bool and `whole` [U] bool of each."""
        attention = np.array([node.attention for node in self], np.int64)
        return attention, np.array([node.columns for node in self], bool), np.array([node.whole for node in self], bool)


class Part(NamedTuple):
    """Adapters that the relaxation decides on; the others are in `loads` and `used_bytes`.

    Attributes:
        rows: [M] adapters.
        weight: [M] how many adapters each stands for.
        loads: [K], base and the others.
        used_bytes: of the others.
    """

    rows: np.ndarray
    weight: np.ndarray
    loads: np.ndarray
    used_bytes: float


class Shares(NamedTuple):
    """The relaxed decision.

    Attributes:
        prices: that support it.
        shares: [M, S].
        fraction: P.
    """

    prices: Prices
    shares: np.ndarray
    fraction: float


def nodes(folded: Folded) -> Nodes:
    """All ways to serve KV with all sets of columns; one set where nothing is charged for using a column."""
    kv = folded.problem.kv
    sets = _sets(folded.num_columns) if folded.has_fixed else np.ones((1, folded.num_columns), bool)
    ways = [(attention, False) for attention in range(len(kv.strategies))] + [(0, True)]
    least = least_sums(np.where(folded.allowed, folded.bytes, np.inf), folded.active, sets).tolist()
    return Nodes(
        Node(attention, columns, whole)
        for attention, whole in ways
        for columns, bytes_ in zip(sets, least, strict=True)
        if _fits(folded, bytes_, whole)
    )


@functools.lru_cache(maxsize=8)
def _sets(num_columns: int) -> np.ndarray:
    """[2 ** S - 1, S] bool, all sets of columns but the empty one; read-only."""
    sets = np.array([columns for columns in itertools.product([True, False], repeat=num_columns) if any(columns)])
    sets.flags.writeable = False
    return sets


def _fits(folded: Folded, least: float, whole: bool) -> bool:
    if not least <= folded.adapter_budget_bytes * (1 + 1e-12):
        return False
    return not whole or folded.problem.max_fraction(least + folded.rest_bytes) >= 1


def fractions(folded: Folded, node: Node) -> np.ndarray:
    """Where the cost of P may bend: its least, the current one, its largest."""
    kv = folded.problem.kv
    if node.whole:
        return np.ones(3)
    most = folded.most_kv
    return np.array([kv.min_fraction, min(max(kv.current_fraction, kv.min_fraction), most), most])


@either(planner_calls.lower_bounds)
def lower_bounds(folded: Folded, prices: Prices, total: np.ndarray, among: Nodes) -> np.ndarray:
    """What no plan of each node can undercut.

    Args:
        folded: the problem.
        prices: any.
        total: [M, S], `folded.costs(prices.places)` and the price of bytes.
        among: nodes.
    """
    common = folded.serial_s - prices.joint * folded.budget_bytes + float(prices.places @ folded.base)
    if folded.adapter_limit_bytes is not None:
        common -= prices.adapters * folded.adapter_limit_bytes
    sets: dict[bytes, int] = {}
    ways: dict[tuple[int, bool], float] = {}
    of_set, of_way, columns = [], [], []
    for node in among:
        key, way = node.columns.tobytes(), (node.attention, node.whole)
        if key not in sets:
            sets[key] = len(sets)
            columns.append(node.columns)
        if way not in ways:
            ways[way] = _kv_bound(folded, prices, node)
        of_set.append(sets[key])
        of_way.append(ways[way])
    open_ = np.array(columns)
    least = least_sums(total, folded.active, open_) + open_ @ (folded.fixed @ prices.places + folded.fixed_serial)
    return common + np.array(of_way) + least[of_set]


def _kv_bound(folded: Folded, prices: Prices, node: Node) -> float:
    kv, at = folded.problem.kv, fractions(folded, node)
    in_pool, on_device = (float(loads @ prices.places) for loads in (folded.kv_pool[node.attention], folded.kv_device))
    moved = kv.move_s * np.maximum(0.0, at - kv.current_fraction)
    merge = 0.0 if node.whole else float(kv.pool_serial_s[node.attention])
    return merge + float((in_pool + at * (on_device - in_pool + prices.joint * kv.device_bytes) + moved).min())


def relax(
    folded: Folded,
    node: Node,
    part: Part,
    places: np.ndarray,
    *,
    scale_s: float,
    gap: float,
    tie_break: float = 0.0,
) -> Shares:
    """Solves the linear relaxation of a part of the adapters.

    Args:
        folded: the problem.
        node: attention, and columns of active adapters.
        part: which adapters.
        places: indices of those that count, at least one a phase; the others have no price.
        scale_s: seconds of about the whole objective.
        gap: to stop at, of the value.
        tie_break: of the value, noise on the costs of strategies, so that most of equal adapters are decided.
    """
    noise = _noise(len(part.rows), folded.num_columns) * (tie_break / float(part.weight.sum())) if tie_break else None
    found = relaxed_part(folded, node, part, places, scale_s=scale_s, gap=gap, noise=noise)
    return Shares(Prices(*found[:4]), *found[4:])


@functools.lru_cache(maxsize=8)
def _noise(rows: int, columns: int) -> np.ndarray:
    """[M, S] in [0, 1), the same each time; read-only."""
    noise = np.random.default_rng(rows).random((rows, columns))
    noise.flags.writeable = False
    return noise


@either(planner_calls.relaxed_part)
def relaxed_part(
    folded: Folded,
    node: Node,
    part: Part,
    places: np.ndarray,
    *,
    scale_s: float,
    gap: float,
    noise: np.ndarray | None,
) -> tuple[np.ndarray, float, float, float, np.ndarray, float]:
    """The fields of `Prices`, and then those of `Shares`.

    Args:
        folded, node, part, places, scale_s, gap: as of `relax`.
        noise: [M, S], added to costs as a part of the value; None: nothing.
    """
    prices, shares, fraction = _Builder(folded, node, part, places, scale_s).solve(gap, noise)
    return prices.places, prices.joint, prices.adapters, prices.softness, shares, fraction


class _Builder:
    """Puts a part into the form of Relaxation."""

    def __init__(self, folded: Folded, node: Node, part: Part, places: np.ndarray, scale_s: float) -> None:
        self.folded, self.part, self.places, self.scale_s = folded, part, places, scale_s
        kv = folded.problem.kv
        allowed = folded.allowed[part.rows]
        narrow = allowed & (node.columns | ~folded.active[part.rows, None])
        self.allowed = np.where(narrow.any(axis=1, keepdims=True), narrow, allowed)
        self.bytes = folded.bytes[part.rows] * self.allowed
        self.unit = max(float(folded.bytes.max(initial=0.0)), kv.device_bytes, 1.0)
        edges = fractions(folded, node)
        self.low = float(edges[0])
        self.pieces = [(low, high) for low, high in itertools.pairwise(edges) if high > low]
        slope = folded.kv_device - folded.kv_pool[node.attention]
        base = part.loads + folded.kv_pool[node.attention] + self.low * slope
        if folded.has_fixed and node.charged:
            base += folded.fixed[node.columns].sum(axis=0)
        self.slope, self.base = slope[places], base[places]
        self.memory = self._memory_rows(float(edges[-1]))

    def _memory_rows(self, most: float) -> list[tuple[float, float]]:
        """(bytes of KV in units, limit in units) of the limits that bind at all; the joint one first."""
        folded, part, kv = self.folded, self.part, self.folded.problem.kv
        need = float(self.bytes.max(axis=1, initial=0.0) @ part.weight) + part.used_bytes
        closed = np.where(self.allowed, 0.0, np.inf)
        least = float((self.bytes + closed).min(axis=1, initial=np.inf) @ part.weight) * (1 + 1e-6)
        found = []
        self.has_joint = need + most * kv.device_bytes > folded.budget_bytes
        if self.has_joint:
            room = folded.budget_bytes - self.low * kv.device_bytes - part.used_bytes
            found.append((kv.device_bytes / self.unit, max(room, least) / self.unit))
        if folded.adapter_limit_bytes is not None and need > folded.adapter_limit_bytes:
            found.append((0.0, max(folded.adapter_limit_bytes - part.used_bytes, least) / self.unit))
        return found

    def _work(self) -> np.ndarray:
        """[M + pieces of P, S, K + limits]; a piece is a row of two options: left in the pool, on the device."""
        folded, part, m, k = self.folded, self.part, len(self.part.rows), len(self.base)
        work = np.zeros((m + len(self.pieces), folded.num_columns, k + len(self.memory)))
        scaled = self.allowed * part.weight[:, None]
        chosen = folded.work.take(part.rows, axis=0).take(self.places, axis=2)
        np.multiply(chosen, (scaled / self.scale_s)[..., None], out=work[:m, :, :k])
        work[:m, :, k:] = (folded.bytes[part.rows] * (scaled / self.unit))[..., None]
        for row, (low, high) in enumerate(self.pieces, m):
            work[row, 1, :k] = self.slope * ((high - low) / self.scale_s)
            work[row, 1, k:] = [kv_bytes * (high - low) for kv_bytes, _ in self.memory]
        return work

    def solve(self, gap: float, noise: np.ndarray | None) -> Shares:
        """Relaxes, and puts the answer back into seconds."""
        folded, part, kv = self.folded, self.part, self.folded.problem.kv
        m, s, k = len(part.rows), folded.num_columns, len(self.base)
        cost = np.zeros((m + len(self.pieces), s))
        cost[:m] = np.where(self.allowed, folded.own[part.rows], 0.0) * (part.weight[:, None] / self.scale_s)
        if noise is not None:
            cost[:m] += noise * part.weight[:, None]
        for row, (low, high) in enumerate(self.pieces, m):
            cost[row, 1] = kv.move_s * (high - low) / self.scale_s if high > kv.current_fraction else 0.0
        allowed = np.zeros(cost.shape, bool)
        allowed[:m], allowed[m:, :2] = self.allowed, True
        relaxed = Relaxation(
            self._work(),
            cost=cost,
            allowed=allowed,
            phase_of=np.concatenate([folded.phase_of[self.places], np.full(len(self.memory), -1)]),
            limit=np.concatenate([-self.base / self.scale_s, [limit for _, limit in self.memory]]),
            home=np.concatenate([folded.home[part.rows], np.full(len(self.pieces), -1)]),
        ).solve(gap=gap)
        byte = relaxed.prices[k:] * (self.scale_s / self.unit)
        joint = float(byte[0]) if self.has_joint else 0.0
        softness = relaxed.softness * self.scale_s / max(1.0, float(part.weight.max(initial=1.0)))
        taken = relaxed.shares[m:, 1]
        fraction = self.low + sum((b - a) * float(share) for (a, b), share in zip(self.pieces, taken, strict=True))
        prices = np.zeros(len(folded.base))
        prices[self.places] = relaxed.prices[:k]
        prices = Prices(prices, joint, float(byte.sum()) - joint, softness)
        return Shares(prices, relaxed.shares[:m] * self.allowed, fraction)
