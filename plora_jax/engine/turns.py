"""Whose adapter comes next where the device cannot hold all of them.

A sequence whose adapter finds no room waits, and others behind it may pass. So that it does not wait forever, what may
pass narrows with the number of sequences that started meanwhile:

1. at first anybody may pass;
2. after `max_passes` starts, only the base model and adapters that running sequences hold anyway;
3. after twice as many, only the base model, which takes no room. Those that run come to their end, their adapters
   become free one after another, and the sequence starts.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable

from plora_jax.engine.plan import Sequence
from plora_jax.engine.residency import AdapterResidency


class _Gate(enum.IntEnum):
    """Which sequences may start; a larger one lets fewer through."""

    OPEN = 0
    NO_NEW_ADAPTER = 1
    BASE_ONLY = 2


class AdapterTurns:
    """References of running sequences to adapters, and the order in which others get theirs.

    `begin`, then `may_start` for waiting sequences in their order, `start` for those that do.

    Args:
        adapters: the store; `can_acquire` must be true while nobody holds an adapter.
        max_passes: starts that a sequence without room for its adapter lets pass before the gate narrows.
    """

    def __init__(self, adapters: AdapterResidency, max_passes: int) -> None:
        self._adapters = adapters
        self._max_passes = max_passes
        self._held: collections.Counter[int] = collections.Counter()
        self._starts = 0
        self._blocked_since: dict[int, int] = {}
        self._longest_blocked: int | None = None
        self._no_room: set[int] = set()

    def begin(self) -> None:
        """Begins a round over the waiting queue."""
        self._longest_blocked = None
        self._no_room.clear()

    def may_start(self, seq: Sequence) -> bool:
        """Whether a waiting sequence may start, as far as adapters go. One that finds no room narrows the gate."""
        adapter_id = seq.adapter_id
        if not adapter_id:
            return True
        gate = self._gate()
        if self._held[adapter_id]:
            return gate < _Gate.BASE_ONLY
        if gate > _Gate.OPEN:
            return False
        # Room only shrinks within a round, so each adapter is asked about once, however many sequences wait for it.
        if adapter_id not in self._no_room and self._adapters.can_acquire(adapter_id):
            return True
        self._no_room.add(adapter_id)
        since = self._blocked_since.setdefault(seq.seq_id, self._starts)
        self._longest_blocked = since if self._longest_blocked is None else min(since, self._longest_blocked)
        return False

    def is_unservable(self, seq: Sequence) -> bool:
        """Whether a sequence that may not start never will: there is no room though nobody holds an adapter."""
        return seq.adapter_id in self._no_room and not self._held.total()

    def start(self, seq: Sequence) -> None:
        """Takes the reference of a sequence that may start."""
        self._starts += 1
        self._blocked_since.pop(seq.seq_id, None)
        if seq.adapter_id:
            self._adapters.acquire(seq.adapter_id)
            self._held[seq.adapter_id] += 1

    def stop(self, seq: Sequence) -> None:
        """Gives the reference of a running sequence back."""
        if seq.adapter_id:
            self._held[seq.adapter_id] -= 1
            if not self._held[seq.adapter_id]:
                del self._held[seq.adapter_id]
            self._adapters.release(seq.adapter_id)

    def forget(self, seq_id: int) -> None:
        """A sequence is gone and waits no longer."""
        self._blocked_since.pop(seq_id, None)

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raises AssertionError unless exactly the running sequences hold references, and only waiting ones wait."""
        wanted = collections.Counter(seq.adapter_id for seq in running if seq.adapter_id)
        assert wanted == self._held, f"adapter references {dict(self._held)} are not those of running sequences"
        gone = set(self._blocked_since) - {seq.seq_id for seq in waiting}
        assert not gone, f"sequences {gone} are thought to wait for an adapter"

    def _gate(self) -> _Gate:
        """What those behind the sequences that this round found blocked have to pass."""
        if self._longest_blocked is None:
            return _Gate.OPEN
        passes = self._starts - self._longest_blocked
        return _Gate(min(passes // self._max_passes, _Gate.BASE_ONLY))
