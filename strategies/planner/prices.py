"""What a second of load and a byte of device memory are worth, from the linear relaxation of a planning problem.

Strategies that may have active users are a set of `columns` that is decided outside: their fixed charges are then part
of the base, and what remains is linear but for "one strategy an adapter". At any prices, cheap sums bound from below
what every such set and every attention strategy can reach at best (`lower_bounds`).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from strategies.planner.folded import Folded
from strategies.planner.relaxation import Block, Relaxation


class Prices(NamedTuple):
    """Prices of what adapters share.

    Attributes:
        places: [F, Q], of a second of load; at most 1 in all a phase.
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


class Part(NamedTuple):
    """Adapters that the relaxation decides on; the others are in `loads` and `used_bytes`.

    Attributes:
        rows: [M] adapters.
        weight: [M] how many adapters each stands for.
        loads: [F, Q], base and the others.
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


def nodes(folded: Folded) -> list[Node]:
    """All ways to serve KV with all sets of columns; one set where nothing is charged for using a column."""
    kv = folded.problem.kv
    sets = [np.ones(folded.num_columns, bool)]
    if folded.has_fixed:
        every = itertools.product([True, False], repeat=folded.num_columns)
        sets = [np.array(columns) for columns in every if any(columns)]
    ways = [(attention, False) for attention in range(len(kv.strategies))] + [(0, True)]
    least = [_least_bytes(folded, columns) for columns in sets]
    return [
        Node(attention, columns, whole)
        for attention, whole in ways
        for columns, bytes_ in zip(sets, least, strict=True)
        if _fits(folded, bytes_, whole)
    ]


def _least_bytes(folded: Folded, columns: np.ndarray) -> float:
    """Device memory of adapters when each takes as little as it can."""
    problem = folded.problem
    if np.any(folded.for_free & columns):
        return 0.0
    usable = problem.allowed & (columns | ~problem.active[:, None])
    return float(np.where(usable, problem.device_bytes, np.inf).min(axis=1, initial=np.inf).sum())


def _fits(folded: Folded, least: float, whole: bool) -> bool:
    problem = folded.problem
    return least <= problem.adapter_budget_bytes * (1 + 1e-12) and (not whole or problem.max_fraction(least) >= 1)


def fractions(folded: Folded, node: Node) -> np.ndarray:
    """Where the cost of P may bend: its least, the current one, its largest."""
    kv = folded.problem.kv
    if node.whole:
        return np.ones(3)
    most = 1.0
    if kv.kv_budget_bytes is not None and kv.device_bytes > 0:
        most = max(kv.min_fraction, min(1.0, kv.kv_budget_bytes / kv.device_bytes))
    return np.array([kv.min_fraction, min(max(kv.current_fraction, kv.min_fraction), most), most])


def lower_bounds(folded: Folded, prices: Prices, costs: np.ndarray, among: list[Node]) -> np.ndarray:
    """What no plan of each node can undercut.

    Args:
        folded: the problem.
        prices: any.
        costs: [N, S], `folded.costs(prices.places)`.
        among: nodes.
    """
    problem, kv = folded.problem, folded.problem.kv
    total = costs + prices.adapter_byte * problem.device_bytes
    common = total[~problem.active].min(axis=1).sum() + folded.serial_s - prices.joint * problem.budget_bytes
    if kv.adapter_budget_bytes is not None:
        common -= prices.adapters * kv.adapter_budget_bytes
    common += (prices.places * np.where(np.isfinite(folded.base), folded.base, 0.0)).sum()
    acting = np.ascontiguousarray(total[problem.active].T)
    fixed = (folded.fixed * prices.places).sum(axis=(1, 2)) + folded.fixed_serial
    seen: dict[tuple[bool, ...], float] = {}
    for node in among:
        key = tuple(node.columns.tolist())
        if key not in seen:
            seen[key] = float(acting[node.columns].min(axis=0, initial=np.inf).sum() + fixed[node.columns].sum())
    ways: dict[tuple[int, bool], float] = {}
    for node in among:
        if (node.attention, node.whole) not in ways:
            ways[node.attention, node.whole] = _kv_bound(folded, prices, node)
    by_columns = [seen[tuple(node.columns.tolist())] for node in among]
    return np.array([common + ways[node.attention, node.whole] + s for node, s in zip(among, by_columns, strict=True)])


def _kv_bound(folded: Folded, prices: Prices, node: Node) -> float:
    kv, at = folded.problem.kv, fractions(folded, node)
    in_pool = folded.kv_pool[node.attention]
    loads = in_pool + at[:, None] * (folded.kv_device - in_pool)
    moved = kv.move_s * np.maximum(0.0, at - kv.current_fraction)
    merge = 0.0 if node.whole else float(kv.pool_serial_s[node.attention])
    return merge + float((loads @ prices.places[kv.phase] + prices.joint * kv.device_bytes * at + moved).min())


def relax(folded: Folded, node: Node, part: Part, *, scale_s: float, gap: float, tie_break: float = 0.0) -> Shares:
    """Solves the linear relaxation of a part of the adapters.

    Args:
        folded: the problem.
        node: attention, and columns of active adapters.
        part: which adapters.
        scale_s: seconds of about the whole objective.
        gap: to stop at, of the value.
        tie_break: of the value, noise on the costs of strategies, so that most of equal adapters are decided.
    """
    return _Builder(folded, node, part, scale_s).solve(gap, tie_break)


class _Builder:
    """Puts a part into the form of Relaxation."""

    def __init__(self, folded: Folded, node: Node, part: Part, scale_s: float) -> None:
        self.folded, self.scale_s = folded, scale_s
        problem, kv = folded.problem, folded.problem.kv
        self.order = np.argsort(folded.home[part.rows], kind="stable")
        self.rows, self.weight = part.rows[self.order], part.weight[self.order]
        self.home = folded.home[self.rows]
        allowed = problem.allowed[self.rows]
        narrow = allowed & (node.columns | ~problem.active[self.rows, None])
        self.allowed = np.where(narrow.any(axis=1, keepdims=True), narrow, allowed)
        self.loads = folded.load[self.rows] * self.allowed[..., None]
        self.unit = max(float(problem.device_bytes.max(initial=0.0)), kv.device_bytes, 1.0)
        edges = fractions(folded, node)
        self.low = float(edges[0])
        self.pieces = [(low, high) for low, high in itertools.pairwise(edges) if high > low]
        self.slope = folded.kv_device - folded.kv_pool[node.attention]
        self.base = part.loads.copy()
        if folded.has_fixed and node.charged:
            self.base += folded.fixed[node.columns].sum(axis=0)
        self.base[kv.phase] += folded.kv_pool[node.attention] + self.low * self.slope
        self.keep = self._places_that_matter(float(edges[-1]))
        self.memory = self._memory_rows(part, float(edges[-1]))

    def _places_that_matter(self, most: float) -> np.ndarray:
        """[F, Q]: not those that stay below another of their phase whatever is decided."""
        folded, phase = self.folded, self.folded.problem.kv.phase
        closed = np.where(self.allowed, 0.0, np.inf)[..., None]
        high, low = self._at_homes(self.loads.max(axis=1)), self._at_homes((self.loads + closed).min(axis=1))
        high, low = self.base + folded.places(high), self.base + folded.places(low)
        kv_change = self.slope * (most - self.low)
        high[phase] += np.maximum(kv_change, 0.0)
        low[phase] += np.minimum(kv_change, 0.0)
        return (high >= low.max(axis=1, keepdims=True)) & np.isfinite(self.base)

    def _at_homes(self, loads: np.ndarray) -> np.ndarray:
        at_home = (self.home == np.arange(self.folded.num_homes)[:, None]) * self.weight
        return (at_home @ loads).reshape(self.folded.num_homes, self.folded.num_phases, -1)

    def _memory_rows(self, part: Part, most: float) -> list[tuple[float, float]]:
        """(bytes of KV in units, limit in units) of the limits that bind at all; the joint one first."""
        problem, kv = self.folded.problem, self.folded.problem.kv
        need = float((problem.device_bytes[self.rows] * self.allowed).max(axis=1, initial=0.0) @ self.weight)
        need += part.used_bytes
        closed = np.where(self.allowed, 0.0, np.inf)
        least = float((problem.device_bytes[self.rows] + closed).min(axis=1, initial=np.inf) @ self.weight) * (1 + 1e-6)
        found = []
        self.has_joint = need + most * kv.device_bytes > problem.budget_bytes
        if self.has_joint:
            room = problem.budget_bytes - self.low * kv.device_bytes - part.used_bytes
            found.append((kv.device_bytes / self.unit, max(room, least) / self.unit))
        if kv.adapter_budget_bytes is not None and need > kv.adapter_budget_bytes:
            found.append((0.0, max(kv.adapter_budget_bytes - part.used_bytes, least) / self.unit))
        return found

    def _blocks(self) -> list[Block]:
        folded, s = self.folded, self.folded.num_columns
        index = np.cumsum(self.keep.reshape(-1)) - 1
        num_places, width = int(self.keep.sum()), self.loads.shape[-1]
        bytes_ = folded.problem.device_bytes[self.rows] * self.allowed * (self.weight[:, None] / self.unit)
        bounds = np.searchsorted(self.home, np.arange(folded.num_homes + 1))
        unit_loads = np.eye(width).reshape(width, folded.num_phases, -1)
        memory_at = num_places + np.arange(len(self.memory))
        blocks = []
        for home in range(folded.num_homes):
            start, stop = bounds[home], bounds[home + 1]
            if start == stop:
                continue
            spread = folded.places_of(unit_loads[:, None], np.full(width, home)).reshape(width, -1)
            at = np.flatnonzero(self.keep.reshape(-1) & (spread != 0).any(axis=0))
            work = np.empty(((stop - start) * s, len(at) + len(self.memory)))
            loads = self.loads[start:stop] * (self.weight[start:stop, None, None] / self.scale_s)
            work[:, : len(at)] = loads.reshape(-1, width) @ spread[:, at]
            work[:, len(at) :] = bytes_[start:stop].reshape(-1, 1)
            blocks.append(Block(work, np.concatenate([index[at], memory_at]), start * s, stop * s))
        return [*blocks, *self._kv_block(index, memory_at)]

    def _kv_block(self, index: np.ndarray, memory_at: np.ndarray) -> list[Block]:
        """Pieces of P as rows of two options: column 0 leaves the piece in the pool, 1 has it on the device."""
        folded, s = self.folded, self.folded.num_columns
        if not self.pieces:
            return []
        phase, num_places = folded.problem.kv.phase, self.keep.shape[1]
        at = np.flatnonzero(self.keep[phase])
        work = np.zeros((len(self.pieces), s, len(at) + len(self.memory)))
        for piece, (low, high) in enumerate(self.pieces):
            work[piece, 1, : len(at)] = self.slope[at] * ((high - low) / self.scale_s)
            work[piece, 1, len(at) :] = [kv_bytes * (high - low) for kv_bytes, _ in self.memory]
        places = np.concatenate([index[phase * num_places + at], memory_at])
        start = len(self.rows) * s
        return [Block(work.reshape(-1, work.shape[-1]), places, start, start + len(self.pieces) * s)]

    def solve(self, gap: float, tie_break: float) -> Shares:
        """Relaxes, and puts the answer back into seconds and the caller's order of rows."""
        folded, kv, s = self.folded, self.folded.problem.kv, self.folded.num_columns
        own = np.where(self.allowed, folded.own[self.rows], 0.0) * (self.weight[:, None] / self.scale_s)
        if tie_break:
            noise = np.random.default_rng(len(own)).random(own.shape)
            own += noise * (tie_break * self.weight[:, None] / float(self.weight.sum()))
        pieces = np.zeros((len(self.pieces), s))
        for piece, (low, high) in enumerate(self.pieces):
            pieces[piece, 1] = kv.move_s * (high - low) / self.scale_s if high > kv.current_fraction else 0.0
        open_pieces = np.tile(np.arange(s) < 2, (len(self.pieces), 1))
        phase_of = np.repeat(np.arange(len(self.keep)), self.keep.sum(axis=1))
        limits = [limit for _, limit in self.memory]
        relaxed = Relaxation(
            self._blocks(),
            cost=np.vstack([own, pieces]),
            allowed=np.vstack([self.allowed, open_pieces]),
            phase_of=np.concatenate([phase_of, np.full(len(limits), -1)]).astype(int),
            limit=np.concatenate([-self.base[self.keep] / self.scale_s, limits]),
        ).solve(gap=gap)
        places = np.zeros(self.keep.shape)
        num_places = int(self.keep.sum())
        places[self.keep] = relaxed.prices[:num_places]
        byte = relaxed.prices[num_places:] * (self.scale_s / self.unit)
        joint = float(byte[0]) if self.has_joint else 0.0
        softness = relaxed.softness * self.scale_s / max(1.0, float(self.weight.max(initial=1.0)))
        shares = np.empty((len(self.rows), s))
        shares[self.order] = relaxed.shares[: len(self.rows)] * self.allowed
        taken = relaxed.shares[len(self.rows) :, 1]
        fraction = self.low + sum(
            (high - low) * float(share) for (low, high), share in zip(self.pieces, taken, strict=True)
        )
        return Shares(Prices(places, joint, float(byte.sum()) - joint, softness), shares, fraction)
