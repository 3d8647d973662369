"""The joint planner: the optimizer step after step, from where it stood, with moves that must pay before they are made.

Hysteresis, as a theorem. Moving an adapter to where it needs bytes that are not there takes m seconds of the link. The
planner keeps an account for every adapter: each choice in which it would like to move it adds the gain that it
predicts for one step: at the prices of that choice, and its share of what all moves of the choice save together beyond
that. The move is made when the account holds m, and costs m. So for every adapter that has a choice, over any run of
choices,

    seconds of the link spent on moving it  <=  its account before the run + the gains predicted for it in the run,

and a load that alternates moves the same bytes again only after staying has cost as much as the move: twice the cost
of the best policy that knows the future, at most, as for any rent-or-buy rule. Going back to the pool moves no bytes
(the pool keeps its copy) and is always free; but where there is room, and next to nothing is gained, copies stay.
Growth of P has an account of the same kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from strategies.planner.newcomers import Newcomers
from strategies.planner.optimizer import Duals, optimize
from strategies.planner.policies import PaperManager
from strategies.planner.problem import NOWHERE, KvChoice, Plan, PlanProblem, evaluate, violations

_REST, _LONGEST_REST = 4, 64
"""Choices between two full searches, each of which takes several times as long as one from where the plan stood: twice
as many after each that found nothing better, so few at first. Only a full search takes other lanes into use."""

_BETTER = 0.005
"""Of the objective: what a full search must gain to be worth it."""

_FADE = 0.9
"""What an account keeps when its move is not wanted."""

_WORTH_LEAVING = 0.01
"""Of the objective: what adapters that leave the device without need must save together."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A move that has not paid yet.

    Attributes:
        column: where the adapter would go.
        saved_s: its account.
        cost_s: of the move, in all.
    """

    column: int
    saved_s: float
    cost_s: float


class JointPlanner:
    """Minimises the predicted step over all adapters, attention strategies and P at once.

    A full search also tries the plan of the paper's manager, which follows the same load.

    Args:
        horizon_steps: by which the problems' `move_s` was divided.
        max_seconds: after which a full search begins no other improvement; of hard problems, 10 ms lose up to 30 %.

    Attributes:
        waiting: by row, moves that have not paid yet, as of the last choice.
        gained_s: by row, the gains predicted for its moves so far, of which they are paid.
    """

    name = "joint"

    def __init__(self, *, horizon_steps: float = 1000.0, max_seconds: float = 0.05) -> None:
        self._horizon_steps, self._max_seconds = horizon_steps, max_seconds
        self._paper = PaperManager()
        self._start: Duals | None = None
        self._newcomers = Newcomers()
        self._age, self._rest = 0, 1
        self._accounts: dict[int, float] = {}
        self._kv_account = 0.0
        self.waiting: dict[int, Waiting] = {}
        self.gained_s: dict[int, float] = {}

    def observe(self, tokens: Mapping[int, int]) -> None:
        """For the paper's manager and to know who begins; expected loads are in the problems."""
        self._paper.observe(tokens)
        self._newcomers.observe(tokens)

    def forget(self, row: int) -> None:
        """The row belongs to another adapter from here on."""
        self._paper.forget(row)
        self._newcomers.forget(row)
        self._accounts.pop(row, None)
        self.waiting.pop(row, None)
        self.gained_s.pop(row, None)

    def choose(self, problem: PlanProblem) -> Plan:
        """The best plan whose moves have paid.

        Raises:
            PlanError: nothing fits.
        """
        expected = self._newcomers.in_problem(problem)
        plan = _keep_copies(expected, self._choose(expected))
        return plan if expected is problem else evaluate(problem, plan.strategy, plan.attention, plan.kv_fraction)

    def _choose(self, problem: PlanProblem) -> Plan:
        wanted, duals = self._solve(problem)
        barred = self._settle(problem, wanted, duals)
        kv = self._settle_kv(problem, wanted)
        if barred is None and kv is None:
            return wanted
        if barred is None:
            barred = self._moves_not_made(problem, wanted)
        allowed = problem.allowed & ~barred
        held = dataclasses.replace(problem, allowed=allowed, kv=problem.kv if kv is None else kv)
        columns = np.where(held.allowed[np.arange(len(allowed)), duals.strategy], duals.strategy, problem.current)
        plan, _ = optimize(held, duals._replace(strategy=columns.astype(np.int8)))
        return plan

    def _solve(self, problem: PlanProblem) -> tuple[Plan, Duals]:
        """The best plan found, with moves that have not paid: from where the last one stood, or by a full search."""
        start = self._start
        if start is None or len(start.strategy) != problem.num_adapters:
            self._age, self._rest = 0, 1
            plan, duals = self._search(problem)
        else:
            plan, duals = optimize(problem, start)
            if self._age >= self._rest:
                before_s = plan.objective_s
                plan, duals = self._search(problem)
                found = before_s - plan.objective_s > _BETTER * before_s
                self._age, self._rest = 0, _REST if found else min(2 * self._rest, _LONGEST_REST)
        self._age += 1
        self._start = duals
        return plan, duals

    def _search(self, problem: PlanProblem) -> tuple[Plan, Duals]:
        return optimize(problem, candidates=[self._paper.choose(problem)], max_seconds=self._max_seconds)

    def _settle(self, problem: PlanProblem, wanted: Plan, duals: Duals) -> np.ndarray | None:
        """Adds gains, pays for moves that can be paid; [N, S] moves that are barred, or None."""
        rows = np.arange(problem.num_adapters)
        columns = wanted.strategy.astype(int)
        costs_s = problem.move_s * self._horizon_steps
        moving = (columns != problem.current) & (costs_s[rows, columns] > 0)
        self.waiting = {}
        for row in [row for row in self._accounts if not moving[row]]:
            self._accounts[row] *= _FADE
        if not moving.any():
            return None
        here = np.arange(costs_s.shape[1]) == problem.current[:, None]
        free = problem.allowed & ((costs_s <= 0) | here)
        barred = problem.allowed & ~free & free.any(axis=1, keepdims=True)  # pinned where it is not: it has to move
        movers = np.flatnonzero(moving & free.any(axis=1))
        if not len(movers):
            return None
        costs_s = costs_s[movers, columns[movers]]
        gains_s = self._gains(problem, wanted, duals, movers, free[movers], costs_s)
        for row, gain, cost in zip(movers.tolist(), gains_s.tolist(), costs_s.tolist(), strict=True):
            barred[row, columns[row]] = not self._settle_one(row, int(columns[row]), gain, cost)
        return barred if self.waiting else None

    def _gains(
        self,
        problem: PlanProblem,
        wanted: Plan,
        duals: Duals,
        movers: np.ndarray,
        free: np.ndarray,
        costs_s: np.ndarray,
    ) -> np.ndarray:
        """[M] seconds of a step that each of M moves saves: at the prices, and its share of what all save together.

        Moves of many may shorten a step though none of them does so alone, as prices see it: a lane is left, or a place
        is not the longest any more. What prices do not explain is shared by what the moves cost, so that such moves are
        paid for at the same time.
        """
        total = (duals.costs - problem.move_s)[movers]
        stay = np.where(free, total, np.inf).argmin(axis=1)
        gains_s = np.maximum(
            0.0, total[np.arange(len(movers)), stay] - total[np.arange(len(movers)), wanted.strategy[movers]]
        )
        columns = wanted.strategy.copy()
        columns[movers] = stay
        together_s = evaluate(problem, columns, wanted.attention, wanted.kv_fraction).step_s - wanted.step_s
        return gains_s + max(0.0, together_s - gains_s.sum()) * costs_s / costs_s.sum()

    def _moves_not_made(self, problem: PlanProblem, wanted: Plan) -> np.ndarray:
        """[N, S], moves that the plan does not make: a second plan shall not begin them unpaid."""
        rows = np.arange(problem.num_adapters)
        stays = (problem.move_s <= 0) | (np.arange(problem.move_s.shape[1]) == problem.current[:, None])
        stays[rows, wanted.strategy] = True
        return problem.allowed & ~stays

    def _settle_one(self, row: int, to: int, gain_s: float, cost_s: float) -> bool:
        """Adds a gain to an account and pays from it if it can; says whether it could."""
        self.gained_s[row] = self.gained_s.get(row, 0.0) + gain_s
        saved = self._accounts.get(row, 0.0) + gain_s
        if saved >= cost_s:
            self._accounts[row] = saved - cost_s
            return True
        self._accounts[row] = saved
        self.waiting[row] = Waiting(to, saved, cost_s)
        return False

    def _settle_kv(self, problem: PlanProblem, wanted: Plan) -> KvChoice | None:
        """The same for growth of P: KvChoice without growth, or None."""
        kv = problem.kv
        growth = wanted.kv_fraction - max(kv.current_fraction, kv.min_fraction)
        cost = growth * kv.move_s * self._horizon_steps
        if cost <= 0 or kv.device_bytes <= 0:
            self._kv_account *= _FADE
            return None
        stays = max(kv.current_fraction, kv.min_fraction)
        without = evaluate(problem, wanted.strategy, wanted.attention, stays)
        self._kv_account += max(0.0, without.step_s - wanted.step_s)
        if self._kv_account >= cost:
            self._kv_account -= cost
            return None
        limit = stays * kv.device_bytes * (1 + 1e-12)
        if kv.kv_budget_bytes is not None:
            limit = min(limit, kv.kv_budget_bytes)
        return dataclasses.replace(kv, kv_budget_bytes=limit)


def _keep_copies(problem: PlanProblem, plan: Plan) -> Plan:
    """The plan without what would leave the device for next to nothing, where there is room: it may have to return."""
    rows = np.arange(problem.num_adapters)
    served = problem.current != NOWHERE
    here = problem.device_bytes[rows, np.where(served, problem.current, 0)]
    leaves = served & (problem.device_bytes[rows, plan.strategy] < here)
    leaves &= problem.allowed[rows, np.where(served, problem.current, 0)]
    if not leaves.any():
        return plan
    columns = np.where(leaves, problem.current, plan.strategy).astype(plan.strategy.dtype)
    kept = evaluate(problem, columns, plan.attention, plan.kv_fraction)
    stays = kept.objective_s <= (1 + _WORTH_LEAVING) * plan.objective_s and not violations(problem, kept)
    return kept if stays else plan
