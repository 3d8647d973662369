"""Who runs in the next step: continuous batching with chunked prefill, preemption and adapters that take turns.

    plan = scheduler.schedule()                  # decode rows first, prefill chunks in what is left of the step
    results = executor.execute(plan)
    for row, result in scheduler.complete(plan, results): ...

Keys and values have their home in the pool (`memory_pool.kv_pool`); the device holds the pages that are written to,
one for each decoding sequence. Where the pool is full, the last running sequence loses its keys and values and computes
them again later; those that only wait lose theirs first. Where the device is full, or as many run as may, a sequence of
higher priority takes the place of the last one, which is suspended: it goes on later where it was.

Sequences are ordered by (priority, arrival). The first of the running ones can always take the pages it needs, from
the last one if none is free, and pool and device hold at least what one sequence of the longest length needs: so it
always finishes, then the next one does, and nothing waits forever (for adapters, see `plora_jax.engine.turns`). Host
state in plain Python, owned by the engine's thread.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from memory_pool.kv_pool import KvHandle, KvPool, Lack
from plora_jax.engine.budget import SchedulerConfig, StepBudget
from plora_jax.engine.plan import Row, RowResult, Sequence, StepPlan
from plora_jax.engine.residency import AdapterResidency
from plora_jax.engine.turns import AdapterTurns


class SchedulerStats(NamedTuple):
    """Where the sequences are.

    Attributes:
        running: sequences that hold an adapter and may write to pages.
        waiting: sequences that do not; suspended ones hold pages of the pool.
        preemptions: times a running sequence was sent back to wait, since the start.
        suspensions: those of them that kept keys and values.
        restores: pages brought back to the device to be filled on, since the start.
        kv_usage: share of the pool's KV pages that are taken, 0 to 1.
    """

    running: int
    waiting: int
    preemptions: int
    suspensions: int
    restores: int
    kv_usage: float


class Scheduler:
    """Owns the sequences from `add` to `remove`, and everything they hold.

    Args:
        config: limits of a step.
        kv: KV pages in the pool and on the device.
        adapters: references of running sequences to adapters.

    Raises:
        ValueError: the limits contradict each other, the pool cannot hold one sequence of max_model_len tokens, or the
            device the pages that a step writes to.
    """

    def __init__(self, config: SchedulerConfig, kv: KvPool, adapters: AdapterResidency) -> None:
        config.validate(pool_pages=kv.num_free_pages, device_pages=kv.num_device_pages)
        self.config = config
        self._kv = kv
        self._turns = AdapterTurns(adapters, config.max_adapter_passes)
        self._by_id: dict[int, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._unservable: list[Sequence] = []
        self._preemptions = self._suspensions = 0

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    def stats(self) -> SchedulerStats:
        """Numbers of now. May be called from any thread."""
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            preemptions=self._preemptions,
            suspensions=self._suspensions,
            restores=self._kv.restores,
            kv_usage=self._kv.usage,
        )

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
            self._turns.stop(seq)
        else:
            _take(self._waiting, seq)
        self._drop(seq)
        self._turns.forget(seq_id)
        return True

    def take_unservable(self) -> list[Sequence]:
        """Sequences taken out of the queue because their adapter cannot be held even alone; the caller fails them."""
        unservable, self._unservable = self._unservable, []
        return unservable

    def schedule(self) -> StepPlan:
        """Plans one step.

        Returns:
            Rows; none where nothing can run now. Their sequences have pages on the device for every token planned.

        Mutates:
            pages, adapter references and both queues: sequences may be admitted or preempted.
        """
        budget = StepBudget(self.config)
        rows: dict[int, Row] = {}
        self._plan_decodes(rows, budget)
        self._plan_prefills(rows, budget)
        self._admit(rows, budget)
        return StepPlan(sorted(rows.values(), key=lambda row: not row.decode))

    def schedule_ahead(self, under_way: StepPlan) -> StepPlan:
        """Plans the step after one that is under way, before what that draws is known.

        Only a step of decode rows of those that now draw can be planned so: nobody may begin, go on with a prompt, lack
        pages or have to be looked at before the next draw. Who may end with the step under way is a row all the same.

        Returns:
            Rows; none where the step has to be planned when the one under way has ended.

        Mutates:
            pages: each row has one for its token.
        """
        drawing = {row.sequence.seq_id: row for row in under_way.rows if row.samples}
        rows = []
        for seq in self._running:
            row = drawing.get(seq.seq_id)
            if row is None or seq.sampling.penalises:
                return StepPlan(())
            end = row.start + row.count
            if end - len(seq.prompt_ids) + 1 < (seq.sampling.max_tokens or 0):
                rows.append(Row(seq, end, 1, decode=True, samples=True))
        if self._waiting and (len(rows) < self.config.max_num_seqs or self._outranks_last(self._waiting[0])):
            return StepPlan(())
        for row in rows:
            kv = _handle(row.sequence)
            if self._kv.lack(kv, row.start + 1) is not None:
                return StepPlan(())
            self._kv.extend(kv, row.start + 1)
        return StepPlan(rows, ahead=True)

    def complete(self, plan: StepPlan, results: SequenceOf[RowResult]) -> list[tuple[Row, RowResult]]:
        """Books the results of a step: computed tokens and the tokens drawn. Full pages are written to the pool.

        Returns:
            The rows with their results, in the order of the plan. Who ended is the caller's business: `remove` it.
        """
        done = list(zip(plan.rows, results, strict=True))
        held = [(row, kv) for row in plan.rows if (kv := row.sequence.kv) is not None]
        self._kv.commit((kv, row.start + row.count) for row, kv in held)
        for row, result in done:
            seq = row.sequence
            if seq.seq_id not in self._by_id:
                continue
            seq.computed += row.count
            # One that overflowed has no token; it is removed before the next step.
            if row.samples and result.overflowed is None:
                assert result.token_id is not None, f"sequence {seq.seq_id} drew no token"
                seq.output_ids.append(result.token_id)
        return done

    def rewind(self) -> None:
        """Goes on without what the device held of keys and values: they are computed again from what the pool holds."""
        self._kv.lose_device()
        for seq in self._by_id.values():
            seq.computed = seq.kv.computed if seq.kv else 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages and adapter references are exactly those of the sequences here."""
        self._kv.check_integrity()
        self._turns.check_integrity(self._running, self._waiting)
        everyone = self._running + self._waiting
        pages = sum(seq.kv.num_pages for seq in everyone if seq.kv)
        assert pages == self._kv.num_held_pages, "a page is held by nobody here"
        for seq in everyone:
            assert seq.computed == (seq.kv.computed if seq.kv else 0), f"sequence {seq.seq_id} lost count of its tokens"
            most = self._kv.pages_for(seq.num_tokens)
            assert not seq.kv or seq.kv.num_pages <= most, f"sequence {seq.seq_id} holds pages too early"
        assert all(seq.kv for seq in self._running), "a running sequence has no pages"
        assert all(seq.kv.suspended for seq in self._waiting if seq.kv), "a waiting sequence is not suspended"
        assert len(self._running) <= self.config.max_num_seqs, "too many sequences run"
        for queue in (self._running, self._waiting):
            assert queue == sorted(queue, key=_order), "a queue is out of order"
        assert {seq.seq_id for seq in everyone} == set(self._by_id), "a sequence is lost"

    def _plan_decodes(self, rows: dict[int, Row], budget: StepBudget) -> None:
        for seq in tuple(self._running):
            if _decodes(seq) and _contains(self._running, seq):
                self._plan_decode(seq, rows, budget)

    def _plan_prefills(self, rows: dict[int, Row], budget: StepBudget) -> None:
        for seq in tuple(self._running):
            if not _decodes(seq) and _contains(self._running, seq):
                self._plan_chunk(seq, rows, budget)

    def _admit(self, rows: dict[int, Row], budget: StepBudget) -> None:
        """Starts waiting sequences in order, as long as there is room for all their known tokens."""
        self._turns.begin()
        for seq in tuple(self._waiting):
            full = len(self._running) >= self.config.max_num_seqs
            if not budget.fit(1) or (full and not self._outranks_last(seq)):
                return
            if not self._turns.may_start(seq):
                if self._turns.is_unservable(seq):
                    self.remove(seq.seq_id)
                    self._unservable.append(seq)
                continue
            if not self._fits_pool(seq):
                return
            suspends = not self._fits_beside(seq)
            if suspends and not self._make_place(seq, rows):
                return
            _take(self._waiting, seq)
            bisect.insort(self._running, seq, key=_order)
            self._turns.start(seq)
            seq.kv = seq.kv or self._kv.open()
            plan = self._plan_decode if _decodes(seq) else self._plan_chunk
            plan(seq, rows, budget)
            if suspends:
                return  # Adapters were given back, which those asked about before in this round do not know of.

    def _fits_beside(self, seq: Sequence) -> bool:
        """Whether a waiting sequence can run beside the others, each with a page on the device to write to."""
        if len(self._running) >= self.config.max_num_seqs:
            return False
        return self._kv.lack(seq.kv or self._kv.open(), seq.computed + 1) is not Lack.DEVICE

    def _make_place(self, seq: Sequence, rows: dict[int, Row]) -> bool:
        """Suspends running sequences of lower priority, the last one first, until a waiting one fits."""
        while not self._fits_beside(seq):
            if not self._outranks_last(seq):
                return False
            last = self._running[-1]
            rows.pop(last.seq_id, None)
            self._preempt(last, keep=True)
        return True

    def _outranks_last(self, seq: Sequence) -> bool:
        return bool(self._running) and seq.priority < self._running[-1].priority

    def _fits_pool(self, seq: Sequence) -> bool:
        """Whether the pool has room for all known tokens of a waiting sequence and of the running ones."""
        needed = sum(self._kv.pages_for(s.num_tokens) - (s.kv.num_pages if s.kv else 0) for s in (*self._running, seq))
        if needed <= self._kv.num_free_pages:
            return True
        behind = self._waiting[bisect.bisect_right(self._waiting, _order(seq), key=_order) :]
        return needed <= self._kv.num_free_pages + sum(s.kv.num_pages for s in behind if s.kv)

    def _plan_decode(self, seq: Sequence, rows: dict[int, Row], budget: StepBudget) -> None:
        if self._provide(seq, 1, rows):
            rows[seq.seq_id] = Row(seq, seq.computed, 1, decode=True, samples=True)
            budget.take_decode()

    def _plan_chunk(self, seq: Sequence, rows: dict[int, Row], budget: StepBudget) -> None:
        """Plans as much of a prefill as budget and pages allow."""
        count, kv = budget.fit(seq.num_tokens - seq.computed), _handle(seq)
        if not count:
            return
        another = any(not row.decode for row in rows.values())
        if another and self._kv.lack(kv, seq.computed + 1) is Lack.DEVICE:
            return  # The chunk before it took the pages; all but one are free again after the step.
        # A shorter chunk costs less than another sequence's work, so only the first token of a chunk may preempt.
        if not self._provide(seq, 1, rows):
            return
        count = min(count, self._kv.room(kv))
        self._kv.extend(kv, seq.computed + count)
        samples = seq.computed + count == seq.num_tokens
        rows[seq.seq_id] = Row(seq, seq.computed, count, decode=False, samples=samples)
        budget.take_prefill(count)

    def _provide(self, seq: Sequence, count: int, rows: dict[int, Row]) -> bool:
        """Gives a running sequence the pages of its next `count` tokens, from sequences behind it if none is free.

        Returns:
            False where there is nobody behind it: it keeps what it has and waits for those before it to end.
        """
        kv, end = _handle(seq), seq.computed + count
        while (lack := self._kv.lack(kv, end)) is not None:
            if lack is Lack.POOL and self._drop_waiting():
                continue
            last = self._running[-1]
            if last is seq:
                assert len(self._running) > 1, f"sequence {seq.seq_id} runs alone and lacks {lack.value}"
                return False
            rows.pop(last.seq_id, None)
            self._preempt(last, keep=lack is Lack.DEVICE)
        self._kv.extend(kv, end)
        return True

    def _preempt(self, seq: Sequence, *, keep: bool) -> None:
        """Sends a running sequence back to wait in its order.

        Args:
            seq: the sequence; its tokens are kept in any case.
            keep: its keys and values stay in the pool; else they are computed again later.
        """
        _take(self._running, seq)
        self._turns.stop(seq)
        if keep and seq.computed:
            self._kv.suspend(_handle(seq))
            self._suspensions += 1
        else:
            self._drop(seq)
        bisect.insort(self._waiting, seq, key=_order)
        self._preemptions += 1

    def _drop_waiting(self) -> bool:
        """Drops the keys and values of the last sequence that waits with some; returns whether there is one."""
        for seq in reversed(self._waiting):
            if seq.kv:
                self._drop(seq)
                return True
        return False

    def _drop(self, seq: Sequence) -> None:
        if seq.kv:
            self._kv.close(seq.kv)
        seq.kv, seq.computed = None, 0


def _handle(seq: Sequence) -> KvHandle:
    assert seq.kv is not None, f"sequence {seq.seq_id} does not run"
    return seq.kv


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
