"""One HTTP request on its way through the engine: a generation for each prompt, cancelled when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from fastapi import Request

from launch.http.errors import ApiError
from launch.http.state import ServerState
from plora_jax.engine.generation import Generation, assemble
from plora_jax.engine.outputs import Completion, Delta
from plora_jax.engine.params import SamplingParams

_T = TypeVar("_T")


class Piece(NamedTuple):
    """A delta and whose it is.

    Attributes:
        prompt: which prompt of the request.
        choice: which choice of the answer: prompt * n + the completion's index.
        delta: what it gained.
    """

    prompt: int
    choice: int
    delta: Delta


class Usage:
    """Tokens of a request, counted as they pass."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens, self.completion_tokens = prompt_tokens, 0

    def as_json(self) -> dict[str, int]:
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


class Flight:
    """The generations of one HTTP request.

    Made by `submit`; whoever holds it must call `close`, after which nothing of it is left in the engine.
    """

    def __init__(self, state: ServerState, prompts: Sequence[Sequence[int]], generations: list[Generation]) -> None:
        self._state, self._generations = state, generations
        self.prompts = prompts
        self.usage = Usage(sum(map(len, prompts)))
        state.flights.add(self)

    @classmethod
    def submit(
        cls,
        state: ServerState,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingParams],
        *,
        adapter: str | None,
        priority: int,
    ) -> Flight:
        """Submits every prompt with its options, or none.

        Raises:
            ApiError, RequestError, UnknownAdapterError, OverloadedError, EngineDeadError: as the engine says.
        """
        state.check_open()
        generations: list[Generation] = []
        try:
            for prompt, sampling in zip(prompts, samplings, strict=True):
                generations.append(state.engine.submit(prompt, sampling, adapter=adapter, priority=priority))
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        return cls(state, prompts, generations)

    def cancel(self) -> None:
        """Ends every completion with finish_reason "abort"; the pieces still come."""
        for generation in self._generations:
            generation.cancel()

    def close(self) -> None:
        """Leaves nothing running. As often as you like."""
        self.cancel()
        self._state.flights.discard(self)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces of all completions as they come. Raises ApiError where one fails."""
        if len(self._generations) == 1:
            async for delta in self._generations[0]:
                yield self._passing(0, delta)
            return
        queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(i, queue)) for i in range(len(self._generations))]
        try:
            for _ in tasks:
                while (item := await queue.get()) is not None:
                    if isinstance(item, BaseException):
                        raise item
                    yield self._passing(*item)
        finally:
            for task in tasks:
                task.cancel()

    async def collect(self) -> list[Completion]:
        """All completions by choice index. Raises ApiError where one fails."""
        gathered: list[list[Delta]] = [[] for _ in self._generations]
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                gathered[piece.prompt].append(piece.delta)
        return [
            completion
            for generation, deltas in zip(self._generations, gathered, strict=True)
            for completion in assemble(deltas, generation.n)
        ]

    async def _feed(self, prompt: int, queue: asyncio.Queue[tuple[int, Delta] | BaseException | None]) -> None:
        try:
            async for delta in self._generations[prompt]:
                queue.put_nowait((prompt, delta))
        except Exception as error:
            queue.put_nowait(error)
        queue.put_nowait(None)

    def _passing(self, prompt: int, delta: Delta) -> Piece:
        """A delta as a piece, its tokens counted. Raises ApiError where the completion failed."""
        self.usage.completion_tokens += len(delta.token_ids)
        if delta.finish_reason == "error":
            status = 500 if self._state.engine.healthy else 503
            raise ApiError(status, delta.error or "The generation failed.")
        return Piece(prompt, prompt * self._generations[prompt].n + delta.index, delta)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Awaits `work`, and cancels it when the client disconnects; then None."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
