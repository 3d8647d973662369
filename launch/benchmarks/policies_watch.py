"""Looks at every step of an engine from where its planner stands: between the steps.

A step is counted from one look to the next: the planner's turn, the step itself, and the delivery of its tokens. That
is what the streams wait for between two tokens, so the mean over steps, weighted by their tokens, is the mean ITL as
the engine gives it, however late a client reads. The time in which an engine waits for its turn among others is not
part of it. The first steps of a turn take up to twice as long: caches hold what the engine before needed, and its
clients still take their tokens. They say nothing of a policy and are told apart.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from memory_pool.adapter_pool import AdapterPool
from memory_pool.ledger import Ledger
from plora_jax.engine.placement import PlacementPlanner, Reasons, Turn
from plora_jax.engine.plan import Sequence, StepPlan
from plora_jax.engine.planning import EnginePlanner
from strategies.strategy_table import LORA

SETTLING_STEPS = 3
"""Steps of a turn that are slow because they are its first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        seconds: that it took, with the planner's turn before it and the delivery of its tokens.
        settled: whether it is none of the first of the engine's turn.
        started: requests that had been part of a step by then, this one included.
        rows: sequences that have tokens in it.
        served: adapter and strategy of each token that is decoded.
        prefill_tokens: tokens of prompts.
        moved_pages: pages copied to the device just before it.
        planned_s: seconds of a plan that was applied just before it; None where there was none.
        predicted_s: what the plan that holds says a step takes; None without a plan.
    """

    seconds: float
    settled: bool
    started: int
    rows: int
    served: tuple[tuple[int, str], ...]
    prefill_tokens: int
    moved_pages: int
    planned_s: float | None
    predicted_s: float | None


class WatchedPlanner:
    """A planner that is looked at; the engine's thread but for `steps` and `link_bytes` after the run.

    Args:
        inner: plans.
        pool: where adapters are.
        ledger: of the link.
        first: requests that have started when the measured part begins.
        last: requests that have started when it ends.
        wait: returns when this engine may make a step, how many it has made in its turn.

    Attributes:
        steps: of the measured part.
        is_over: whether the measured part has ended.
    """

    def __init__(
        self,
        inner: PlacementPlanner | None,
        pool: AdapterPool,
        ledger: Ledger,
        *,
        first: int,
        last: int,
        wait: Callable[[], int] = lambda: SETTLING_STEPS,
    ) -> None:
        self._inner, self._pool, self._ledger = inner, pool, ledger
        self._first, self._last, self._wait = first, last, wait
        self._seen: set[int] = set()
        self._begun_s, self._turn, self._settled = 0.0, Turn(0, None), True
        self._link_bytes: list[int] = []
        self._under_way: Step | None = None
        self.steps: list[Step] = []
        self.is_over = False

    @property
    def plans_adapters(self) -> bool:
        return self._inner is not None and self._inner.plans_adapters

    @property
    def link_bytes(self) -> int:
        """Bytes that LoRA strategies moved over the link in the measured part, copies to the device included."""
        begin, end = self._link_bytes
        return end - begin

    def between_steps(self, running: SequenceOf[Sequence]) -> Turn:
        self._end_step()
        self._settled = self._wait() >= SETTLING_STEPS
        self._begun_s = time.perf_counter()
        self._turn = Turn(0, None) if self._inner is None else self._inner.between_steps(running)
        return self._turn

    def observe(self, plan: StepPlan) -> None:
        if self._inner is not None:
            self._inner.observe(plan)
        if not plan.rows or self.is_over:
            return
        self._seen.update(row.sequence.seq_id for row in plan.rows)
        started = len(self._seen)
        if started < self._first:
            return
        self.is_over = started >= self._last
        if not self._link_bytes or self.is_over:
            self._link_bytes.append(self._moved_bytes())
        if not self.is_over:
            self._under_way = self._step(plan, started)

    def reasons(self) -> Reasons | None:
        return None if self._inner is None else self._inner.reasons()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def _end_step(self) -> None:
        if self._under_way is not None:
            seconds = time.perf_counter() - self._begun_s
            self.steps.append(dataclasses.replace(self._under_way, seconds=seconds))
            self._under_way = None

    def _step(self, plan: StepPlan, started: int) -> Step:
        rows = [row for row in plan.rows if row.decode]
        decision = self._inner.decision if isinstance(self._inner, EnginePlanner) else None
        return Step(
            seconds=0.0,
            settled=self._settled,
            started=started,
            rows=len(plan.rows),
            served=tuple((id_, self._pool.placed(id_).strategy) for row in rows if (id_ := row.sequence.adapter_id)),
            prefill_tokens=sum(row.count for row in plan.rows if not row.decode),
            moved_pages=self._turn.moved_pages,
            planned_s=self._turn.planned_s,
            predicted_s=None if decision is None else decision.plan.step_s,
        )

    def _moved_bytes(self) -> int:
        return sum(size.moved for crossing, size in self._ledger.totals().items() if crossing.strategy in LORA)
