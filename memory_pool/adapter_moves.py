"""Adapters on their way to the device, a few pages between two steps.

A planner wishes for strategies; what a strategy reads on the device is copied while another one serves, and it takes
over when all is there. What the device does not need any more is given back at once: the pool has it. Pages are taken
when their copies begin, so the device never holds more than its budget; where there is no room yet, others go first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from memory_pool.adapter_entry import Entry, Needs, Side, flat
from memory_pool.ledger import Crossing, Ledger
from memory_pool.page_memory import PageMemory
from memory_pool.pages import PageAllocator


class AdapterCopies:
    """Gives A and B of adapters device pages, and their content.

    Args:
        memory: page arrays.
        device: adapter pages of the device.
        ledger: counts the copies.
    """

    def __init__(self, memory: PageMemory, device: PageAllocator, ledger: Ledger) -> None:
        self._memory, self._device, self._ledger = memory, device, ledger

    def reserve(self, sides: Iterable[Side]) -> bool:
        """Takes the pages of those that have none yet; takes nothing and returns False where there is no room."""
        empty = [side for side in sides if side.coming is None]
        if not self._device.can_alloc(sum(side.count for side in empty)):
            return False
        for side in empty:
            side.coming, side.copied = [self._device.alloc(count) for count in side.counts], 0
        return True

    def fill(self, sides: Sequence[Side], strategy: str, most: int | None = None) -> int:
        """Copies pages of sides that have room for them, in order; those that are whole then count as on the device.

        Args:
            sides: reserved before.
            strategy: that they are copied for.
            most: pages to copy; None for all.

        Returns:
            Pages copied.
        """
        left = sum(side.count for side in sides) if most is None else most
        to, source, useful = [], [], 0
        for side in sides:
            begin, end = side.copied, min(side.count, side.copied + left)
            to += flat(side.coming or ())[begin:end]
            source += flat(side.pool)[begin:end]
            useful += side.numbers * end // side.count - side.numbers * begin // side.count
            side.copied, left = end, left - (end - begin)
            if end == side.count:
                side.device, side.coming = side.coming, None
        if to:
            moved = self._memory.load_adapters(to, source)
            useful *= self._memory.layout.adapter_dtype.itemsize
            self._count(Crossing("adapter", strategy, "to_device", "load"), moved, useful)
            control = self._memory.control_bytes(len(to))
            self._count(Crossing("control", strategy, "to_pool", "load"), control, control)
        return len(to)

    def drop(self, sides: Iterable[Side]) -> None:
        """Gives the pages of some sides back, whole or on their way."""
        for side in sides:
            self._device.free(side.taken)
            side.device = side.coming = None
            side.copied = 0

    def _count(self, crossing: Crossing, moved: int, useful: int) -> None:
        self._ledger.add(crossing, moved_bytes=moved, useful_bytes=useful)


class AdapterMoves:
    """Moves adapters to the strategies that a planner wishes for.

    Args:
        copies: of adapters to the device.
        needs: what each strategy reads on the device.
        switch: told that a strategy serves an adapter from here on.
    """

    def __init__(
        self, copies: AdapterCopies, needs: Mapping[str, Needs], switch: Callable[[int, Entry, str], None]
    ) -> None:
        self._copies, self._needs, self._switch = copies, needs, switch
        self._moving: dict[int, Entry] = {}

    def wish(self, adapter_id: int, entry: Entry, strategy: str) -> None:
        """Begins to move an adapter; where nothing has to be copied it is served that way at once."""
        entry.wish = strategy
        self._moving.pop(adapter_id, None)
        needs = self._needs[strategy]
        self._copies.drop(
            side for side, needed in zip(entry.sides, needs, strict=True) if side.coming is not None and not needed
        )
        if entry.missing(needs):
            self._moving[adapter_id] = entry
        else:
            self._arrive(adapter_id, entry)

    def advance(self, most: int) -> tuple[int, list[int]]:
        """Copies up to `most` pages, of those who came first and have room.

        Returns:
            Pages copied, and whose they were.
        """
        copied, touched = 0, []
        for adapter_id, entry in list(self._moving.items()):
            if copied >= most:
                break
            missing = entry.missing(self._needs[entry.wish])
            if not self._copies.reserve(missing):
                continue
            copied += self._copies.fill(missing, entry.wish, most - copied)
            touched.append(adapter_id)
            if not entry.missing(self._needs[entry.wish]):
                del self._moving[adapter_id]
                self._arrive(adapter_id, entry)
        return copied, touched

    def forget(self, adapter_id: int) -> None:
        """An adapter is gone, or leaves the device."""
        self._moving.pop(adapter_id, None)

    def check_integrity(self, entries: Mapping[int, Entry]) -> None:
        """Raises AssertionError unless exactly those move whose pages are missing, and none has more than it copies."""
        for adapter_id, entry in entries.items():
            moves = bool(entry.wish) and bool(entry.missing(self._needs[entry.wish]))
            assert moves == (self._moving.get(adapter_id) is entry), f"adapter {adapter_id} moves: {not moves}"
            for side in entry.sides:
                assert side.coming is None or side.device is None, f"adapter {adapter_id} is copied twice"
                assert moves or side.coming is None, f"adapter {adapter_id} is being copied for nobody"
                assert side.coming is None or 0 <= side.copied < side.count, adapter_id
        assert self._moving.keys() <= entries.keys(), "an adapter that is gone moves"

    def _arrive(self, adapter_id: int, entry: Entry) -> None:
        """The strategy takes over, and then what it does not read leaves the device."""
        self._switch(adapter_id, entry, entry.wish)
        needs = self._needs[entry.wish]
        self._copies.drop(side for side, needed in zip(entry.sides, needs, strict=True) if not needed)
