"""Which regexes of an adapter may run: those that cannot take long on the path of a module.

An adapter may come from a stranger, and `re` tries every way in which a regex can match before it gives up, while no
other thread runs. So the ways are counted before the first match, from the parsed regex: over one after the other they
multiply, over alternatives they add up, and a repeat is as many ways as it has counts. Keys that people write stay far
below the limit; nested repeats such as `(a+)+` are far above.
"""

from __future__ import annotations

import re
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]  # what re.compile calls: counted is what runs
from typing import Any

_LONGEST_KEY = 500
_PATH_CHARACTERS = 64  # of a long module path: how often one character's repeat can end differently
_MOST_WAYS = _PATH_CHARACTERS**3 * 4  # three free repeats and some choices: milliseconds on one path
_ONE_WAY = frozenset({"LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"})


def anchored(key: str) -> str:
    """The regex that PEFT matches a module's path against for a key of `rank_pattern` or `alpha_pattern`."""
    return rf"(.*\.)?({key})$"


def check_pattern(key: str) -> None:
    """Checks that a key is a regex that is quick to match.

    Args:
        key: of `rank_pattern` or `alpha_pattern`.

    Raises:
        ValueError: it is not; the text goes on from "it must be".
    """
    if len(key) > _LONGEST_KEY:
        raise ValueError(f"at most {_LONGEST_KEY} characters, not {len(key)}: split it into several keys")
    try:
        re.compile(anchored(key))
        ways = _ways(_parser.parse(key))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"a regex ({error})") from None
    if ways > _MOST_WAYS:
        raise ValueError(
            "a regex that is quick to match: at most three of `*` and `+`, none of them inside another, "
            "and few alternatives; several simple keys do the same"
        )


def _ways(tokens: Any) -> int:
    """An upper bound of the ways in which a parsed sequence matches from one place of a path."""
    ways = 1
    for operation, argument in tokens:
        ways *= _ways_of(str(operation), argument)
        if ways > _MOST_WAYS:
            return _MOST_WAYS + 1  # enough is known; the exact product may have thousands of digits
    return ways


def _ways_of(operation: str, argument: Any) -> int:
    if operation in _ONE_WAY:
        return 1
    if operation == "SUBPATTERN":
        _, flags_on, flags_off, body = argument
        if flags_on or flags_off:  # without case, alternatives that begin differently may still be the same
            raise ValueError("a regex without flags such as (?i:...)")
        return _ways(body)
    if operation in ("ASSERT", "ASSERT_NOT"):
        return _ways(argument[1])
    if operation == "BRANCH":
        return _ways_of_branches(argument[1])
    if operation in ("MAX_REPEAT", "MIN_REPEAT"):
        return _ways_of_repeat(*argument)
    raise ValueError(f"a regex without back references, conditions and atomic groups (found {operation})")


def _ways_of_branches(branches: Any) -> int:
    """Alternatives add up, save those that begin with different characters: of these one at most goes on."""
    firsts = [branch[0] if len(branch) and str(branch[0][0]) == "LITERAL" else None for branch in branches]
    ways = [_ways(branch) for branch in branches]
    return max(ways) if None not in firsts and len(set(firsts)) == len(firsts) else sum(ways)


def _ways_of_repeat(fewest: int, most: int, body: Any) -> int:
    if most > 1 and body.getwidth()[0] == 0:
        return _MOST_WAYS + 1  # rounds that consume nothing: the path's length does not bound them
    each = _ways(body)
    fewest, most = min(int(fewest), _PATH_CHARACTERS), min(int(most), _PATH_CHARACTERS)
    return sum(each**rounds for rounds in range(fewest, most + 1))
