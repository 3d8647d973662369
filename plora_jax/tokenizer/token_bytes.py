"""From a token as a vocabulary writes it to the bytes it stands for, by the decoder of the tokenizer."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_mapper(decoder: Any) -> Callable[[str], bytes]:
    """The function that gives the bytes of a token.

    Args:
        decoder: of a `tokenizers.Tokenizer`, or None. Byte-level BPE writes each byte as a visible character;
            sentencepiece writes a space as U+2581 and bytes without a token of their own as <0xNN>; others write the
            text itself.
    """
    kinds = "" if decoder is None else decoder.__getstate__().decode("utf-8")
    if '"ByteLevel"' in kinds:
        return _byte_level
    if '"ByteFallback"' in kinds or '"Metaspace"' in kinds:
        return _sentencepiece
    return str.encode


def _byte_level(token: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:  # an added token, written as it is
        return token.encode("utf-8")


def _sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode("utf-8")


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's visible character for each byte, turned around: printable Latin-1 is itself, the rest from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
