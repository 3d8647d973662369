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

    def choose(self, problem: PlanProblem) -> Plan:
        """A plan that fits all limits.

        Raises:
            PlanError: there is none.
        """
        ...


class _Filling:
    """Columns that are filled adapter by adapter while device memory lasts."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        bytes_ = np.where(problem.allowed, problem.device_bytes, np.inf)
        fewest = bytes_ <= bytes_.min(axis=1, keepdims=True)
        self.alone_s = alone_seconds(problem)
        self.columns = np.where(fewest, self.alone_s, np.inf).argmin(axis=1)
        rows = np.arange(problem.num_adapters)
        self.free = problem.adapter_budget_bytes - float(problem.device_bytes[rows, self.columns].sum())
        if self.free < -1e-9 * max(1.0, problem.budget_bytes):
            raise PlanError(
                f"{problem.budget_bytes:.0f} bytes of device memory do not hold the pinned adapters and the KV that is "
                "being written: unpin adapters, run fewer sequences or raise the budget"
            )

    def more_bytes(self, row: int, column: int) -> float:
        """Device memory that the change takes."""
        return float(self.problem.device_bytes[row, column] - self.problem.device_bytes[row, self.columns[row]])

    def give(self, row: int, column: int) -> bool:
        """Gives a row a column if it may have it and it fits; says whether it did."""
        more = self.more_bytes(row, column)
        if not self.problem.allowed[row, column] or more > self.free:
            return False
        self.free -= more
        self.columns[row] = column
        return True

    def plan(self) -> Plan:
        """With the best KV beside these adapters."""
        problem = self.problem
        decision = Decision(Folded(problem), self.columns, attention=0, fraction=problem.kv.min_fraction)
        best_fraction(decision)
        return evaluate(problem, self.columns, problem.kv.strategies[decision.attention], decision.fraction)


def alone_seconds(problem: PlanProblem) -> np.ndarray:
    """[N, S] seconds of an adapter in a step with nobody else: fixed charges and its own loads; inf: not allowed."""
    loads = problem.load_s + problem.fixed_load_s
    longest = (loads @ problem.group_matrix).max(axis=-1) + problem.serial_s + problem.fixed_serial_s
    return np.where(problem.allowed, longest.sum(axis=-1), np.inf)


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

    def choose(self, problem: PlanProblem) -> Plan:
        """Active adapters come first, then those that have the strategy already.

        Raises:
            PlanError: the problem has no such strategy, or nothing fits.
        """
        if self._strategy not in problem.strategies:
            raise PlanError(f"strategy {self._strategy!r} is unknown: choose from {', '.join(problem.strategies)}")
        column = problem.strategies.index(self._strategy)
        filling = _Filling(problem)
        for row in np.lexsort((problem.current != column, ~problem.active)):
            if not filling.give(int(row), column) and problem.active[row] and "fetch" in problem.strategies:
                filling.give(int(row), problem.strategies.index("fetch"))
        return filling.plan()


class LruPolicy:
    """The adapters used last are resident, as many as fit; the others are fetched."""

    name = "lru"

    def __init__(self) -> None:
        self._load = AdapterLoad(1.0)

    def observe(self, tokens: Mapping[int, int]) -> None:
        """Remembers when each adapter had tokens last."""
        self._load.observe(tokens)

    def choose(self, problem: PlanProblem) -> Plan:
        """Active adapters count as used now.

        Raises:
            PlanError: nothing fits.
        """
        resident, fetch = (problem.strategies.index(name) for name in ("resident", "fetch"))
        last = self._load.last_step(problem.num_adapters)
        filling = _Filling(problem)
        for row in np.lexsort((-last, ~problem.active)):
            used = problem.active[row] or last[row] > 0 or problem.current[row] == resident
            if not (used and filling.give(int(row), resident)):
                filling.give(int(row), fetch)
        return filling.plan()


class PaperManager:
    """The memory manager of the paper, by temperature (arXiv 2608.05483).

    An adapter warms by 1 with each request; after every step all go a tenth of the way to the mean. The hottest are
    resident beforehand. For each adapter that serves, strategies are tried in order of their cost; the first that fits
    is taken, if need be over cold adapters, coldest first. If none fits better than the smallest, the cheapest of
    strategy and victim is: hot adapters that do not serve, then others that serve, largest first.

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

    def choose(self, problem: PlanProblem) -> Plan:
        """Follows the rules above, for the hottest serving adapter first.

        Raises:
            PlanError: nothing fits.
        """
        n = problem.num_adapters
        warm = np.zeros(n)
        warm[: len(self._temperature)] = self._temperature[:n]
        filling = _Filling(problem)
        resident = problem.strategies.index("resident")
        by_heat = np.argsort(-warm, kind="stable")
        hot = {int(row) for row in by_heat[: self._num_hot] if warm[row] > 0 or problem.current[row] == resident}
        smallest = filling.columns.copy()
        for row in by_heat:
            cached = int(problem.current[row])
            if int(row) in hot:
                filling.give(int(row), resident)
            elif not problem.active[row] and cached != NOWHERE:
                filling.give(int(row), cached)
        idle = [int(row) for row in by_heat[::-1] if not problem.active[row]]
        cold = [row for row in idle if row not in hot]
        rest = sorted((row for row in idle if row in hot), key=lambda row: -problem.device_bytes[row, resident])
        for row in by_heat[problem.active[by_heat]]:
            _serve(filling, int(row), smallest, victims=cold + rest)
        return filling.plan()


def _serve(filling: _Filling, row: int, smallest: np.ndarray, *, victims: list[int]) -> None:
    """The cheapest strategy for an adapter that fits after enough victims have gone back to their smallest."""
    problem = filling.problem
    for column in np.argsort(filling.alone_s[row]):
        if not problem.allowed[row, column]:
            return
        removable = [victim for victim in victims if filling.columns[victim] != smallest[victim]]
        freed = np.array([-filling.more_bytes(victim, int(smallest[victim])) for victim in removable])
        if filling.more_bytes(row, int(column)) > filling.free + freed.sum():
            continue
        for victim in removable:
            if filling.give(row, int(column)):
                return
            filling.give(victim, int(smallest[victim]))
        if filling.give(row, int(column)):
            return
