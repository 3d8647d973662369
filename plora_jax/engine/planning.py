"""The planner in the engine: it looks between two steps, thinks in a thread of its own, and acts between later ones.

    turn = planner.between_steps(scheduler.running)     # before a step is scheduled
    planner.observe(plan)                               # when it is

No step waits for a plan. What a plan wants on the device is copied a few pages a step; who is served how changes when
the copies are complete.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from memory_pool.adapter_pool import AdapterPool
from memory_pool.kv_pool import ABSENT, KvPool
from memory_pool.near_unit import NearDataUnit
from plora_jax.engine.adapter_rows import NOBODY, AdapterRows
from plora_jax.engine.near_guard import AttentionChoice
from plora_jax.engine.placement import Turn
from plora_jax.engine.plan import Sequence, StepPlan
from plora_jax.engine.plan_reasons import PlanReasons
from plora_jax.engine.plan_worker import Decision, PlanWorker, Snapshot
from strategies.cost import KvLoad

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 8
"""Intervals after which a plan is made though nothing has changed: contexts and idle loads drift."""

_KV_STEPS = 4
"""A plan is made when the KV of the running sequences is this part of an octave more or less."""


class Worker(Protocol):
    """Makes decisions from snapshots, in another thread."""

    def decide(self, snapshot: Snapshot) -> Decision: ...


class EnginePlanner:
    """Plans for one engine; all but `reasons` belongs to the engine's thread.

    Args:
        worker: decides.
        kv: KV pages.
        attention: the choice that steps read.
        unit: near the data.
        adapters: whose strategies are planned; None where they are forced or there are none.
        rows: of those adapters; None as above.
        decode_rows: rows of the compiled programs that only decode, ascending.
        interval_steps: least steps between two plans.
        most_pages: pages copied between two steps.
        about: who plans, and for which machine, in a line.
        thread: where the worker runs; by default a thread of its own.
    """

    def __init__(
        self,
        worker: PlanWorker | Worker,
        *,
        kv: KvPool,
        attention: AttentionChoice,
        unit: NearDataUnit,
        adapters: AdapterPool | None,
        rows: AdapterRows,
        decode_rows: SequenceOf[int],
        interval_steps: int,
        most_pages: int,
        about: str,
        thread: Executor | None = None,
    ) -> None:
        self._worker, self._kv, self._attention, self._unit = worker, kv, attention, unit
        self._adapters, self._rows, self._decode_rows = adapters, rows, tuple(decode_rows)
        self._interval, self._most_pages = interval_steps, most_pages
        self.about = about
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._future: Future[Decision] | None = None
        self._decision: Decision | None = None
        self._events: list[dict[int, int] | int] = []
        self._steps = interval_steps  # since the last snapshot: the first is taken at once
        self._known: object = None
        self._failures = 0

    @property
    def decision(self) -> Decision | None:
        """The decision that holds; None before the first."""
        return self._decision

    @property
    def plans_adapters(self) -> bool:
        """Whether strategies of adapters are part of the plan."""
        return self._adapters is not None

    def between_steps(self, running: SequenceOf[Sequence]) -> Turn:
        """Applies a plan that is ready, copies a few pages, and has another plan made if it is time.

        Args:
            running: sequences that will have tokens in the next steps.
        """
        planned_s = self._take_decision()
        moved = 0 if self._adapters is None else self._adapters.migrate(self._most_pages)
        moved += self._kv.bring(self._most_pages - moved)
        self._follow_pool()
        if running and self._future is None and self._steps >= self._interval and self._is_due(running):
            self._steps = 0
            self._future = self._thread.submit(self._worker.decide, self._snapshot(running))
        return Turn(moved, planned_s)

    def observe(self, plan: StepPlan) -> None:
        """Counts a step and the tokens that it has of each adapter."""
        if not plan.rows:
            return
        self._steps += 1
        tokens: collections.Counter[int] = collections.Counter()
        for step_row in plan.rows:
            if (row := self._rows.row(step_row.sequence.adapter_id)) is not None:
                tokens[row] += step_row.count
        self._events.append(dict(tokens))

    def reasons(self) -> PlanReasons | None:
        """Why adapters are served as they are; None before the first plan and where it is not planned. Any thread."""
        decision = self._decision
        return None if decision is None or self._adapters is None else PlanReasons(decision)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _follow_pool(self) -> None:
        if self._adapters is not None:
            self._events += self._rows.update()

    def _is_due(self, running: SequenceOf[Sequence]) -> bool:
        """Whether anything changed enough since the last plan, or a move waits until it pays, or much time passed."""
        tokens = sum(sequence.computed for sequence in running)
        users = frozenset(sequence.adapter_id for sequence in running)
        known = (users, len(running), int(_KV_STEPS * np.log2(1 + tokens)), len(self._rows.ids), self._unit.failure)
        waits = self._decision is not None and bool(self._decision.waiting)
        if known == self._known and not waits and self._steps < _LOOK_AGAIN * self._interval:
            return False
        self._known = known
        return True

    def _snapshot(self, running: SequenceOf[Sequence]) -> Snapshot:
        events, self._events = self._events, []
        used = collections.Counter(self._rows.row(sequence.adapter_id) for sequence in running)
        rows = self._rows
        return Snapshot(
            ids=rows.ids,
            features=rows.features,
            home=rows.home,
            current=rows.current,
            pinned=rows.pinned,
            running={row: count for row, count in used.items() if row is not None},
            kv=self._kv_load(running),
            rows=next((rows for rows in self._decode_rows if rows >= len(running)), len(running)),
            near_data=self._unit.failure is None,
            events=events,
        )

    def _kv_load(self, running: SequenceOf[Sequence]) -> KvLoad:
        page = self._kv.page_tokens
        contexts = np.array([sequence.computed + 1 for sequence in running])
        total = int((-(-contexts // page)).sum())
        handles = [sequence.kv for sequence in running if sequence.kv is not None]
        here = sum(int(np.count_nonzero(kv.device_table() != ABSENT)) for kv in handles)
        written = sum(max(1, kv.ready // page - kv.computed // page) for kv in handles)
        return KvLoad(
            contexts=contexts,
            queries=np.ones(len(running), int),
            page_tokens=page,
            current_fraction=min(1.0, here / total),
            min_fraction=min(1.0, written / total),
        )

    def _take_decision(self) -> float | None:
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        try:
            decision = future.result()
        except Exception as error:
            self._failures += 1
            # What has no plan is served as before; one line in many, since it may go on like that.
            if self._failures & (self._failures - 1) == 0:
                logger.warning("no plan could be made, %d times so far: %r", self._failures, error)
            return None
        self._decision = decision
        self._apply(decision)
        return decision.seconds

    def _apply(self, decision: Decision) -> None:
        self._attention.choose(decision.plan.attention)
        self._keep_kv(decision)
        if self._adapters is None:
            return
        problem, plan, ids = decision.problem, decision.plan, decision.snapshot.ids
        now = self._rows
        same = (ids == now.ids[: len(ids)]) & (ids != NOBODY)
        moving = np.flatnonzero(same & (plan.strategy != now.current[: len(ids)]))
        # Who gives memory back goes first.
        for row in moving[np.argsort(problem.device_bytes[moving, plan.strategy[moving]], kind="stable")].tolist():
            if self._adapters.figures(int(ids[row])) is not None:
                self._adapters.wish(int(ids[row]), problem.strategies[int(plan.strategy[row])])

    def _keep_kv(self, decision: Decision) -> None:
        """Sets how many copies of KV pages stay; where the plan takes all that there is, also those of later steps."""
        kv, fraction = decision.problem.kv, decision.plan.kv_fraction
        load = decision.snapshot.kv
        total = int((-(-load.contexts // load.page_tokens)).sum())
        page_bytes = kv.device_bytes / max(total, 1)
        most = np.inf if kv.kv_budget_bytes is None else kv.kv_budget_bytes
        if fraction >= 1 or fraction * kv.device_bytes > most - page_bytes:
            self._kv.keep(None)
        else:
            self._kv.keep(max(0, round((fraction - load.min_fraction) * total)))
