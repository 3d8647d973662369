"""Log-probabilities in the three shapes that clients know: completions, chat, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from plora_jax.engine.outputs import TokenLogprobs

# JSON has no -inf; vLLM sends this instead.
_LOWEST = -9999.0

TokenText = Callable[[int], str]


def completion_logprobs(
    entries: Iterable[TokenLogprobs | None], ids: Iterable[int], *, token_text: TokenText, offset: int
) -> tuple[dict[str, Any], int]:
    """The `logprobs` object of a text completion.

    Args:
        entries: one a token; None for the first token of an echoed prompt, which nothing scores.
        ids: the tokens themselves.
        token_text: text of one token.
        offset: where the first token starts in the whole text, characters.

    Returns:
        The object, and the offset behind the last token.
    """
    shape: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for entry, token_id in zip(entries, ids, strict=True):
        text = token_text(token_id)
        shape["tokens"].append(text)
        shape["text_offset"].append(offset)
        shape["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
        top = None
        if entry is not None:
            # The chosen token last, so that a neighbour with the same text does not hide it.
            top = {token_text(i): _finite(p) for i, p in entry.top} | {text: _finite(entry.logprob)}
        shape["top_logprobs"].append(top)
        offset += len(text)
    return shape, offset


def chat_logprobs(entries: Iterable[TokenLogprobs], *, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def item(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token_id)
        return {"token": raw.decode("utf-8", errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    content = []
    for entry in entries:
        top = [item(i, p) for i, p in entry.top]
        content.append({**item(entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(entries: Iterable[TokenLogprobs | None], *, token_text: TokenText) -> list[Any]:
    """vLLM's `prompt_logprobs`: per prompt token None or {token id: {logprob, rank, decoded_token}}.

    The rank of a token that is not among the most probable ones is not known and None.
    """
    shape: list[Any] = []
    for entry in entries:
        if entry is None:
            shape.append(None)
            continue
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
        scored = [(entry.token_id, entry.logprob), *(pair for pair in entry.top if pair[0] != entry.token_id)]
        shape.append(
            {str(i): {"logprob": _finite(p), "rank": ranks.get(i), "decoded_token": token_text(i)} for i, p in scored}
        )
    return shape


def _finite(logprob: float) -> float:
    # Also for NaN, which compares false.
    return float(logprob) if logprob > _LOWEST else _LOWEST
