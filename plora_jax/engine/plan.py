"""The words between scheduler and executor: sequences in, a plan for one step, sampled tokens out.

Plain data; no JAX. The scheduler writes plans, an executor carries them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from memory_pool.kv_pool import KvHandle
from plora_jax.engine.outputs import TokenLogprobs
from plora_jax.engine.params import SamplingParams


@dataclasses.dataclass(eq=False)
class Sequence:
    """One completion in the making: host state, owned by the scheduler.

    Attributes:
        seq_id: unique in the engine.
        prompt_ids: tokens of the prompt, at least one.
        output_ids: tokens generated so far.
        sampling: options; `max_tokens` is resolved.
        seed: 64 bits that this sequence's random draws start from.
        adapter_id: identity of the adapter load, 0 for the base model.
        arrival_s: clock time of submission.
        priority: smaller runs first; equal ones in order of arrival.
        kv: where its keys and values are; None while it has none.
        computed: tokens whose keys and values are there.
        suppressed_ids: tokens that may not be chosen before `min_tokens` are generated (end and stop tokens).
    """

    seq_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    adapter_id: int = 0
    arrival_s: float = 0.0
    priority: int = 0
    suppressed_ids: tuple[int, ...] = ()
    output_ids: list[int] = dataclasses.field(default_factory=list)
    kv: KvHandle | None = None
    computed: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def token(self, position: int) -> int:
        prompt = len(self.prompt_ids)
        return self.prompt_ids[position] if position < prompt else self.output_ids[position - prompt]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A sequence's part in a step: tokens at [start, start + count) are computed.

    Attributes:
        sequence: whose.
        start: first position computed; equals sequence.computed.
        count: number of tokens.
        decode: the one token computed is the last one generated; else it is a chunk of a prefill.
        samples: the chunk ends at the last known token, so a next token is drawn.
    """

    sequence: Sequence
    start: int
    count: int
    decode: bool
    samples: bool


class StepPlan(NamedTuple):
    """What one step computes.

    Attributes:
        rows: decode rows first.
        ahead: it was made while the step before it is under way: each row's token is what that step draws for its
            sequence, which may end with it.
    """

    rows: SequenceOf[Row]
    ahead: bool = False


class RowResult(NamedTuple):
    """What a step gave for one row.

    Attributes:
        token_id: the token drawn, None where the row does not sample.
        logprobs: at the drawn token, where sampling.logprobs is not None.
        prompt_logprobs: for prefill rows that ask: entries for the prompt tokens at positions start+1 ..
            start+count that exist (the logits at position p score the token at p+1); empty otherwise.
        overflowed: the dtype that the row's numbers overflowed, so that it samples no token; None where they did not.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None
    prompt_logprobs: SequenceOf[TokenLogprobs]
    overflowed: str | None = None


class KvLostError(RuntimeError):
    """A step took the KV pages of the device with it; the pool and the sequences are as they were before.

    Args:
        message: what happened.
        failure: that the requests of the step end with; None where it is worth another try.
    """

    def __init__(self, message: str, failure: Exception | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class Executor(Protocol):
    """Carries out steps. The real one runs JAX; a modelled one may only advance a virtual clock.

    Attributes:
        meanwhile: what `execute` may call when a step is under way and it has nothing to do but wait. It may `begin`
            the next one.
    """

    meanwhile: Callable[[], None]

    @property
    def max_decode_rows(self) -> int:
        """Decode rows, and sampling rows in all, that fit one step."""
        ...

    @property
    def max_prefill_tokens(self) -> int:
        """Prefill token slots of the largest bucket."""
        ...

    @property
    def prefill_block(self) -> int:
        """A prefill row of n tokens takes ceil(n / block) * block of the step's prefill token slots."""
        ...

    def execute(self, plan: StepPlan) -> list[RowResult]:
        """Runs one step, or waits for the one that was begun; results in the order of plan.rows.

        Raises KvLostError where sequences have to be rewound. What was begun and is not executed next is forgotten.
        """
        ...

    def begin(self, plan: StepPlan) -> bool:
        """Begins a step that was planned ahead, from `meanwhile`; the next `execute` is of this plan.

        Returns:
            False where it could not be begun; the step after the one under way is planned when that has ended.
        """
        ...
