"""Who runs in the next step: continuous batching with chunked prefill, preemption and adapters that take turns.

    plan = scheduler.schedule()                  # decode rows first, prefill chunks in what is left of the step
    results = executor.execute(plan)
    for row, result in scheduler.complete(plan, results): ...

Sequences are ordered by (priority, arrival). The first of the running ones can always take the pages it needs, from
the last one if none is free, and a page space holds at least one sequence of the longest length: so it always finishes,
then the next one does, and nothing waits forever (for adapters, see `plora_jax.engine.turns`). Host state in plain
Python, owned by the engine's thread.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from memory_pool.pages import PageAllocator
from plora_jax.engine.budget import SchedulerConfig, StepBudget
from plora_jax.engine.plan import Row, RowResult, Sequence, StepPlan
from plora_jax.engine.residency import AdapterResidency
from plora_jax.engine.turns import AdapterTurns


class SchedulerStats(NamedTuple):
    """Where the sequences are.

    Attributes:
        running: sequences that hold pages and an adapter.
        waiting: sequences that hold nothing.
        preemptions: times a running sequence was sent back to wait, since the start.
        kv_usage: share of the KV pages that are taken, 0 to 1.
    """

    running: int
    waiting: int
    preemptions: int
    kv_usage: float


class Scheduler:
    """Owns the sequences from `add` to `remove`, and everything they hold.

    Args:
        config: limits of a step.
        pages: KV pages; nobody else takes from them.
        adapters: references of running sequences to adapters.

    Raises:
        ValueError: the limits contradict each other, or the pages cannot hold one sequence of max_model_len tokens.
    """

    def __init__(self, config: SchedulerConfig, pages: PageAllocator, adapters: AdapterResidency) -> None:
        config.validate(pages.num_usable)
        self.config = config
        self._pages = pages
        self._turns = AdapterTurns(adapters, config.max_adapter_passes)
        self._by_id: dict[int, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._unservable: list[Sequence] = []
        self._preemptions = 0

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    def stats(self) -> SchedulerStats:
        """Numbers of now. May be called from any thread."""
        usage = 1 - self._pages.num_free / self._pages.num_usable
        return SchedulerStats(len(self._running), len(self._waiting), self._preemptions, usage)

    def add(self, seq: Sequence) -> None:
        """Puts a new sequence into the waiting queue."""
        longest = len(seq.prompt_ids) + (seq.sampling.max_tokens or 0)
        assert seq.prompt_ids, f"sequence {seq.seq_id} is empty"
        assert seq.sampling.max_tokens, f"sequence {seq.seq_id} has no end: resolve max_tokens"
        assert longest <= self.config.max_model_len, f"sequence {seq.seq_id} may grow to {longest} tokens"
        assert seq.seq_id not in self._by_id, f"sequence {seq.seq_id} is already here"
        self._by_id[seq.seq_id] = seq
        bisect.insort(self._waiting, seq, key=_order)

    def remove(self, seq_id: int) -> bool:
        """Takes a sequence out, wherever it is, because it ended or was cancelled; gives back what it holds.

        Returns:
            False where there is no such sequence.
        """
        seq = self._by_id.pop(seq_id, None)
        if seq is None:
            return False
        if _take(self._running, seq):
            self._give_back(seq)
        else:
            _take(self._waiting, seq)
        self._turns.forget(seq_id)
        return True

    def take_unservable(self) -> list[Sequence]:
        """Sequences taken out of the queue because their adapter cannot be held even alone; the caller fails them."""
        unservable, self._unservable = self._unservable, []
        return unservable

    def schedule(self) -> StepPlan:
        """Plans one step.

        Returns:
            Rows; none where nothing can run now. Their sequences hold the pages of every token planned.

        Mutates:
            pages, adapter references and both queues: sequences may be admitted or preempted.
        """
        budget = StepBudget(self.config)
        rows: dict[int, Row] = {}
        self._plan_decodes(rows, budget)
        self._plan_prefills(rows, budget)
        self._admit(rows, budget)
        return StepPlan(sorted(rows.values(), key=lambda row: not row.decode))

    def complete(self, plan: StepPlan, results: SequenceOf[RowResult]) -> list[tuple[Row, RowResult]]:
        """Books the results of a step: computed tokens and the tokens drawn.

        Returns:
            The rows with their results, in the order of the plan. Who ended is the caller's business: `remove` it.
        """
        done = list(zip(plan.rows, results, strict=True))
        for row, result in done:
            seq = row.sequence
            if seq.seq_id not in self._by_id:
                continue
            seq.computed += row.count
            if row.samples:
                assert result.token_id is not None, f"sequence {seq.seq_id} drew no token"
                seq.output_ids.append(result.token_id)
        return done

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages and adapter references are exactly those of the running sequences."""
        self._pages.check_integrity()
        held = collections.Counter(page for seq in self._running for page in seq.pages)
        assert sum(held.values()) + self._pages.num_free == self._pages.num_usable, "a page is lost or held twice"
        assert all(self._pages.references(page) == count for page, count in held.items()), "a page reference is lost"
        self._turns.check_integrity(self._running, self._waiting)
        for seq in self._running:
            assert seq.computed <= len(seq.pages) * self.config.page_tokens, f"sequence {seq.seq_id} lacks pages"
            assert len(seq.pages) <= self._pages_for(seq.num_tokens), f"sequence {seq.seq_id} holds pages too early"
        assert not any(seq.pages or seq.computed for seq in self._waiting), "a waiting sequence holds pages"
        assert len(self._running) <= self.config.max_num_seqs, "too many sequences run"
        for queue in (self._running, self._waiting):
            assert queue == sorted(queue, key=_order), "a queue is out of order"
        assert {s.seq_id for s in self._running + self._waiting} == set(self._by_id), "a sequence is lost"

    def _plan_decodes(self, rows: dict[int, Row], budget: StepBudget) -> None:
        for seq in tuple(self._running):
            if not _decodes(seq) or not _contains(self._running, seq):
                continue
            if self._provide(seq, 1, rows):
                rows[seq.seq_id] = Row(seq, seq.computed, 1, decode=True, samples=True)
                budget.take_decode()

    def _plan_prefills(self, rows: dict[int, Row], budget: StepBudget) -> None:
        for seq in tuple(self._running):
            if not _decodes(seq) and _contains(self._running, seq):
                self._plan_chunk(seq, rows, budget)

    def _admit(self, rows: dict[int, Row], budget: StepBudget) -> None:
        """Starts waiting sequences in order, as long as there is room for all their known tokens."""
        self._turns.begin()
        promised = sum(self._pages_for(seq.num_tokens) - len(seq.pages) for seq in self._running)
        for seq in tuple(self._waiting):
            if len(self._running) >= self.config.max_num_seqs or not budget.fit(1):
                return
            if not self._turns.may_start(seq):
                if self._turns.is_unservable(seq):
                    self.remove(seq.seq_id)
                    self._unservable.append(seq)
                continue
            promised += self._pages_for(seq.num_tokens)
            if not self._pages.can_alloc(promised):
                return
            _take(self._waiting, seq)
            bisect.insort(self._running, seq, key=_order)
            self._turns.start(seq)
            promised -= self._plan_chunk(seq, rows, budget)

    def _plan_chunk(self, seq: Sequence, rows: dict[int, Row], budget: StepBudget) -> int:
        """Plans as much of a prefill as budget and pages allow; returns the number of pages taken for it."""
        count, before = budget.fit(seq.num_tokens - seq.computed), len(seq.pages)
        # A shorter chunk costs less than another sequence's work, so only the first token of a chunk may preempt.
        if not count or not self._provide(seq, 1, rows):
            return 0
        room = (len(seq.pages) + self._pages.num_free) * self.config.page_tokens - seq.computed
        count = min(count, room)
        self._provide(seq, count, rows)
        samples = seq.computed + count == seq.num_tokens
        rows[seq.seq_id] = Row(seq, seq.computed, count, decode=False, samples=samples)
        budget.take_prefill(count)
        return len(seq.pages) - before

    def _provide(self, seq: Sequence, count: int, rows: dict[int, Row]) -> bool:
        """Gives a running sequence the pages of its next `count` tokens, from sequences behind it if none is free.

        Returns:
            False where there is nobody behind it: it keeps what it has and waits for those before it to end.
        """
        needed = self._pages_for(seq.computed + count) - len(seq.pages)
        while not self._pages.can_alloc(needed):
            last = self._running[-1]
            if last is seq:
                assert len(self._running) > 1, f"sequence {seq.seq_id} runs alone and lacks pages"
                return False
            rows.pop(last.seq_id, None)
            self._preempt(last)
        if needed > 0:
            seq.pages.extend(self._pages.alloc(needed))
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back to wait in its order; its tokens are kept and computed again later."""
        _take(self._running, seq)
        self._give_back(seq)
        bisect.insort(self._waiting, seq, key=_order)
        self._preemptions += 1

    def _give_back(self, seq: Sequence) -> None:
        self._pages.free(seq.pages)
        seq.pages, seq.computed = [], 0
        self._turns.stop(seq)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_tokens)


def _order(seq: Sequence) -> tuple[int, float, int]:
    return (seq.priority, seq.arrival_s, seq.seq_id)


def _decodes(seq: Sequence) -> bool:
    return bool(seq.output_ids) and seq.computed == seq.num_tokens - 1


def _contains(queue: list[Sequence], seq: Sequence) -> bool:
    at = bisect.bisect_left(queue, _order(seq), key=_order)
    return at < len(queue) and queue[at] is seq


def _take(queue: list[Sequence], seq: Sequence) -> bool:
    """Takes a sequence out of an ordered queue; False where it is not in it."""
    if not _contains(queue, seq):
        return False
    del queue[bisect.bisect_left(queue, _order(seq), key=_order)]
    return True
