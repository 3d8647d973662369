"""What the engine counts and measures; the HTTP layer turns it into metrics."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from typing import NamedTuple

from plora_jax.engine.generation import Generation
from plora_jax.engine.plan import Sequence

MAX_OBSERVATIONS = 65536
"""Observations of a kind kept until somebody takes them; older ones are dropped, so that nobody has to."""


class EngineStats(NamedTuple):
    """Counters since the start, and where things stand now.

    Attributes:
        running: sequences that may write to pages.
        waiting: sequences that may not yet, or not at the moment.
        kv_usage: share of the pool's KV pages that are taken, 0 to 1.
        preemptions: running sequences sent back to wait.
        suspensions: those of them that kept keys and values.
        restores: pages brought back to the device to be filled on.
        prompt_tokens: prompt tokens of requests that drew their first token.
        generation_tokens: tokens drawn.
        finished: completions that ended, by finish_reason.
        overflowed: completions that ended because their logits were not finite.
        steps: that were carried out.
        steps_ahead: those of them that were begun while the one before was under way.
        running_adapters: names of adapters that running sequences use.
        waiting_adapters: names of adapters that waiting sequences ask for.
    """

    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    suspensions: int
    restores: int
    prompt_tokens: int
    generation_tokens: int
    finished: Mapping[str, int]
    overflowed: int
    steps: int
    steps_ahead: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]


class Observations(NamedTuple):
    """Measurements since they were last taken; times in seconds.

    Attributes:
        time_to_first_token_s: from arrival, a request.
        inter_token_s: between two tokens of a completion.
        e2e_s: from arrival to the end of the last completion, a request.
        queue_s: from arrival to the first step that computes a part of it, a request.
        prompt_tokens: a request.
        generation_tokens: a completion.
        planner_s: a plan, from the snapshot to the decision.
    """

    time_to_first_token_s: list[float]
    inter_token_s: list[float]
    e2e_s: list[float]
    queue_s: list[float]
    prompt_tokens: list[int]
    generation_tokens: list[int]
    planner_s: list[float]


class Recorder:
    """Counts on the engine's thread; other threads read.

    Attributes:
        steps, steps_ahead: as of `EngineStats`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observed = {name: collections.deque(maxlen=MAX_OBSERVATIONS) for name in Observations._fields}
        self._last_token_s: dict[int, float] = {}
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished: collections.Counter[str] = collections.Counter()
        self._overflowed = 0
        self.steps = self.steps_ahead = 0

    def stepped(self, *, ahead: bool) -> None:
        """A step was carried out, which was begun ahead or was not."""
        self.steps += 1
        self.steps_ahead += ahead

    def scheduled(self, generation: Generation, now: float) -> None:
        """A sequence of the request is part of a step."""
        if generation.times.scheduled_s is None:
            generation.times.scheduled_s = now
            self._observe("queue_s", now - generation.times.arrival_s)

    def token(self, generation: Generation, seq: Sequence, now: float) -> None:
        """A sequence drew a token."""
        if generation.times.first_token_s is None:
            generation.times.first_token_s = now
            self._prompt_tokens += generation.prompt_tokens
            self._observe("time_to_first_token_s", now - generation.times.arrival_s)
        last = self._last_token_s.get(seq.seq_id)
        if last is not None:
            self._observe("inter_token_s", now - last)
        self._last_token_s[seq.seq_id] = now
        self._generation_tokens += 1

    def ended(self, seq: Sequence, reason: str) -> None:
        """A completion ended."""
        self._last_token_s.pop(seq.seq_id, None)
        with self._lock:
            self._finished[reason] += 1
        self._observe("generation_tokens", len(seq.output_ids))

    def request_ended(self, generation: Generation, now: float) -> None:
        """The last completion of a request ended."""
        generation.times.finished_s = now
        self._observe("prompt_tokens", generation.prompt_tokens)
        self._observe("e2e_s", now - generation.times.arrival_s)

    def overflowed(self) -> None:
        """A sequence has no finite logits."""
        self._overflowed += 1

    def planned(self, seconds: float) -> None:
        """A plan was made and holds now."""
        self._observe("planner_s", seconds)

    def counters(self) -> tuple[int, int, dict[str, int], int]:
        """(prompt tokens, generation tokens, ended completions by reason, those without finite logits)."""
        with self._lock:
            return self._prompt_tokens, self._generation_tokens, dict(self._finished), self._overflowed

    def take(self) -> Observations:
        """The measurements since the last call."""
        with self._lock:
            taken = {name: list(values) for name, values in self._observed.items()}
            for values in self._observed.values():
                values.clear()
        return Observations(**taken)

    def _observe(self, name: str, value: float) -> None:
        with self._lock:
            self._observed[name].append(value)
