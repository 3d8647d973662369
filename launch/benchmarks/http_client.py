"""Requests to an OpenAI-compatible server over HTTP, all in one event loop, answers streamed.

The client takes as little as it can from a server on the same cores: with a thread for each answer it takes half as
much again, and its wakeups slow the server down.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import h11
from pydantic_core import from_json, to_json

from launch.benchmarks.http_stream import RefusedError, post_stream
from launch.benchmarks.measurement import Job, RequestRecord, answer_all
from launch.flags import StartError

_TIMEOUT_S = 900.0
_MOST_AT_ONCE = 512
_COMPILATIONS, _PREEMPTIONS = "plora:compilations_total", "vllm:num_preemptions"


class HttpTarget:
    """A server that answers jobs.

    Args:
        url: its address, with or without /v1.
        api_key: sent as a bearer token; None sends none.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def run(self, jobs: Sequence[Job], *, concurrency: int | None) -> list[RequestRecord]:
        """As `Target.run`.

        Raises:
            StartError: the server cannot be reached, refuses a job, or does not count its tokens.
        """
        at_once = min(concurrency or len(jobs), _MOST_AT_ONCE)
        return asyncio.run(answer_all(jobs, concurrency=at_once, answer=self._run_one))

    def max_model_len(self, model: str | None) -> int | None:
        """Longest sequence of a model that the server lists, None where it does not say."""
        with self._get("/v1/models") as response:
            cards = _object(response.read()).get("data") or ()
        lengths = {card.get("id"): card.get("max_model_len") for card in cards}
        return lengths.get(model) or max((length for length in lengths.values() if length), default=None)

    def healthy(self) -> bool:
        """Whether the server says that it can answer."""
        try:
            with self._get("/health"):
                return True
        except StartError:
            return False

    def first_model(self) -> str:
        """The first model that the server lists."""
        with self._get("/v1/models") as response:
            cards = _object(response.read()).get("data")
        if not cards:
            raise StartError(f"{self.url} lists no model: name one by --served_model")
        return cards[0]["id"]

    def compilations(self) -> int | None:
        """What the server's metrics say, where it is one of this project."""
        return self._metric(_COMPILATIONS)

    def preemptions(self) -> int | None:
        """What the server's metrics say, where they name vLLM's preemptions."""
        return self._metric(_PREEMPTIONS)

    async def _run_one(self, job: Job, sent_s: float) -> RequestRecord:
        body = {
            "model": job.model,
            "prompt": list(job.prompt_ids),
            "max_tokens": job.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        piece_s: list[float] = []
        usage: Mapping[str, int] | None = None

        def take(data: bytes) -> None:
            nonlocal usage
            now_s, event = time.perf_counter(), _object(data)
            usage = event.get("usage") or usage
            if "error" in event:
                raise StartError(f"{self.url} ended an answer of {job.model!r} with {_shorten(str(event['error']))}")
            # The event that says why an answer ends may hold no text, and then no token either.
            if any(choice.get("text") or not piece_s for choice in event.get("choices") or ()):
                piece_s.append(now_s)

        path = "/v1/completions"
        try:
            await post_stream(
                self.url + path, to_json(body), headers=self._headers, on_event=take, timeout_s=_TIMEOUT_S
            )
        except RefusedError as error:
            raise self._refused(path, error.status, error.said) from error
        except (OSError, h11.ProtocolError) as error:
            raise self._unreached(path, error) from error
        if usage is None or not piece_s:
            raise StartError(
                f"{self.url} sent no usage with its answer: the server must support stream_options.include_usage"
            )
        return RequestRecord(usage["prompt_tokens"], usage["completion_tokens"], sent_s, piece_s)

    def _metric(self, name: str) -> int | None:
        """Sum of a counter over its labels, None where there is none."""
        try:
            with self._get("/metrics") as response:
                lines = response.read().decode("utf-8", "replace").splitlines()
        except StartError:
            return None
        found = [line for line in lines if line.startswith((name + "{", name + " ", name + "_total"))]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in found)) if found else None

    @contextlib.contextmanager
    def _get(self, path: str) -> Iterator[http.client.HTTPResponse]:
        parts = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", parts.path + path, headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refused(path, response.status, response.read())
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise self._unreached(path, error) from error
        finally:
            connection.close()

    def _refused(self, path: str, status: int, said: bytes) -> StartError:
        return StartError(f"{self.url}{path} answered {status}: {_shorten(said.decode('utf-8', 'replace'))}")

    def _unreached(self, path: str, error: Exception) -> StartError:
        return StartError(f"{self.url}{path} cannot be reached: {error or type(error).__name__}")


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = from_json(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise StartError(f"the server sent {_shorten(repr(data))} where a JSON object must be")
    return value


def _shorten(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + " ..."
