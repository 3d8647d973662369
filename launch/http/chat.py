"""POST /v1/chat/completions: messages in, the assistant's turn out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from launch.http.answers import Envelope, answer_stream, answer_whole, usage_of_chunk
from launch.http.errors import ApiError
from launch.http.flight import Flight
from launch.http.logprobs import chat_logprobs, prompt_logprobs
from launch.http.protocol import ChatRequest
from launch.http.state import ServerState, state_of
from plora_jax.engine.outputs import Completion, Delta
from plora_jax.engine.params import RequestError
from plora_jax.tokenizer import Tokenizer, render_chat

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation n times."""
    state = state_of(request)
    prompt = render_prompt(state.tokenizer, body, template=state.chat_template)
    prompt_ids = await state.encode(prompt, add_special_tokens=bool(body.add_special_tokens), param="messages")
    try:
        flight = Flight.submit(
            state, [prompt_ids], [body.to_sampling()], adapter=state.adapter_of(body.model), priority=body.priority
        )
    except RequestError as error:
        raise ApiError(400, str(error), param=_chat_param(error.param, body)) from error
    writer = _Writer(state, body, flight)
    if body.stream:
        return answer_stream(flight, writer.events())
    return await answer_whole(request, flight, writer.whole)


def render_prompt(tokenizer: Tokenizer, body: ChatRequest, *, template: str | None) -> str:
    """The text of the prompt that the messages stand for.

    Raises:
        ChatError: the template cannot render them.
        ApiError: the last message is to be continued, and the template does not show where it ends.
    """
    opens = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    kwargs = body.chat_template_kwargs or {}
    text = render_chat(tokenizer, body.messages, add_generation_prompt=opens, template=template, **kwargs)
    if not body.continue_final_message:
        return text
    content = body.messages[-1].get("content")
    ending = content.strip() if isinstance(content, str) else ""
    cut = text.rfind(ending) if ending else -1
    if cut < 0:
        message = "continue_final_message needs a last message with text that the chat template keeps."
        raise ApiError(400, message, param="continue_final_message")
    return text[: cut + len(ending)]


def _chat_param(param: str | None, body: ChatRequest) -> str | None:
    """The name that this API has for a field of the engine."""
    if param == "prompt":
        return "messages"
    if param == "max_tokens" and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return param


class _Writer:
    """Writes the choices of one answer, whole or piece by piece."""

    def __init__(self, state: ServerState, body: ChatRequest, flight: Flight) -> None:
        self._tokenizer, self._body, self._flight = state.tokenizer, body, flight
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._envelope = Envelope("chatcmpl", kind=kind, model=body.model or state.model_names[0])

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                **self._ending(completion),
            }
            for index, completion in enumerate(completions)
        ]
        more: dict[str, Any] = {"usage": self._flight.usage.as_json(), "prompt_logprobs": None}
        entries = completions[0].prompt_logprobs
        if self._body.prompt_logprobs is not None and entries is not None:
            more["prompt_logprobs"] = prompt_logprobs(entries, token_text=self._tokenizer.token_text)
        return self._envelope.wrap(choices, **more)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        usage = self._flight.usage
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        for index in range(self._body.n or 1):
            yield self._envelope.wrap([{"index": index, **opening}], **usage_of_chunk(self._body, usage.as_json))
        async with contextlib.aclosing(self._flight.pieces()) as pieces:
            async for piece in pieces:
                delta = {"content": piece.delta.text} if piece.delta.text else {}
                choice = {"index": piece.choice, "delta": delta, **self._ending(piece.delta)}
                if delta or choice["logprobs"] or choice["finish_reason"]:
                    yield self._envelope.wrap([choice], **usage_of_chunk(self._body, usage.as_json))
        if self._body.include_usage:
            yield self._envelope.wrap([], usage=usage.as_json())

    def _ending(self, piece: Completion | Delta) -> dict[str, Any]:
        """The part of a choice that whole answers and chunks share."""
        logprobs = None
        if self._body.logprobs and piece.logprobs is not None:
            logprobs = chat_logprobs(piece.logprobs, token_bytes=self._tokenizer.token_bytes)
        return {"logprobs": logprobs, "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
