"""Policies: objects that choose a plan step after step. The joint planner is in joint.py; here are those it is held to.

Rows are the adapters' places in the problems; a caller keeps them the same from step to step. What a policy remembers
comes from `observe`, what it may do from the problem. Adapters come first in all three: KV gets what they leave, and
the attention strategy that is best then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from strategies.planner.decision import Decision
from strategies.planner.filling import Filling
from strategies.planner.folded import Folded
from strategies.planner.improve import best_fraction
from strategies.planner.load import AdapterLoad
from strategies.planner.problem import NOWHERE, Plan, PlanError, PlanProblem, evaluate


class Policy(Protocol):
    """Chooses plans."""

    @property
    def name(self) -> str:
        """For reports and flags."""
        ...

    def observe(self, tokens: Mapping[int, int]) -> None:
        """One step that has run: tokens by row of the problem; rows without tokens may be left out."""
        ...

    def forget(self, row: int) -> None:
        """The row belongs to another adapter from here on."""
        ...

    def choose(self, problem: PlanProblem) -> Plan:
        """A plan that fits all limits.

        Raises:
            PlanError: there is none.
        """
        ...


def _filling(problem: PlanProblem) -> tuple[Filling, np.ndarray]:
    """Everyone in the strategy of fewest bytes; and `alone_seconds`."""
    alone_s = alone_seconds(problem)
    filling = Filling(problem.allowed, problem.device_bytes, alone_s, problem.adapter_budget_bytes)
    if filling.free < -1e-9 * max(1.0, problem.budget_bytes):
        raise PlanError(
            f"{problem.budget_bytes:.0f} bytes of device memory do not hold the pinned adapters and the KV that is "
            "being written: unpin adapters, run fewer sequences or raise the budget"
        )
    return filling, alone_s


def _with_kv(problem: PlanProblem, columns: np.ndarray) -> Plan:
    """Adapters as they are, and the best KV beside them."""
    folded = Folded(problem, columns)
    decision = Decision(folded, columns[folded.live], attention=0, fraction=problem.kv.min_fraction)
    best_fraction(decision)
    return evaluate(problem, columns, problem.kv.strategies[decision.attention], decision.fraction)


def alone_seconds(problem: PlanProblem) -> np.ndarray:
    """[N, S] seconds of an adapter in a step with nobody else: fixed charges and its own loads; inf: not allowed."""
    n = problem.num_adapters
    busy = np.flatnonzero(problem.load_s.any(axis=(1, 2, 3)) | problem.serial_s.any(axis=(1, 2)))
    fixed_serial = problem.fixed_serial_s.sum(axis=-1)
    alone = np.tile((problem.fixed_load_s @ problem.group_matrix).max(axis=-1).sum(axis=-1) + fixed_serial, (n, 1))
    longest = ((problem.load_s[busy] + problem.fixed_load_s) @ problem.group_matrix).max(axis=-1)
    alone[busy] = (longest + problem.serial_s[busy]).sum(axis=-1) + fixed_serial
    return np.where(problem.allowed, alone, np.inf)


class FixedPolicy:
    """One strategy for everyone it may serve and fits; the others take the strategy of fewest bytes (fetch).

    Args:
        strategy: name of the strategy.
    """

    def __init__(self, strategy: str) -> None:
        self.name = f"fixed-{strategy}"
        self._strategy = strategy

    def observe(self, tokens: Mapping[int, int]) -> None:
        """Learns nothing."""

    def forget(self, row: int) -> None:
        """Knows nothing."""

    def choose(self, problem: PlanProblem) -> Plan:
        """Active adapters come first, then those that have the strategy already.

        Raises:
            PlanError: the problem has no such strategy, or nothing fits.
        """
        if self._strategy not in problem.strategies:
            raise PlanError(f"strategy {self._strategy!r} is unknown: choose from {', '.join(problem.strategies)}")
        column = problem.strategies.index(self._strategy)
        filling, _ = _filling(problem)
        order = np.lexsort((problem.current != column, ~problem.active))
        rest = order[~filling.give(order, np.full(len(order), column))]
        if "fetch" in problem.strategies:
            rest = rest[problem.active[rest]]
            filling.give(rest, np.full(len(rest), problem.strategies.index("fetch")))
        return _with_kv(problem, filling.columns)


class LruPolicy:
    """The adapters used last are resident, as many as fit; the others are fetched."""

    name = "lru"

    def __init__(self) -> None:
        self._load = AdapterLoad(1.0)

    def observe(self, tokens: Mapping[int, int]) -> None:
        """Remembers when each adapter had tokens last."""
        self._load.observe(tokens)

    def forget(self, row: int) -> None:
        """The row belongs to another adapter from here on, which was never used."""
        self._load.forget(row)

    def choose(self, problem: PlanProblem) -> Plan:
        """Active adapters count as used now.

        Raises:
            PlanError: nothing fits.
        """
        resident, fetch = (problem.strategies.index(name) for name in ("resident", "fetch"))
        last = self._load.last_step(problem.num_adapters)
        filling, _ = _filling(problem)
        order = np.lexsort((-last, ~problem.active))
        used = order[(problem.active | (last > 0) | (problem.current == resident))[order]]
        filling.give(used, np.full(len(used), resident))
        rest = order[filling.columns[order] != resident]
        filling.give(rest, np.full(len(rest), fetch))
        return _with_kv(problem, filling.columns)


class PaperManager:
    """The memory manager of the paper, by temperature (arXiv 2608.05483).

    An adapter warms by 1 with each request; after every step all go a tenth of the way to the mean. The hottest are
    resident beforehand; others that are idle keep what they have while it fits. Then each adapter that serves, hottest
    first, takes the strategy of least cost if that fits, or fits once cold adapters are evicted, coldest first. Where
    it does not, the cheapest of all pairs of a strategy and whom to evict for it is taken: nobody, cold adapters, hot
    ones, others that serve, of each the largest first. A pair costs the strategy's seconds and those that evicted
    adapters lose which serve; of equal ones the first in this order wins. KV needs no eviction of its own: beyond what
    is being written it has only what adapters leave.

    Args:
        num_hot: adapters that are resident beforehand.
        cooling: part of the way to the mean.
    """

    name = "paper"

    def __init__(self, *, num_hot: int = 50, cooling: float = 0.1) -> None:
        self._num_hot, self._cooling = num_hot, cooling
        self._temperature = np.zeros(0)
        self._before: frozenset[int] = frozenset()

    def observe(self, tokens: Mapping[int, int]) -> None:
        """A request begins where an adapter has tokens that had none in the step before."""
        began = np.array([row for row in tokens if row not in self._before], np.int64)
        size = max(int(max(tokens, default=-1)) + 1, len(self._temperature))
        self._temperature = np.pad(self._temperature, (0, size - len(self._temperature)))
        self._temperature[began] += 1.0
        if size:
            self._temperature -= self._cooling * (self._temperature - self._temperature.mean())
        self._before = frozenset(tokens)

    def forget(self, row: int) -> None:
        """The row belongs to another adapter from here on, which is as cold as one that was never used."""
        if row < len(self._temperature):
            self._temperature[row] = 0.0
        self._before -= {row}

    def choose(self, problem: PlanProblem) -> Plan:
        """Follows the rules above.

        Raises:
            PlanError: nothing fits.
        """
        warm = np.zeros(problem.num_adapters)
        warm[: len(self._temperature)] = self._temperature[: len(warm)]
        filling, alone_s = _filling(problem)
        resident = problem.strategies.index("resident")
        by_heat = np.argsort(-warm, kind="stable")
        hot = np.zeros(len(warm), bool)
        hottest = by_heat[: self._num_hot]
        hot[hottest] = (warm[hottest] > 0) | (problem.current[hottest] == resident)
        kept = by_heat[hot[by_heat] | (~problem.active & (problem.current != NOWHERE))[by_heat]]
        filling.give(kept, np.where(hot[kept], resident, problem.current[kept]))
        serving = by_heat[problem.active[by_heat]]
        cold = by_heat[::-1][~(hot | problem.active)[by_heat[::-1]]]
        eviction = _Eviction(filling, alone_s, cold, np.flatnonzero(hot & ~problem.active))
        for at, row in enumerate(serving):
            eviction.serve(int(row), serving[:at])
        return _with_kv(problem, filling.columns)


class _Eviction:
    """Serves adapters, over others where need be.

    Args:
        filling: to change.
        alone_s: [N, S] seconds of each strategy.
        cold: rows that do not serve, coldest first.
        hot: rows that are cached though they do not serve.
    """

    def __init__(self, filling: Filling, alone_s: np.ndarray, cold: np.ndarray, hot: np.ndarray) -> None:
        self.filling, self.alone_s, self.cold, self.hot = filling, alone_s, cold, hot

    def serve(self, row: int, others: np.ndarray) -> None:
        """Gives a row a strategy.

        Args:
            row: of the adapter.
            others: rows that serve already.
        """
        filling, seconds = self.filling, self.alone_s[row]
        best = int(seconds.argmin())
        if filling.give_one(row, best):
            return
        self.cold = self.cold[filling.columns[self.cold] != filling.smallest[self.cold]]
        self.hot = self.hot[filling.columns[self.hot] != filling.smallest[self.hot]]
        victims = self._needed(row, best, self.cold)
        if victims is None:
            options = []
            for group in (self.cold[:0], *map(self._largest_first, (self.cold, self.hot, others))):
                for column in np.flatnonzero(np.isfinite(seconds)):
                    evicted = self._needed(row, int(column), group)
                    if evicted is not None:
                        options.append((float(seconds[column]) + self._lost(evicted, others), int(column), evicted))
            _, best, victims = min(options, key=lambda option: option[0])
        filling.evict(victims)
        filling.give_one(row, best)

    def _largest_first(self, group: np.ndarray) -> np.ndarray:
        return group[np.argsort(-self.filling.freed_bytes(group), kind="stable")]

    def _needed(self, row: int, column: int, group: np.ndarray) -> np.ndarray | None:
        """The first of a group whose eviction makes room; None if all of it does not."""
        more = float(self.filling.more_bytes(row, column))
        freed = self.filling.free + np.concatenate([[0.0], np.cumsum(self.filling.freed_bytes(group))])
        enough = freed >= more
        return group[: int(enough.argmax())] if enough.any() else None

    def _lost(self, evicted: np.ndarray, serving: np.ndarray) -> float:
        """Seconds that evicted adapters which serve take longer."""
        rows = evicted[np.isin(evicted, serving)]
        lost = self.alone_s[rows, self.filling.smallest[rows]] - self.alone_s[rows, self.filling.columns[rows]]
        return float(lost.sum())
