"""What stands before every route: the API key and the size of a body. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import hmac

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launch.http.errors import ApiError

_OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})


class KeyGuard:
    """Lets through who sends the key, and everybody to the paths that probes and scrapers use.

    Args:
        app: what is guarded.
        key: expected as `Authorization: Bearer KEY`.
    """

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app, self._expected = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "Unauthorized: send the API key as `Authorization: Bearer KEY`.")
        error.headers["WWW-Authenticate"] = "Bearer"
        await error.response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._expected)


class SizeGuard:
    """Refuses bodies over a size, those that say so at once and others when they pass it.

    Args:
        app: what is guarded.
        max_bytes: largest body.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await ApiError(413, self._message()).response()(scope, receive, send)
            return
        got = 0

        async def counted() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._max_bytes:
                # The one kind of exception that the framework passes on from reading a body.
                raise HTTPException(413, self._message())
            return message

        await self._app(scope, counted, send)

    def _message(self) -> str:
        return f"The body is larger than this server takes ({self._max_bytes} bytes, --max_body_mb)."
