"""The engine's loop: commands in, plan, execute, complete, deliver.

Everything that a step touches (scheduler, streams, references) belongs to whoever steps: the background thread after
`start`, else whoever waits for a generation. Other threads hand in commands, which run between two steps: quick ones
all at once (`post`), one of the others at a time (`run_between_steps`), so that no stream waits for more than one.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from plora_jax.engine import annotations
from plora_jax.engine.annotations import annotate
from plora_jax.engine.clock import Clock
from plora_jax.engine.errors import EngineDeadError, OverloadedError
from plora_jax.engine.generation import Generation, Waiter, wake
from plora_jax.engine.outputs import Delta
from plora_jax.engine.overflows import Overflows
from plora_jax.engine.placement import PlacementPlanner
from plora_jax.engine.plan import Executor, KvLostError, Row, RowResult, Sequence, StepPlan
from plora_jax.engine.scheduler import Scheduler
from plora_jax.engine.stats import Recorder
from plora_jax.engine.stream import TokenStream

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps that may fail in a row before the engine gives up: one bad request must not end it, a broken device must."""

T = TypeVar("T")

_RETRY_AFTER_S = 1.0
_STALLED_S = 0.001


class _Task:
    """A function that another thread waits for."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._done = threading.Event()
        self._result: object = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Runs the function and hands over what it returns or raises."""
        try:
            self._result = self._function()
        except Exception as error:
            self._error = error
        self._done.set()

    def fail(self, error: Exception) -> None:
        """Raises an error in the thread that waits."""
        self._error = error
        self._done.set()

    def wait(self) -> Any:
        """What the function returned; raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Live(NamedTuple):
    """A completion in flight."""

    generation: Generation
    stream: TokenStream


class EngineLoop:
    """Steps the scheduler and delivers what comes of it.

    Args:
        executor: carries out steps.
        scheduler: who runs.
        recorder: counts.
        clock: where times come from.
        release: told the adapter id of each sequence that ended, when it holds nothing any more.
        planner: who is served how; None where that is fixed. It may be replaced between two steps.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        recorder: Recorder,
        clock: Clock,
        release: Callable[[int], None],
        planner: PlacementPlanner | None = None,
    ) -> None:
        self._executor, self._scheduler, self._recorder = executor, scheduler, recorder
        self._clock, self._release, self.planner = clock, release, planner
        self._max_live = scheduler.config.max_num_seqs + scheduler.config.max_waiting
        self._lock = threading.Lock()  # over what clients share with the loop: _live, _closing, _dead
        self._live: dict[int, Live] = {}
        self._undelivered: list[tuple[Row, RowResult]] = []
        self._waiters: list[Waiter] = []
        self._textless: list[tuple[int, str]] = []  # identities, and why
        self._overflows = Overflows()
        executor.meanwhile = self._meanwhile
        self._under_way = self._ahead = StepPlan(())  # the step that is carried out; the one begun after it
        self._dead: str | None = None
        self._closing = False
        self._drain_until_s = 0.0
        self._failed_steps = 0
        self._stepping = threading.RLock()
        self._wake = threading.Condition()  # over the commands, the tasks and the thread
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._tasks: collections.deque[_Task] = collections.deque()
        self._thread: threading.Thread | None = None

    @property
    def healthy(self) -> bool:
        """Whether anything can be served: not dead, not shut down."""
        return self._dead is None and not (self._closing and self._thread is None)

    @property
    def num_live(self) -> int:
        """Completions in flight."""
        return len(self._live)

    def sequences(self) -> list[Sequence]:
        """All in flight, those not yet seen by the scheduler as well. Any thread."""
        with self._lock:
            return [live.stream.sequence for live in self._live.values()]

    def enter(self, count: int, make: Callable[[], list[Live]]) -> list[Live]:
        """Takes completions in, all or none. Any thread.

        Args:
            count: how many.
            make: makes them; called once it is sure that they are taken.

        Raises:
            EngineDeadError: nothing is taken in any more.
            OverloadedError: there is no room for so many.
        """
        with self._lock:
            if self._dead is not None:
                raise EngineDeadError(f"the engine is dead: {self._dead}")
            if self._closing:
                raise EngineDeadError("the engine is shutting down and takes no new requests")
            if len(self._live) + count > self._max_live:
                raise OverloadedError(
                    f"{len(self._live)} sequences are in flight and at most {self._max_live} are admitted; "
                    f"{count} more have to come later",
                    _RETRY_AFTER_S,
                )
            lives = make()
            self._live.update((live.stream.sequence.seq_id, live) for live in lives)
        self.post(lambda: self._enqueue(lives))
        return lives

    def cancel(self, generation: Generation) -> None:
        """Ends what is in flight of a generation. Any thread."""
        self.post(lambda: self._abort(lambda live: live.generation is generation))

    def post(self, command: Callable[[], None]) -> None:
        """Runs a command between two steps: soon on the thread, at once where there is none. Any thread."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify_all()
            has_thread = self._thread is not None
        if not has_thread:
            with self._stepping:
                self._run_commands()

    def run_between_steps(self, function: Callable[[], T]) -> T:
        """Runs a function between two steps, one such function after each step, and waits for it. Any thread.

        Without a thread, and on the engine's own, it runs at once.

        Args:
            function: may take as long as a stream can wait, and touch what steps touch.

        Returns:
            What the function returns.

        Raises:
            EngineDeadError: the engine is dead or shut down, or was so before it came to the function.
            Exception: what the function raises.
        """
        task = _Task(function)
        with self._wake:
            queued = self._thread is not None and self._thread is not threading.current_thread()
            if queued:
                self._tasks.append(task)
                self._wake.notify_all()
        if not queued:
            with self._stepping:
                self._check_alive()
                task.run()
        return task.wait()

    def drive(self) -> bool:
        """Steps once where there is no thread to do it; returns False where there is one."""
        if self._thread is not None:
            return False
        self.step()
        return True

    def start(self) -> None:
        """Steps in a background thread from now on."""
        with self._wake:
            if self._thread is not None or self._closing:
                raise RuntimeError("the engine is running already, or was shut down")
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def shutdown(self, drain_s: float) -> None:
        """Takes nothing in any more, steps on for up to `drain_s`, then cancels what is left and ends the thread."""
        with self._lock:
            if not self._closing:
                self._closing, self._drain_until_s = True, self._clock.now() + drain_s
        with self._wake:
            thread = self._thread
            self._wake.notify_all()
        if thread is not None:
            thread.join()
            return
        while not self._is_over():
            self.step()
        self._finish()

    def step(self) -> bool:
        """Runs the commands, at most one task and one step. Not while a thread does.

        Returns:
            Whether anything ran.
        """
        with self._stepping, annotate(annotations.STEP):
            with annotate(annotations.PLAN):
                self._run_commands()
                if not self._ahead.rows:
                    self._run_task()
                moved = self._move()
                plan = self._plan()
            done = self._execute(plan)
            self._deliver()
            self._fail_textless()
            with annotate(annotations.DELIVER):
                for row, result in done:
                    live = self._live.get(row.sequence.seq_id)
                    if live is None:
                        continue
                    if result.overflowed is not None:
                        self._fail_overflowed(live, result.overflowed)
                    elif live.stream.goes_on(result):
                        self._undelivered.append((row, result))
                    else:
                        self._advance(row, result)
                self._wake_waiters()
            if self._thread is None:
                self._deliver()
            self._fail_textless()
            return moved or bool(plan.rows)

    def _meanwhile(self) -> None:
        """What the host does while the device works on a step: it begins the next one, then delivers the last one."""
        self._ahead = StepPlan(())  # A step that is made once more has the one after it planned again.
        if self._may_run_ahead():
            with annotate(annotations.PLAN):
                plan = self._scheduler.schedule_ahead(self._under_way)
            if plan.rows and self._executor.begin(plan):
                self._ahead = plan
        self._deliver()

    def _may_run_ahead(self) -> bool:
        """Whether nobody waits for the end of the step: commands and tasks, or who drives it without a thread."""
        with self._wake:
            return self._thread is not None and not self._commands and not self._tasks

    def _deliver(self) -> None:
        """Delivers what the last step gave to completions that go on: while the device works on the next one."""
        with annotate(annotations.DELIVER):
            rows, self._undelivered = self._undelivered, []
            for row, result in rows:
                self._advance(row, result)
            self._wake_waiters()

    def _fail_textless(self) -> None:
        """Ends completions whose text could not be made. Not while a step is under way: it may have rows of theirs."""
        textless, self._textless = self._textless, []
        for seq_id, why in textless:
            self._fail(seq_id, why)

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        wake(waiters)

    def check_integrity(self) -> None:
        """Raises AssertionError unless what is in flight is what the scheduler holds. Between steps only."""
        self._scheduler.check_integrity()
        held = {seq.seq_id for seq in self._scheduler.running + self._scheduler.waiting}
        assert held == set(self._live), "a sequence is lost between loop and scheduler"

    def _run(self) -> None:
        try:
            while not self._is_over():
                if not self.step():
                    self._sleep()
        except Exception as error:
            logger.exception("the engine's loop failed")
            self._die(f"its loop failed: {_say(error)}")
        finally:
            with self._wake:
                self._thread = None
            self._finish()

    def _is_over(self) -> bool:
        if self._dead is not None:
            return True
        return self._closing and (not self._live or self._clock.now() >= self._drain_until_s)

    def _sleep(self) -> None:
        """Waits for a command; where sequences are in flight but none could run, only a moment."""
        with self._wake:
            if not self._commands and not self._tasks and not self._closing:
                self._wake.wait(_STALLED_S if self._live else None)

    def _finish(self) -> None:
        with self._wake:
            tasks, self._tasks = self._tasks, collections.deque()
        for task in tasks:
            task.fail(self._dead_error())
        with self._stepping:
            self._deliver()
            self._run_commands()
            self._abort(lambda live: True)
            if self.planner is not None:
                self.planner.close()

    def _run_commands(self) -> None:
        while True:
            with self._wake:
                if not self._commands:
                    return
                command = self._commands.popleft()
            self._deliver()
            command()

    def _run_task(self) -> None:
        with self._wake:
            task = self._tasks.popleft() if self._tasks else None
        if task is not None:
            self._deliver()
            task.run()

    def _check_alive(self) -> None:
        """Raises EngineDeadError where nothing runs any more."""
        if not self.healthy:
            raise self._dead_error()

    def _dead_error(self) -> EngineDeadError:
        why = "was shut down" if self._dead is None else f"is dead: {self._dead}"
        return EngineDeadError(f"the engine {why}")

    def _enqueue(self, lives: list[Live]) -> None:
        for live in lives:
            if live.stream.sequence.seq_id in self._live:
                self._scheduler.add(live.stream.sequence)

    def _move(self) -> bool:
        """What the planner does between two steps; returns whether anything was copied."""
        if self.planner is None or self._dead is not None:
            return False
        turn = self.planner.between_steps(self._scheduler.running)
        if turn.planned_s is not None:
            self._recorder.planned(turn.planned_s)
        return turn.moved_pages > 0

    def _plan(self) -> StepPlan:
        if self._dead is not None:
            return StepPlan(())
        plan, self._ahead = self._ahead, StepPlan(())
        if not plan.rows:
            plan = self._scheduler.schedule()
            for seq in self._scheduler.take_unservable():
                self._deliver()
                self._fail(seq.seq_id, "its adapter does not fit the device memory set aside for adapters")
            now = self._clock.now()
            for row in plan.rows:
                self._recorder.scheduled(self._live[row.sequence.seq_id].generation, now)
        if self.planner is not None:
            self.planner.observe(plan)
        return plan

    def _execute(self, plan: StepPlan) -> list[tuple[Row, RowResult]]:
        if not plan.rows:
            return []
        self._under_way = plan
        try:
            results = self._executor.execute(plan)
            if len(results) != len(plan.rows):
                raise RuntimeError(f"{len(results)} results came back for {len(plan.rows)} rows")
            done = self._scheduler.complete(plan, results)
        except KvLostError as error:
            logger.warning("%s: what the pool does not hold is computed again", error)
            self._ahead = StepPlan(())
            self._scheduler.rewind()
            if error.failure is not None:
                self._fail_step(plan, error.failure)
            return []
        except Exception as error:
            self._ahead = StepPlan(())
            self._fail_step(plan, error)
            return []
        self._failed_steps = 0
        self._recorder.stepped(ahead=plan.ahead)
        return done

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        """Ends the requests of a step that failed; the engine, too, where one failed after another."""
        logger.error("a step of %d rows failed", len(plan.rows), exc_info=error)
        self._deliver()
        self._failed_steps += 1
        for row in plan.rows:
            self._fail(row.sequence.seq_id, f"the step that computed it failed: {_say(error)}")
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._die(f"{MAX_FAILED_STEPS} steps in a row failed, the last with {_say(error)}")

    def _advance(self, row: Row, result: RowResult) -> None:
        seq = row.sequence
        live = self._live[seq.seq_id]
        try:
            delta = live.stream.advance(row, result)
        except Exception as error:
            logger.exception("a token of request %s failed", live.generation.request_id)
            self._textless.append((seq.seq_id, f"its text could not be made: {_say(error)}"))
            return
        if delta is None:
            return
        self._recorder.token(live.generation, seq, self._clock.now())
        if delta.finish_reason is None:
            self._waiters += live.generation.deliver(delta)
        else:
            self._end(seq.seq_id, delta)

    def _abort(self, which: Callable[[Live], bool]) -> None:
        for seq_id, live in list(self._live.items()):
            if which(live):
                self._end(seq_id, live.stream.abort())

    def _fail_overflowed(self, live: Live, dtype: str) -> None:
        seq = live.stream.sequence
        self._recorder.overflowed()
        self._fail(seq.seq_id, self._overflows.reason(seq.adapter_id, live.generation.adapter, dtype=dtype))

    def _fail(self, seq_id: int, why: str) -> None:
        if seq_id in self._live:
            self._end(seq_id, self._live[seq_id].stream.fail(why))

    def _end(self, seq_id: int, delta: Delta) -> None:
        """Gives back all that a completion holds, exactly once, and then delivers its last piece."""
        with self._lock:
            generation, stream = self._live.pop(seq_id)
        self._scheduler.remove(seq_id)
        self._release(stream.sequence.adapter_id)
        self._recorder.ended(stream.sequence, delta.finish_reason or "abort")
        if generation.unfinished == 1:
            self._recorder.request_ended(generation, self._clock.now())
        wake(generation.deliver(delta))

    def _die(self, why: str) -> None:
        logger.critical("the engine is dead: %s", why)
        with self._lock:
            self._dead = why
        for seq_id in list(self._live):
            self._fail(seq_id, f"the engine is dead: {why}")


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
