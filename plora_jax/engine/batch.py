"""From a plan to the arrays of one step.

A step's tokens are packed: first one token for each decode row, then prefill blocks, each block from one sequence. The
sizes come from a small lattice of buckets, so that a handful of compiled programs serves all traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from plora_jax.engine.plan import Row, StepPlan
from plora_jax.engine.sampling_batch import SamplingBatch, make_sampling_batch
from strategies import BASE, CHUNK_ROWS, CHUNK_TOKENS, NOBODY, AttentionLane, KvWrite, LoraLane

PREFILL_BLOCK = 16
"""Queries of one sequence that attend together: a wider block reads KV less often but pads short prompts more."""

MIN_ROWS = 8
"""Fewer rows than this fall off XLA's fast path on the CPU and round differently."""


class Bucket(NamedTuple):
    """Static sizes of one program.

    Attributes:
        decode_rows: D; also how many rows can be sampled.
        prefill_tokens: C, a multiple of PREFILL_BLOCK; 0 for a program without prefill.
    """

    decode_rows: int
    prefill_tokens: int

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prefill_tokens


class StepBatch(NamedTuple):
    """Everything a step needs from the host, arrays only.

    Attributes:
        tokens: [T] int32.
        positions: [T] int32.
        write: where the keys and values of each token go.
        decode: D groups of one query.
        prefill: C / PREFILL_BLOCK groups of PREFILL_BLOCK queries.
        decode_lora: decode rows and the device slots of their adapters.
        prefill_lora: prefill tokens and the device slots of their adapters.
        sample_rows: [D] int32, token whose logits each sampled row draws from.
        sampling: options of the sampled rows.
        prompt_targets: [C] int32, the token that follows each prefill token, for prompt log-probabilities.
        any_prompt_logprobs: [] bool.
    """

    tokens: Any
    positions: Any
    write: KvWrite
    decode: AttentionLane
    prefill: AttentionLane
    decode_lora: LoraLane
    prefill_lora: LoraLane
    sample_rows: Any
    sampling: SamplingBatch
    prompt_targets: Any
    any_prompt_logprobs: Any


class BatchShape(NamedTuple):
    """Sizes that all buckets share.

    Attributes:
        max_model_len: longest sequence, tokens.
        page_tokens: G.
        adapter_slots: device slots for rank components, the zero slot included.
    """

    max_model_len: int
    page_tokens: int
    adapter_slots: int

    @property
    def table_pages(self) -> int:
        """M: pages of the longest sequence, whole chunks."""
        return -(-self.max_model_len // CHUNK_TOKENS) * CHUNK_TOKENS // self.page_tokens

    @property
    def lane_slots(self) -> int:
        return -(-max(self.adapter_slots - 1, 1) // CHUNK_ROWS) * CHUNK_ROWS


def lattice(max_num_seqs: int, max_prefill_tokens: int) -> list[Bucket]:
    """The buckets: decode alone by powers of two, and full decode width with prefill by powers of four.

    Args:
        max_num_seqs: rows in flight.
        max_prefill_tokens: prefill slots of the largest bucket; rounded up to whole blocks.
    """
    width = -(-max_num_seqs // MIN_ROWS) * MIN_ROWS
    rows = MIN_ROWS
    buckets = []
    while rows < width:
        buckets.append(Bucket(rows, 0))
        rows *= 2
    buckets.append(Bucket(width, 0))
    largest = -(-max_prefill_tokens // PREFILL_BLOCK) * PREFILL_BLOCK
    tokens = 4 * PREFILL_BLOCK
    while tokens < largest:
        buckets.append(Bucket(width, tokens))
        tokens *= 4
    return [*buckets, Bucket(width, largest)]


def prefill_slots(count: int) -> int:
    """Prefill token slots that a row of `count` tokens takes."""
    return -(-count // PREFILL_BLOCK) * PREFILL_BLOCK


def pick_bucket(buckets: Sequence[Bucket], plan: StepPlan) -> Bucket:
    """The smallest bucket that holds the plan; the scheduler never plans more than the largest."""
    sampled = sum(row.decode or row.samples for row in plan.rows)
    slots = sum(prefill_slots(row.count) for row in plan.rows if not row.decode)
    fitting = [b for b in buckets if b.decode_rows >= sampled and b.prefill_tokens >= slots]
    assert fitting, f"a plan of {sampled} sampled rows and {slots} prefill slots fits no bucket of {list(buckets)}"
    return min(fitting, key=lambda b: b.tokens)


class _Packer:
    """Fills the arrays of one bucket row by row."""

    def __init__(self, bucket: Bucket, shape: BatchShape) -> None:
        self.bucket, self.shape = bucket, shape
        tokens, blocks = bucket.tokens, bucket.prefill_tokens // PREFILL_BLOCK
        self.tokens, self.positions, self.pages, self.offsets = np.zeros((4, tokens), np.int32)
        self.owners = np.zeros(tokens, np.int64)
        self.decode = self._lane(bucket.decode_rows, 1)
        self.prefill = self._lane(blocks, PREFILL_BLOCK)
        self.sample_rows = np.zeros(bucket.decode_rows, np.int32)
        self.prompt_targets = np.zeros(bucket.prefill_tokens, np.int32)
        self.decodes = self.blocks = 0

    def _lane(self, groups: int, queries: int) -> AttentionLane:
        tables = np.zeros((groups, self.shape.table_pages), np.int32)
        return AttentionLane(tables, np.full((groups, queries), -1, np.int32), np.int32(0), np.int32(0))

    def place(self, row: Row) -> int:
        """Writes a row's tokens; returns the index of its first token."""
        sequence, pages = row.sequence, np.array(row.sequence.pages, np.int32)
        if row.decode:
            at = group = self.decodes
            lane, groups = self.decode, 1
            self.decodes += 1
        else:
            group, groups = self.blocks, prefill_slots(row.count) // PREFILL_BLOCK
            at, lane = self.bucket.decode_rows + group * PREFILL_BLOCK, self.prefill
            self.blocks += groups
        positions = np.arange(row.start, row.start + row.count, dtype=np.int32)
        here = slice(at, at + row.count)
        self.tokens[here] = [sequence.token(p) for p in range(row.start, row.start + row.count)]
        self.positions[here] = positions
        self.owners[here] = sequence.adapter_id
        self.pages[here] = pages[positions // self.shape.page_tokens]
        self.offsets[here] = positions % self.shape.page_tokens
        lane.tables[group : group + groups, : len(pages)] = pages
        queries = lane.positions[group : group + groups].reshape(-1)
        queries[: row.count] = positions
        return at

    def lanes(self) -> tuple[AttentionLane, AttentionLane]:
        def bounded(lane: AttentionLane) -> AttentionLane:
            used = lane.positions[lane.positions >= 0]
            if not used.size:
                return lane
            return lane._replace(first=used.min().astype(np.int32), end=np.int32(used.max() + 1))

        return bounded(self.decode), bounded(self.prefill)


def build_batch(
    plan: StepPlan, bucket: Bucket, shape: BatchShape, *, slots_of: Callable[[int], Sequence[int]]
) -> tuple[StepBatch, list[int], list[int]]:
    """Packs a plan into the arrays of a bucket.

    Args:
        plan: rows, decode rows first.
        bucket: holds the plan.
        shape: sizes that all buckets share.
        slots_of: device slots of an adapter identity.

    Returns:
        The batch as numpy arrays; for each row of the plan the index of its sampled row or -1; and the index of its
        first token.
    """
    packer = _Packer(bucket, shape)
    sampled: list[int] = []
    firsts: list[int] = []
    sampling_rows = []
    want_prompt = False
    for row in plan.rows:
        at = packer.place(row)
        firsts.append(at)
        if row.samples:
            packer.sample_rows[len(sampling_rows)] = at + row.count - 1
            sampled.append(len(sampling_rows))
            sampling_rows.append(row.sequence)
        else:
            sampled.append(-1)
        if not row.decode and row.sequence.sampling.prompt_logprobs is not None:
            want_prompt = True
            known = min(row.start + row.count + 1, row.sequence.num_tokens)
            targets = [row.sequence.token(p) for p in range(row.start + 1, known)]
            start = at - bucket.decode_rows
            packer.prompt_targets[start : start + len(targets)] = targets
    decode, prefill = packer.lanes()
    batch = StepBatch(
        tokens=packer.tokens,
        positions=packer.positions,
        write=KvWrite(packer.pages, packer.offsets),
        decode=decode,
        prefill=prefill,
        decode_lora=_lora_lane(packer.owners[: bucket.decode_rows], shape, slots_of),
        prefill_lora=_lora_lane(packer.owners[bucket.decode_rows :], shape, slots_of),
        sample_rows=packer.sample_rows,
        sampling=make_sampling_batch(sampling_rows, rows_padded=bucket.decode_rows, max_len=shape.max_model_len),
        prompt_targets=packer.prompt_targets,
        any_prompt_logprobs=np.bool_(want_prompt),
    )
    return batch, sampled, firsts


def _lora_lane(owners: np.ndarray, shape: BatchShape, slots_of: Callable[[int], Sequence[int]]) -> LoraLane:
    """Lays the slots of some tokens' adapters end to end; owners are adapter identities, 0 for the base model."""
    slots = np.zeros(shape.lane_slots, np.int32)
    slot_owner = np.full(shape.lane_slots, NOBODY, np.int32)
    owner = np.full(owners.shape, BASE, np.int32)
    used = 0
    for index, identity in enumerate(np.unique(owners[owners > 0]).tolist()):
        own = slots_of(identity)
        slots[used : used + len(own)] = own
        slot_owner[used : used + len(own)] = index
        owner[owners == identity] = index
        used += len(own)
    return LoraLane(owner, slots, slot_owner, np.int32(-(-used // CHUNK_ROWS)))
