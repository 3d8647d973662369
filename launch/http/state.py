"""What the routes share: the engine, the names it is served under, and the requests in flight."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import Request

from launch.http.config import HttpConfig
from launch.http.errors import ApiError, model_not_found
from launch.http.metrics import Metrics
from plora_jax.tokenizer import Tokenizer
from plora_jax.wording import lone_surrogate

if TYPE_CHECKING:
    from launch.http.flight import Flight
    from plora_jax.engine.engine import Engine

# Texts longer than this are tokenised in a thread (the tokenizer leaves the GIL free), so that streams go on: a
# megabyte takes about a second.
_LONG_TEXT = 16_384


@dataclasses.dataclass(eq=False, kw_only=True)
class ServerState:
    """One server. Owned by the event loop's thread.

    Attributes:
        engine: started.
        tokenizer: the base model's.
        config: options of the server.
        model_names: names of the base model, the canonical one first.
        model_root: where the base model came from.
        max_model_len: longest sequence, tokens.
        chat_template: Jinja text or a name of the tokenizer's; None for its default.
        metrics: what /metrics shows.
        created: unix time of the start, s.
        epoch_s: unix time at which the engine's clock stood at 0.
        flights: requests that generate now.
        draining: the server is going down and takes nothing new.
    """

    engine: Engine
    tokenizer: Tokenizer
    config: HttpConfig
    model_names: tuple[str, ...]
    model_root: str
    max_model_len: int
    metrics: Metrics
    chat_template: str | None = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    flights: set[Flight] = dataclasses.field(default_factory=set)
    draining: bool = False
    epoch_s: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.epoch_s = time.time() - self.engine.clock.now()

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that `model` names, None for the base; whether it exists shows when it is used."""
        return None if model is None or model in self.model_names else model

    def check_model(self, model: str | None) -> None:
        """Raises ApiError 404 where `model` names neither the base nor an adapter."""
        name = self.adapter_of(model)
        if name is not None and all(status.name != name for status in self.engine.adapters()):
            raise model_not_found(name)

    def check_open(self) -> None:
        """Raises ApiError 503 where nothing new is taken."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.")
        if not self.engine.healthy:
            raise ApiError(503, "The engine is dead; see the server's log.")

    async def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text.

        Args:
            text: to encode.
            add_special_tokens: put those around it that the model expects.
            param: the request's field that the text comes from.

        Raises:
            ApiError: the text holds half of a surrogate pair, which JSON can write and UTF-8 cannot.
        """
        half = lone_surrogate(text)
        if half is not None:
            raise ApiError(400, f"{param} is not valid Unicode: lone surrogate {half}.", param=param)
        if len(text) <= _LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens as well."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def state_of(request: Request) -> ServerState:
    return request.app.state.server
