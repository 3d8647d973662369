"""What the engine gives back, piece by piece."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position.

    Attributes:
        token_id: the token that stands there.
        logprob: its natural-log probability under the model.
        top: the most probable tokens there, best first, as (token id, logprob).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one completion gained since the last piece.

    Attributes:
        index: which of the n completions.
        text: text that is now certain; never ends inside a character or inside a possible stop string.
        token_ids: tokens generated since the last piece; their text may follow in a later one.
        logprobs: one entry a token of `token_ids`, where asked for.
        prompt_logprobs: on the first piece, where asked for: one entry a prompt token, None for the first.
        finish_reason: None while it goes on; "stop", "length", "abort" (cancelled) or "error".
        stop_reason: the stop string or stop token that ended it, None for the end token.
        error: what went wrong, where finish_reason is "error".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """One whole completion: the pieces of one index put together."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
