"""POST /v1/completions: text in, text out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from launch.http.answers import Envelope, answer_stream, answer_whole, usage_of_chunk
from launch.http.errors import ApiError
from launch.http.flight import Flight
from launch.http.logprobs import completion_logprobs, prompt_logprobs
from launch.http.protocol import CompletionRequest
from launch.http.state import ServerState, state_of
from plora_jax.engine.outputs import Completion, Delta, TokenLogprobs
from plora_jax.engine.params import SamplingParams

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continues each prompt n times."""
    state = state_of(request)
    if len(body.prompt) > state.config.max_prompts:
        most = state.config.max_prompts
        raise ApiError(400, f"prompt may hold at most {most} prompts, got {len(body.prompt)}.", param="prompt")
    if len(body.prompt) > 1:
        _check_count(state, len(body.prompt) * (body.n or 1))
    special = body.add_special_tokens is not False
    prompts = [
        await state.encode(prompt, add_special_tokens=special, param="prompt") if isinstance(prompt, str) else prompt
        for prompt in body.prompt
    ]
    asked = body.to_sampling()
    samplings = [_fit_default(asked, body, room=state.max_model_len - len(prompt)) for prompt in prompts]
    flight = Flight.submit(state, prompts, samplings, adapter=state.adapter_of(body.model), priority=body.priority)
    writer = _Writer(state, body, flight)
    if body.stream:
        return answer_stream(flight, writer.events())
    return await answer_whole(request, flight, writer.whole)


def _check_count(state: ServerState, completions: int) -> None:
    """Raises ApiError where a request is larger than the server, so that coming back later would not help."""
    limits = state.engine.scheduler_config
    most = limits.max_num_seqs + limits.max_waiting
    if completions > most:
        raise ApiError(400, f"The request asks for {completions} completions; at most {most} fit at once.", param="n")


def _fit_default(sampling: SamplingParams, body: CompletionRequest, *, room: int) -> SamplingParams:
    """Lowers the default of max_tokens, which the client did not ask for, to what the context has left."""
    if body.max_tokens is not None or sampling.max_tokens is None:
        return sampling
    return dataclasses.replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room)))


class _Writer:
    """Writes the choices of one answer, whole or piece by piece."""

    def __init__(self, state: ServerState, body: CompletionRequest, flight: Flight) -> None:
        self._tokenizer, self._decode_all = state.tokenizer, state.decode_all
        self._body, self._flight, self._n = body, flight, body.n or 1
        self._envelope = Envelope("cmpl", kind="text_completion", model=body.model or state.model_names[0])
        self._prompt_only, self._echoed = body.prompt_only, set[int]()
        self._offsets: dict[int, int] = {}

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return self._envelope.wrap(choices, usage=self._usage())

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        async with contextlib.aclosing(self._flight.pieces()) as pieces:
            async for piece in pieces:
                choice = self._choice(piece.choice, piece.delta)
                if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
                    yield self._envelope.wrap([choice], **usage_of_chunk(self._body, self._usage))
        if self._body.include_usage:
            yield self._envelope.wrap([], usage=self._usage())

    def _usage(self) -> dict[str, int]:
        if self._prompt_only:
            self._flight.usage.completion_tokens = 0
        return self._flight.usage.as_json()

    def _choice(self, index: int, piece: Completion | Delta) -> dict[str, Any]:
        """A choice of what a completion holds or gained; the first one of an echo starts with the prompt."""
        prompt = index // self._n
        echoed = self._body.echo and index not in self._echoed
        text = "" if self._prompt_only else piece.text
        if echoed:
            self._echoed.add(index)
            text = self._prompt_text(prompt) + text
        logprobs = None
        if self._body.logprobs is not None and piece.logprobs is not None:
            logprobs = self._logprobs(index, piece, prompt_ids=self._flight.prompts[prompt] if echoed else ())
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if not self._body.stream:
            asked = self._body.prompt_logprobs is not None and piece.prompt_logprobs is not None
            entries = piece.prompt_logprobs if asked else None
            named = None if entries is None else prompt_logprobs(entries, token_text=self._tokenizer.token_text)
            choice["prompt_logprobs"] = named
        return choice

    def _logprobs(self, index: int, piece: Completion | Delta, *, prompt_ids: Sequence[int]) -> dict[str, Any]:
        entries: list[TokenLogprobs | None] = []
        if prompt_ids:
            entries += piece.prompt_logprobs or [None] * len(prompt_ids)
        ids = list(prompt_ids)
        if piece.logprobs and not self._prompt_only:
            entries += piece.logprobs
            ids += piece.token_ids
        shape, self._offsets[index] = completion_logprobs(
            entries, ids, token_text=self._tokenizer.token_text, offset=self._offsets.get(index, 0)
        )
        return shape

    def _prompt_text(self, prompt: int) -> str:
        given = self._body.prompt[prompt]
        return given if isinstance(given, str) else self._decode_all(given)
