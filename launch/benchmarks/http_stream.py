"""A request whose answer is streamed, read where the event loop hands its bytes over: no task, no thread in between."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Callable, Mapping

import h11


class RefusedError(Exception):
    """The server answered with another status than 200.

    Args:
        status: that of the answer.
        said: its body.
    """

    def __init__(self, status: int, said: bytes) -> None:
        super().__init__(f"{status}: {said[:300]!r}")
        self.status, self.said = status, said


async def post_stream(
    url: str, body: bytes, *, headers: Mapping[str, str], on_event: Callable[[bytes], None], timeout_s: float
) -> None:
    """Posts a request on a connection of its own and reads the server-sent events of its answer.

    Args:
        url: http or https.
        body: of the request.
        headers: of the request, beside those that say where it goes and how long it is.
        on_event: told the data of each event as it comes, up to [DONE]. What it raises is raised here.
        timeout_s: longest silence, seconds.

    Raises:
        RefusedError: the status is not 200.
        OSError: no connection, one that ended before the answer did, or silence.
        h11.ProtocolError: the answer is not HTTP.
    """
    loop, parts = asyncio.get_running_loop(), urllib.parse.urlsplit(url)
    secure = parts.scheme == "https"
    fields = {"Host": parts.netloc, "Content-Length": str(len(body)), "Connection": "close", **headers}
    request = h11.Request(method="POST", target=parts.path, headers=list(fields.items()))
    transport, reader = await loop.create_connection(
        lambda: _EventReader(on_event), parts.hostname or "", parts.port or (443 if secure else 80), ssl=secure or None
    )
    try:
        transport.write(reader.opening(request, body))
        while not reader.ended.done():
            silence_s = loop.time() - reader.heard_s
            if silence_s >= timeout_s:
                raise TimeoutError(f"nothing came for {timeout_s:g} s")
            await asyncio.wait([reader.ended], timeout=timeout_s - silence_s)
        reader.ended.result()
    finally:
        # Nobody asks any more how it ended.
        reader.ended.cancel()
        transport.close()


class _EventReader(asyncio.Protocol):
    """Reads one answer.

    Attributes:
        ended: done when the answer has ended, well or with an exception.
        heard_s: the loop's time at which the last bytes came.
    """

    def __init__(self, on_event: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.heard_s, self._now = loop.time(), loop.time
        self._on_event, self._status, self._rest = on_event, 0, b""
        self._connection = h11.Connection(h11.CLIENT)

    def opening(self, request: h11.Request, body: bytes) -> bytes:
        """The bytes of a request."""
        parts = (request, h11.Data(data=body), h11.EndOfMessage())
        return b"".join(self._connection.send(part) or b"" for part in parts)

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._now()
        try:
            self._connection.receive_data(data)
            while not self.ended.done():
                part = self._connection.next_event()
                if part is h11.NEED_DATA:
                    return
                self._take(part)
        except Exception as error:
            self._end(error)

    def eof_received(self) -> None:
        if self._status:
            # An answer that gave no length ends here.
            self.data_received(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("the connection was closed without an answer"))

    def _take(self, part: object) -> None:
        if isinstance(part, h11.Response):
            self._status = part.status_code
        elif isinstance(part, h11.Data):
            self._rest += part.data
            if self._status == 200:
                self._take_lines()
        else:
            self._end(None if self._status == 200 else RefusedError(self._status, self._rest))

    def _take_lines(self) -> None:
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                self._end(None)
                return
            if data:
                self._on_event(data)

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
