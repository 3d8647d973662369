"""The sizes of steps: a small lattice of buckets, so that a handful of compiled programs serves all traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memory_pool.layout import PageLayout
from plora_jax.engine.kv_lanes import KvShape
from plora_jax.engine.lora_lanes import LaneShape
from plora_jax.engine.plan import StepPlan
from strategies.paged_attention import CHUNK_TOKENS

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


class BatchShape(NamedTuple):
    """Sizes that all buckets share.

    Attributes:
        max_model_len: longest sequence, tokens.
        max_num_seqs: most sequences of a step.
        layout: of a page.
        max_rank: largest rank of an adapter; 0 serves the base model only.
        stripes: S.
        pool_devices: D.
        device_pages: pages of one pool device.
        near: something computes near the data; else nothing is sent there, and all tables are on the device.
    """

    max_model_len: int
    max_num_seqs: int
    layout: PageLayout
    max_rank: int
    stripes: int
    pool_devices: int
    device_pages: int
    near: bool = True

    @property
    def table_pages(self) -> int:
        """M: pages of the longest sequence, whole chunks."""
        return -(-self.max_model_len // CHUNK_TOKENS) * CHUNK_TOKENS // self.layout.page_tokens

    def kv(self, groups: int, queries: int) -> KvShape:
        sequences = min(groups, self.max_num_seqs)
        page_tokens = self.layout.page_tokens
        return KvShape(groups, queries, sequences, self.table_pages, page_tokens, self.pool_devices, self.device_pages)

    def lane(self, tokens: int, entries: int) -> LaneShape:
        stripe_rank = -(-self.max_rank // self.stripes)
        most = [stripe_rank] * len(self.layout.names)
        return LaneShape(
            tokens,
            entries,
            self.stripes,
            self.layout.num_layers,
            len(most),
            self.layout.a_pages(most),
            self.layout.b_pages(most),
        )


def lattice(max_num_seqs: int, max_prefill_tokens: int) -> list[Bucket]:
    """The buckets: decode alone, and full decode width with prefill, both by powers of four.

    A finer lattice pads less and compiles longer: a program of the default model takes 10 to 30 seconds of a core.

    Args:
        max_num_seqs: rows in flight.
        max_prefill_tokens: prefill slots of the largest bucket; rounded up to whole blocks.
    """
    width = -(-max_num_seqs // MIN_ROWS) * MIN_ROWS
    rows = [MIN_ROWS]
    while rows[-1] < width:
        rows.append(min(4 * rows[-1], width))
    prefills = [-(-max_prefill_tokens // PREFILL_BLOCK) * PREFILL_BLOCK]
    while (smaller := -(-prefills[0] // (4 * PREFILL_BLOCK)) * PREFILL_BLOCK) >= 4 * PREFILL_BLOCK:
        prefills.insert(0, smaller)
    return [Bucket(r, 0) for r in rows] + [Bucket(width, tokens) for tokens in prefills]


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
