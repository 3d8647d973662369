"""Streamed answers as a scripted server sends them: cut anywhere, broken off, refused, silent."""

from __future__ import annotations

import asyncio
import re

import h11
import pytest

from launch.benchmarks.http_client import HttpTarget
from launch.benchmarks.http_stream import RefusedError, post_stream
from launch.benchmarks.measurement import Job
from launch.flags import StartError

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
UNSIZED = b"HTTP/1.1 200 OK\r\n\r\n"
JOB = Job([5, 6], "m", 2)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Script:
    """A server that sends `parts` one after the other and closes; `request` is what it was asked."""

    def __init__(self, *parts: bytes, open_s: float = 0.0) -> None:
        self._parts, self._open_s, self.request = parts, open_s, b""

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"(?i)content-length: (\d+)", head)
        self.request = head + await reader.readexactly(int(size[1]) if size else 0)
        for part in self._parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        await asyncio.sleep(self._open_s)
        writer.close()


def events_of(script: Script, *, timeout_s: float = 5.0) -> list[bytes]:
    async def ask() -> list[bytes]:
        got: list[bytes] = []
        async with script as url:
            await post_stream(url + "/p", b"{}", headers={"A": "b"}, on_event=got.append, timeout_s=timeout_s)
        return got

    return asyncio.run(ask())


def run_job(script: Script) -> object:
    async def ask() -> object:
        async with script as url:
            return await asyncio.to_thread(HttpTarget(url).run, [JOB], concurrency=None)

    return asyncio.run(ask())


def test_events_come_whole_and_in_order_wherever_the_answer_is_cut():
    text = b": hello\ndata: 1\n\ndata: two\r\n\r\nevent: x\ndata:3\n\ndata: [DONE]\n\ndata: 4\n\n"
    for size in (1, 7, len(text)):
        body = b"".join(chunk(text[at : at + size]) for at in range(0, len(text), size))
        whole = CHUNKED + body + b"0\r\n\r\n"
        for cut in (len(CHUNKED) - 3, len(CHUNKED) + 4, len(whole) - 9):
            assert events_of(Script(whole[:cut], whole[cut:])) == [b"1", b"two", b"3"], (size, cut)


def test_answer_may_end_with_its_body_where_no_done_comes():
    assert events_of(Script(CHUNKED + chunk(b"data: 1\n\n") + b"0\r\n\r\n", open_s=1.0)) == [b"1"]
    assert events_of(Script(UNSIZED + b"data: 1\n\n")) == [b"1"]


def test_request_says_where_it_goes_how_long_it_is_and_what_it_holds():
    script = Script(UNSIZED)
    events_of(script)
    head, body = script.request.split(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /p HTTP/1.1"
    assert {b"A: b", b"Content-Length: 2", b"Connection: close"} < set(lines)
    assert body == b"{}"


def test_refusal_carries_status_and_body():
    refusal = b"HTTP/1.1 429 No\r\nContent-Length: 9\r\n\r\ncome"
    with pytest.raises(RefusedError) as caught:
        events_of(Script(refusal, b" back"))
    assert (caught.value.status, caught.value.said) == (429, b"come back")
    with pytest.raises(StartError, match=r"^http://127\.0\.0\.1:\d+/v1/completions answered 429: come back$"):
        run_job(Script(refusal, b" back"))


@pytest.mark.parametrize(
    ("parts", "error", "says"),
    [
        ((CHUNKED + chunk(b"data: {}\n\n"),), h11.RemoteProtocolError, "without sending complete message body"),
        ((b"SMTP\r\n\r\n",), h11.RemoteProtocolError, "illegal status line"),
        ((), ConnectionError, "^the connection was closed without an answer$"),
    ],
)
def test_answer_that_breaks_off_says_how(parts, error, says):
    with pytest.raises(error, match=says):
        events_of(Script(*parts))
    with pytest.raises(
        StartError, match=r"^http://127\.0\.0\.1:\d+/v1/completions cannot be reached: .*" + says.strip("^")
    ):
        run_job(Script(*parts))


def test_silence_is_an_error_and_slow_answers_are_none():
    parts = (CHUNKED, *(chunk(b"data: %d\n\n" % i) for i in range(8)), b"0\r\n\r\n")
    assert len(events_of(Script(*parts), timeout_s=0.05)) == 8
    with pytest.raises(TimeoutError, match=r"^nothing came for 0\.05 s$"):
        events_of(Script(CHUNKED, open_s=1.0), timeout_s=0.05)


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (b'{"error": {"message": "broken"}}', r"ended an answer of 'm' with \{'message': 'broken'\}$"),
        (b"[1]", r"^the server sent b'\[1\]' where a JSON object must be$"),
        (b'{"choices": [{"text": "a"}]}', r"sent no usage with its answer: the server must support stream_options"),
    ],
)
def test_stream_that_cannot_be_counted_says_why(event, says):
    with pytest.raises(StartError, match=says):
        run_job(Script(UNSIZED + b"data: %b\n\ndata: [DONE]\n\n" % event))


def test_pieces_are_events_with_text_and_the_first_without():
    events = [b'{"choices": [{"text": %b}], "usage": null}' % text for text in (b'""', b'"a"', b'""')]
    events.append(b'{"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}}')
    (record,) = run_job(Script(UNSIZED + b"".join(b"data: %b\n\n" % event for event in events)))
    assert (record.prompt_tokens, record.output_tokens, len(record.piece_s)) == (2, 2, 2)
    assert record.sent_s < record.piece_s[0]
