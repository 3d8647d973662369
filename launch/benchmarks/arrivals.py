"""Arrivals and lengths of a recorded trace: requests come when they came, whether or not others are answered.

The format is that of the Azure LLM inference traces (AzurePublicDataset, CC-BY-4.0): CSV with TIMESTAMP, ContextTokens
and GeneratedTokens. Prompts themselves are not in it.
"""

from __future__ import annotations

import csv
import datetime
import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from launch.flags import StartError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Arrival(NamedTuple):
    """One request of a trace.

    Attributes:
        at_s: seconds after the first.
        prompt_tokens: of its prompt.
        new_tokens: that it generated.
    """

    at_s: float
    prompt_tokens: int
    new_tokens: int


class Replay(NamedTuple):
    """What of a trace is sent.

    Attributes:
        arrivals: in order, times from the first.
        dropped: requests of the part that is replayed which the context does not hold, or without a token.
    """

    arrivals: Sequence[Arrival]
    dropped: int


def read_trace(path: str) -> list[Arrival]:
    """All requests of a trace, in order of time.

    Raises:
        StartError: the file cannot be read, or has another form.
    """
    try:
        with pathlib.Path(path).expanduser().open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--trace {path!r} cannot be read: {error}") from error
    try:
        found = [
            (datetime.datetime.fromisoformat(row[COLUMNS[0]]), *(int(row[name]) for name in COLUMNS[1:]))
            for row in rows
        ]
    except KeyError as error:
        raise StartError(f"--trace {path!r} has no column {error}: it must be CSV with {', '.join(COLUMNS)}") from error
    except (ValueError, TypeError) as error:
        raise StartError(f"--trace {path!r} is not CSV with the columns {', '.join(COLUMNS)}: {error}") from error
    if not found:
        raise StartError(f"--trace {path!r} has no requests")
    found.sort(key=lambda entry: entry[0])
    return [Arrival((at - found[0][0]).total_seconds(), prompt, new) for at, prompt, new in found]


def replay(trace: Sequence[Arrival], *, scale: float, minutes: float | None, max_tokens: int | None) -> Replay:
    """The part of a trace that is sent.

    Args:
        trace: all of it.
        scale: share of the requests that are kept, evenly over the trace, 0 to 1; the time between arrivals grows.
        minutes: only so much from the start; None for all.
        max_tokens: prompt and new tokens that a sequence holds; longer requests are dropped. None where not known.
    """
    kept = [a for i, a in enumerate(trace) if math.floor((i + 1) * scale) > math.floor(i * scale)]
    if minutes is not None:
        kept = [a for a in kept if a.at_s < 60 * minutes]
    fitting = [
        a
        for a in kept
        if min(a.prompt_tokens, a.new_tokens) > 0
        and (max_tokens is None or a.prompt_tokens + a.new_tokens <= max_tokens)
    ]
    first_s = fitting[0].at_s if fitting else 0.0
    return Replay([a._replace(at_s=a.at_s - first_s) for a in fitting], len(kept) - len(fitting))
