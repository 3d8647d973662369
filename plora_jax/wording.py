"""Values in messages for those who wrote them: as JSON, and not longer than a line can bear."""

from __future__ import annotations

import json
from typing import Any

MAX_CHARS = 100


def shortened(text: str, most: int = MAX_CHARS) -> str:
    """A text, cut where it is longer than `most` characters, with its length in that case."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def lone_surrogate(text: str) -> str | None:
    """The first half of a surrogate pair without its other half, as "U+D800"; JSON can write one, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X}"
    return None


def in_json(value: Any, most: int = MAX_CHARS) -> str:
    """A value as a JSON client wrote it, cut as `shortened` does; halves of surrogate pairs are escaped."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return shortened(text if lone_surrogate(text) is None else json.dumps(value, default=str), most)
