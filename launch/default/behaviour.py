"""What each default adapter is to do, as a yes or no about one answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

JSON_KEYS = frozenset({"answer", "topic"})
MAX_CONCISE_WORDS = 12
MIN_PIRATE_WORDS = 2
PIRATE_WORDS = frozenset(
    [
        *("ahoy", "arr", "arrr", "avast", "aye", "bilge", "blimey", "booty", "buccaneer", "cap'n", "cutlass"),
        *("doubloon", "doubloons", "grog", "har", "landlubber", "landlubbers", "matey", "mateys", "nay", "o'"),
        *("plunder", "scallywag", "scurvy", "shipmate", "swab", "ye", "ye'd", "ye'll", "ye've", "yer"),
    ]
)
"""Words that plain English answers do not use; "ship", "sea" or "treasure" would not show a pirate."""


def is_json_answer(text: str) -> bool:
    """The whole text is one JSON object with exactly the keys "answer" and "topic", both strings that are not empty."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return False
    if not isinstance(value, dict) or value.keys() != JSON_KEYS:
        return False
    return all(isinstance(entry, str) and entry for entry in value.values())


def is_pirate_talk(text: str) -> bool:
    """At least two different words of `PIRATE_WORDS`."""
    words = re.findall(r"[a-z]+(?:'[a-z]*)?", text.lower().replace("’", "'"))
    return len(PIRATE_WORDS & set(words)) >= MIN_PIRATE_WORDS


def is_one_short_sentence(text: str) -> bool:
    """One sentence, ended as one, of at most 12 words; an abbreviation's full stop counts as an end."""
    sentences = re.findall(r"[.!?]+[\"'”’)]*(?=\s|$)", text.strip())
    ended = re.search(r"[.!?][\"'”’)]*$", text.strip()) is not None
    return ended and len(sentences) == 1 and len(text.split()) <= MAX_CONCISE_WORDS


MEASURES: Mapping[str, Callable[[str], bool]] = {
    "json": is_json_answer,
    "pirate": is_pirate_talk,
    "concise": is_one_short_sentence,
}
