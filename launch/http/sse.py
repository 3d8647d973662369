"""Server-sent events: a stream of JSON objects that ends with [DONE], whatever happens on the way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from launch.http.errors import as_api_error

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(Response):
    """Sends objects as they come.

    An exception of `events` becomes an error event, for the status line is out by then. When the client goes, `events`
    is closed at once. In every case `close` is called once at the end.

    Args:
        events: JSON objects to send.
        close: frees what the stream holds.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], *, close: Callable[[], None]) -> None:
        super().__init__(headers=_HEADERS)
        # The length is not known, so the connection says where the body ends.
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            results = await asyncio.gather(sending, gone, return_exceptions=True)
            await self._events.aclose()
            self._close()
        # A client that goes while a chunk is written shows as an OSError: nobody is left to tell.
        failure = results[0]
        if isinstance(failure, Exception) and not isinstance(failure, OSError):
            raise failure

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:
            try:
                async for event in events:
                    await send(_message(to_json(event)))
            except OSError:
                raise
            except Exception as error:
                await send(_message(to_json(as_api_error(error).body())))
        await send(_message(b"[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _message(data: bytes) -> Message:
    return {"type": "http.response.body", "body": b"data: %b\n\n" % data, "more_body": True}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
