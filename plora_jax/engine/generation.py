"""The client's end of a request: pieces of its completions as they come, in threads or in asyncio.

    for delta in generation: ...            # or: async for delta in generation
    completions = generation.collect()      # or: await generation.acollect()

A Generation has one consumer. The engine's thread puts pieces in; the consumer takes them out in its own thread or
event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from plora_jax.engine.errors import GenerationFailedError
from plora_jax.engine.outputs import Completion, Delta


@dataclasses.dataclass
class GenerationTimes:
    """Clock times of a request, seconds; None where it has not happened (yet).

    Attributes:
        arrival_s: submitted.
        scheduled_s: first part of a step given to it.
        first_token_s: first token of any of its completions.
        finished_s: last completion ended.
    """

    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


class Waiter(NamedTuple):
    """A consumer in an event loop.

    Attributes:
        loop: its loop.
        woken: what it waits for.
    """

    loop: asyncio.AbstractEventLoop
    woken: asyncio.Future[None]


class Generation:
    """One request of n completions. Made by `Engine.submit`.

    Attributes:
        request_id: unique in the engine.
        n: number of completions.
        prompt_tokens: tokens of the prompt.
        adapter: name of the adapter, None for the base model.
        times: when it was submitted, started and ended.
    """

    def __init__(
        self,
        request_id: str,
        n: int,
        *,
        prompt_tokens: int,
        adapter: str | None,
        arrival_s: float,
        cancel: Callable[[Generation], None],
        drive: Callable[[], bool],
    ) -> None:
        self.request_id, self.n, self.prompt_tokens, self.adapter = request_id, n, prompt_tokens, adapter
        self.times = GenerationTimes(arrival_s)
        self._cancel, self._drive = cancel, drive
        self._deltas: collections.deque[Delta] = collections.deque()
        self._ready = threading.Condition()
        self._unfinished, self._untaken = n, n
        self._waiters: list[Waiter] = []

    @property
    def unfinished(self) -> int:
        """How many completions go on; pieces of those that ended may still wait to be taken."""
        return self._unfinished

    @property
    def finished(self) -> bool:
        """Whether every completion ended."""
        return self._unfinished == 0

    def cancel(self) -> None:
        """Ends what is not ended, with finish_reason "abort". Any thread; as often as you like."""
        if not self.finished:
            self._cancel(self)

    def deliver(self, delta: Delta) -> list[Waiter]:
        """Puts a piece in. For the engine.

        Returns:
            Who waits for it in an event loop: to be woken (`wake`), together with others.
        """
        with self._ready:
            assert self._unfinished, f"{self.request_id} got a piece after its end"
            self._deltas.append(delta)
            self._unfinished -= delta.finish_reason is not None
            self._ready.notify_all()
            waiters, self._waiters = self._waiters, []
        return waiters

    def collect(self) -> list[Completion]:
        """Waits for the end and puts the pieces together.

        Returns:
            n completions, by index.

        Raises:
            GenerationFailedError: one of them ended with an error.
        """
        return assemble(self, self.n)

    async def acollect(self) -> list[Completion]:
        """`collect` for asyncio."""
        return assemble([delta async for delta in self], self.n)

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Delta:
        while True:
            with self._ready:
                if self._deltas or not self._untaken:
                    break
            if not self._drive():
                with self._ready:
                    self._ready.wait_for(lambda: self._deltas)
        delta = self._take()
        if delta is None:
            raise StopIteration
        return delta

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        loop = asyncio.get_running_loop()
        while True:
            with self._ready:
                if self._deltas or not self._untaken:
                    break
                waiter = Waiter(loop, loop.create_future())
                self._waiters = [waiter]
            if not self._drive():
                await waiter.woken
        delta = self._take()
        if delta is None:
            raise StopAsyncIteration
        return delta

    def _take(self) -> Delta | None:
        with self._ready:
            if not self._deltas:
                return None
            delta = self._deltas.popleft()
            self._untaken -= delta.finish_reason is not None
            return delta


def assemble(deltas: Iterable[Delta], n: int) -> list[Completion]:
    """Puts pieces together to n completions.

    Raises:
        GenerationFailedError: one of them ended with an error.
    """
    pieces: list[list[Delta]] = [[] for _ in range(n)]
    for delta in deltas:
        pieces[delta.index].append(delta)
    for of_one in pieces:
        if of_one[-1].finish_reason == "error":
            raise GenerationFailedError(of_one[-1].error or "the generation failed")
    return [_join(of_one) for of_one in pieces]


def _join(pieces: list[Delta]) -> Completion:
    last = pieces[-1]
    logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
    return Completion(
        index=last.index,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        finish_reason=last.finish_reason or "abort",
        stop_reason=last.stop_reason,
        logprobs=tuple(logprobs) if any(piece.logprobs is not None for piece in pieces) else None,
        prompt_logprobs=next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
    )


def wake(waiters: Iterable[Waiter]) -> None:
    """Wakes who waits, each event loop once: to wake one takes a system call and hands the interpreter over."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.loop, []).append(waiter.woken)
    for loop, woken in by_loop.items():
        # A loop that was closed has lost its consumers, who will not come back.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_wake_all, woken)


def _wake_all(woken: list[asyncio.Future[None]]) -> None:
    for future in woken:
        if not future.done():
            future.set_result(None)
