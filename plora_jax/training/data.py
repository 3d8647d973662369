"""Training examples: from lines of a JSONL file to token ids with a mask of what is learned.

A chat example is cut at its assistant turns, and each piece is tokenised by itself. So the tokens before an answer are
the very tokens that the server makes of the same conversation, and the answer's tokens follow them as when generated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from plora_jax.training.config import TrainingError

ROLES = ("system", "user", "assistant")
Message = Mapping[str, str]


class ChatFormat(Protocol):
    """The model's tokenizer and chat template, as training needs them."""

    def encode(self, text: str, *, start: bool) -> list[int]:
        """Token ids of a piece of text; with `start`, a text's beginning (a BOS token is added if the model has one).

        A rendered chat is never a beginning: its template writes the BOS token itself.
        """
        ...

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as text, with the opening of an assistant turn where asked for."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class Example(NamedTuple):
    """One tokenised example.

    Attributes:
        token_ids: [T] int32.
        learned: [T] bool, the tokens that count in the loss.
    """

    token_ids: np.ndarray
    learned: np.ndarray


class Examples(NamedTuple):
    """Tokenised examples of one file.

    Attributes:
        examples: in file order.
        truncated: how many of them lost tokens to `max_length`.
        dropped: how many were left out, since nothing learned was within `max_length`.
    """

    examples: tuple[Example, ...]
    truncated: int
    dropped: int


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads {"messages": [{"role", "content"}, ...]} or {"text": "..."} objects, one a line; empty lines are skipped.

    Raises:
        TrainingError: naming file, line number and what is wrong; or that the file is not there or holds no example.
    """
    records = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    records.append(_parse(line, f"{os.fspath(path)}:{number}"))
    except UnicodeDecodeError as error:
        raise TrainingError(f"{os.fspath(path)} is not UTF-8 text: {error}.") from error
    except OSError as error:
        raise TrainingError(f"cannot read {os.fspath(path)}: {error.strerror}.") from error
    if not records:
        raise TrainingError(f"{os.fspath(path)} holds no example: write one JSON object a line.")
    return records


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TrainingError(f"{where}: not JSON: {error.msg} at column {error.colno}.") from error
    if not isinstance(record, dict) or ("messages" in record) == ("text" in record):
        raise TrainingError(
            f'{where}: an example is an object with either "messages" or "text", got {line.strip()[:80]}.'
        )
    if "text" in record:
        if not isinstance(record["text"], str) or not record["text"]:
            raise TrainingError(f"{where}: text must be a string that is not empty, got {record['text']!r}.")
        return record
    _check_messages(record["messages"], where)
    return record


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise TrainingError(f"{where}: messages must be a list that is not empty, got {messages!r}.")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise TrainingError(f"{where}: messages[{index}] must be an object with role and content, got {message!r}.")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise TrainingError(f"{where}: messages[{index}].role must be one of {', '.join(ROLES)}, got {role!r}.")
        if not isinstance(content, str) or not content:
            raise TrainingError(
                f"{where}: messages[{index}].content must be a string that is not empty, got {content!r}."
            )
    if all(message["role"] != "assistant" for message in messages):
        raise TrainingError(f"{where}: no message has the role assistant, so there is nothing to learn.")


def tokenize(records: Iterable[Mapping[str, Any]], chat: ChatFormat, *, max_length: int) -> Examples:
    """Tokenises records; the loss counts assistant turns with their end token, or every token of a text.

    Args:
        records: from `read_records`.
        chat: the model's tokenizer and template.
        max_length: tokens kept of each, from the beginning.

    Raises:
        TrainingError: a template that does not render a conversation's beginning as the beginning of the whole.
    """
    examples, truncated, dropped = [], 0, 0
    for record in records:
        ids, learned = _text(record["text"], chat) if "text" in record else _chat(record["messages"], chat)
        truncated += len(ids) > max_length
        example = Example(np.asarray(ids[:max_length], np.int32), np.asarray(learned[:max_length], bool))
        # The first token has no prediction, so it cannot be learned.
        if example.learned[1:].any():
            examples.append(example)
        else:
            dropped += 1
    return Examples(tuple(examples), truncated, dropped)


def _text(text: str, chat: ChatFormat) -> tuple[list[int], list[bool]]:
    ids = chat.encode(text, start=True) + list(chat.eos_token_ids[:1])
    return ids, [True] * len(ids)


def _chat(messages: Sequence[Message], chat: ChatFormat) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    learned: list[bool] = []
    done = ""

    def take(text: str, learn: Callable[[list[int]], list[bool]]) -> None:
        nonlocal done
        if not text.startswith(done):
            raise TrainingError(
                "the chat template changes earlier turns when later ones follow, so answers cannot be told from "
                f"prompts: {done[-40:]!r} is not the beginning of {text[:40]!r}; train on single-turn examples."
            )
        piece = chat.encode(text[len(done) :], start=False)
        ids.extend(piece)
        learned.extend(learn(piece))
        done = text

    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            take(chat.render(messages[:index], add_generation_prompt=True), lambda piece: [False] * len(piece))
            whole = chat.render(messages[: index + 1], add_generation_prompt=False)
            take(whole, lambda piece: _until_end(piece, chat.eos_token_ids))
    return ids, learned


def _until_end(piece: list[int], eos_token_ids: tuple[int, ...]) -> list[bool]:
    """All tokens up to the last end token: what a template writes after it is never generated."""
    ends = [position for position, token in enumerate(piece) if token in eos_token_ids]
    length = ends[-1] + 1 if ends else len(piece)
    return [position < length for position in range(len(piece))]


def split(records: Sequence[dict[str, Any]], eval_fraction: float, *, seed: int) -> tuple[list[Any], list[Any]]:
    """Holds out a share of the records, chosen by `seed` alone.

    Returns:
        Training records and held-out records, each in file order; at least one of each where the share is above 0.

    Raises:
        TrainingError: a share outside [0, 1), or too few records to split.
    """
    if not 0 <= eval_fraction < 1:
        raise TrainingError(f"eval_fraction must be at least 0 and below 1, got {eval_fraction}.")
    if eval_fraction == 0:
        return list(records), []
    if len(records) < 2:
        raise TrainingError(
            "eval_fraction needs at least 2 examples; give a separate file of held-out examples instead."
        )
    count = min(max(1, round(len(records) * eval_fraction)), len(records) - 1)
    held_out = set(np.random.default_rng(seed).permutation(len(records))[:count].tolist())
    return (
        [record for index, record in enumerate(records) if index not in held_out],
        [record for index, record in enumerate(records) if index in held_out],
    )
