"""Stop strings in text that arrives in pieces.

Text that may be the start of a stop string is held back until it is certain, so nothing of a stop string is ever sent
before it is known to be none. The outcome does not depend on how the text is cut into pieces.
"""

from __future__ import annotations


class StopChecker:
    """Watches the text of one completion for stop strings.

    Args:
        stop: the stop strings; none may be empty.
        include_stop: give out the stop string that ended the text as well.
    """

    def __init__(self, stop: tuple[str, ...], include_stop: bool) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""
        self._barred = 0  # a match must end after this many characters of the held text

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next piece of text.

        Args:
            text: the piece.
            may_stop: False while the completion is still too short to stop; a stop string that ends in this piece then
                counts as ordinary text.

        Returns:
            The text that may be sent now, and the stop string that ended the completion, or None. The stop string that
            is complete first wins, the longest of several that end at the same place; what follows it is dropped.
        """
        if not self._stop:
            return text, None
        held = self._held + text
        if may_stop:
            match = self._first_match(held)
            if match is not None:
                end, begin, stop = match
                self._held, self._barred = "", 0
                return held[: end if self._include_stop else begin], stop
        safe = len(held) - self._open_chars(held)
        self._held = held[safe:]
        self._barred = max(0, self._barred - safe) if may_stop else len(self._held)
        return held[:safe], None

    def flush(self) -> str:
        """Gives the text still held back, once the completion has ended without a match."""
        held, self._held, self._barred = self._held, "", 0
        return held

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """The match that ends first, as (end, begin, stop string)."""
        matches = []
        for stop in self._stop:
            begin = text.find(stop, max(0, self._barred - len(stop) + 1))
            if begin >= 0:
                matches.append((begin + len(stop), begin, stop))
        return min(matches, default=None)

    def _open_chars(self, text: str) -> int:
        """How many characters at the end of `text` may be the start of a stop string."""
        longest = max(len(stop) for stop in self._stop) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stop):
                return size
        return 0
