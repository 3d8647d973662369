"""What completion and chat answers share: identity, usage, and one way to run a request for both."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from launch.http.flight import Flight, unless_gone
from launch.http.protocol import GenerationRequest
from launch.http.sse import EventStream

# What nginx logs where the client went first; nobody reads it.
_CLIENT_GONE = 499


class Envelope:
    """The fields that every object of one answer carries."""

    def __init__(self, prefix: str, *, kind: str, model: str) -> None:
        self._fields = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        self._fields["model"] = model

    def wrap(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._fields, "choices": choices, **more}


async def answer_whole(request: Request, flight: Flight, make: Callable[[list[Any]], dict[str, Any]]) -> Response:
    """Waits for every completion and answers with one JSON body; a client that goes cancels them.

    Args:
        request: the client's.
        flight: submitted; closed here.
        make: the body, from the completions by choice index.
    """
    try:
        completions = await unless_gone(request, flight.collect())
    finally:
        flight.close()
    return Response(status_code=_CLIENT_GONE) if completions is None else JSONResponse(make(completions))


def usage_of_chunk(body: GenerationRequest, usage: Callable[[], dict[str, int]]) -> dict[str, Any]:
    """The field of token counts that a chunk with choices has: none, null, or the counts so far."""
    if not body.include_usage:
        return {}
    return {"usage": usage() if body.continuous_usage else None}


def answer_stream(flight: Flight, events: AsyncGenerator[dict[str, Any], None]) -> EventStream:
    """Streams events; closes the flight at the end."""
    return EventStream(events, close=flight.close)
