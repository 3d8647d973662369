"""From a snapshot of the engine to a decision: what runs in the planner's own thread.

The worker alone knows the tracked loads and the policy; the engine's thread gives it snapshots, one at a time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from strategies.cost import ATTENTION_COLUMNS, LORA_COLUMNS, AdapterFeatures, CostModel, KvLoad, plan_problem
from strategies.cost.step import HORIZON_STEPS
from strategies.planner import (
    AdapterLoad,
    JointPlanner,
    KvChoice,
    LruPolicy,
    PaperManager,
    Plan,
    PlanProblem,
    Policy,
    Waiting,
    prepare,
)

POLICIES = ("joint", "paper", "lru")
HALF_LIFE_STEPS = 512.0
"""Of what is known of an adapter's load: some requests long, so that a drift shows within minutes."""

_NEVER = 1e-3
"""Tokens a step; an idle adapter with fewer is not expected."""

_RESIDENT, _FETCH, _NEAR_DATA, _SPLIT = map(LORA_COLUMNS.index, ("resident", "fetch", "near_data", "split"))


def make_policy(name: str, *, interval_steps: int) -> Policy:
    """A policy by its name; what it computes with is built here, before there is anything to choose.

    Args:
        name: of POLICIES.
        interval_steps: between two choices. The joint planner's accounts gain by choices, each of which stands for so
            many steps; so its moves have to pay in as many fewer of them.
    """
    prepare()
    if name == "joint":
        return JointPlanner(horizon_steps=HORIZON_STEPS / interval_steps)
    return {"paper": PaperManager, "lru": LruPolicy}[name]()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """The engine between two steps. Nothing in it changes.

    Attributes:
        ids: [N] identities of adapters by row.
        features: of N adapters.
        home: [N].
        current: [N] columns.
        pinned: [N] bool.
        running: sequences that run, by row; of the base model none.
        kv: of the running sequences.
        rows: of the program that decodes them.
        near_data: whether near-data compute works.
        events: what happened since the last snapshot, in order: tokens of a step by row, or a row that was given up.
    """

    ids: np.ndarray
    features: AdapterFeatures
    home: np.ndarray
    current: np.ndarray
    pinned: np.ndarray
    running: Mapping[int, int]
    kv: KvLoad
    rows: int
    near_data: bool
    events: Sequence[Mapping[int, int] | int]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Decision:
    """A plan with all that it was made from.

    Attributes:
        snapshot: of the engine.
        problem: made of it.
        plan: that was chosen.
        tokens: [N] expected a step.
        waiting: moves that have not paid yet, by row.
        seconds: that it took.
    """

    snapshot: Snapshot
    problem: PlanProblem
    plan: Plan
    tokens: np.ndarray
    waiting: Mapping[int, Waiting]
    seconds: float


class PlanWorker:
    """Decides; in one thread at a time.

    Args:
        model: what work costs.
        policy: chooses.
        adapter_bytes: device memory for adapters, of one shard.
        kv_bytes: device memory for KV, of one shard.
        attention: the only attention strategy allowed; None for all.
    """

    def __init__(
        self, model: CostModel, policy: Policy, *, adapter_bytes: float, kv_bytes: float, attention: str | None = None
    ) -> None:
        self._model, self._policy = model, policy
        self._adapter_bytes, self._kv_bytes, self._attention = adapter_bytes, kv_bytes, attention
        self._load = AdapterLoad(HALF_LIFE_STEPS)

    def decide(self, snapshot: Snapshot) -> Decision:
        """The plan for the coming steps.

        Raises:
            PlanError: there is none.
        """
        begun_s = time.perf_counter()
        self._learn(snapshot.events)
        tokens = self._tokens(snapshot)
        active = np.zeros(len(tokens), bool)
        active[list(snapshot.running)] = True
        problem = plan_problem(
            self._model,
            snapshot.features,
            snapshot.kv,
            tokens=tokens,
            budget_bytes=self._adapter_bytes + self._kv_bytes,
            rows=snapshot.rows,
            active=active,
            home=snapshot.home,
            current=snapshot.current,
            allowed=self._allowed(snapshot),
            near_data=snapshot.near_data,
            horizon_steps=HORIZON_STEPS,
            adapter_budget_bytes=self._adapter_bytes,
            kv_budget_bytes=self._kv_bytes,
        )
        if self._attention in problem.kv.strategies:
            problem = dataclasses.replace(problem, kv=_only(problem.kv, self._attention))
        plan = self._policy.choose(problem)
        waiting = dict(self._policy.waiting) if isinstance(self._policy, JointPlanner) else {}
        seconds = time.perf_counter() - begun_s
        return Decision(snapshot=snapshot, problem=problem, plan=plan, tokens=tokens, waiting=waiting, seconds=seconds)

    def _learn(self, events: Sequence[Mapping[int, int] | int]) -> None:
        for event in events:
            if isinstance(event, int):
                self._load.forget(event)
                self._policy.forget(event)
            else:
                self._load.observe(event)
                self._policy.observe(event)

    def _tokens(self, snapshot: Snapshot) -> np.ndarray:
        """[N] tokens a step: one of every running sequence; of idle adapters what they have had lately."""
        tokens = self._load.tokens_per_step(len(snapshot.ids))
        tokens[tokens < _NEVER] = 0.0
        np.minimum(tokens, 1.0, out=tokens)
        tokens[list(snapshot.running)] = list(snapshot.running.values())
        return tokens

    def _allowed(self, snapshot: Snapshot) -> np.ndarray:
        """[N, S]: all for most; for a pinned adapter the best that fits beside those pinned before it."""
        allowed = np.ones((len(snapshot.ids), len(LORA_COLUMNS)), bool)
        a, b = snapshot.features.stored_a_bytes, snapshot.features.stored_b_bytes
        left = self._adapter_bytes
        for row in np.flatnonzero(snapshot.pinned)[np.argsort(snapshot.ids[snapshot.pinned])]:
            needs = [(_RESIDENT, a[row] + b[row])]
            needs += [(_SPLIT, b[row]), (_NEAR_DATA, 0.0)] if snapshot.near_data else [(_FETCH, 0.0)]
            column, taken = next((column, size) for column, size in needs if size <= left)
            left -= taken
            allowed[row] = False
            allowed[row, column] = True
        return allowed


def _only(kv: KvChoice, attention: str | None) -> KvChoice:
    """The choice with one attention strategy."""
    at = [ATTENTION_COLUMNS.index(attention or "")]
    return dataclasses.replace(
        kv,
        strategies=(ATTENTION_COLUMNS[at[0]],),
        pool_load_s=kv.pool_load_s[at],
        pool_serial_s=kv.pool_serial_s[at],
    )
