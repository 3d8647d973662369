"""The attention of a step as work: bytes of keys and values, FLOPs, and what crosses the link for it."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from strategies.cost.shapes import ModelShape

STATISTICS_BYTES = 8
"""Running maximum and sum of a head, float32."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KvLoad:
    """The sequences that run in a step, and where their KV may be.

    Attributes:
        contexts: [B] tokens that the last query of a sequence sees, itself included.
        queries: [B] tokens of each in the step: 1 in decode, a chunk in prefill.
        page_tokens: tokens of a page.
        shares: [D] of the KV that is in the pool, by pool device; they add up to 1. None: equal shares.
        current_fraction: P before the plan.
        min_fraction: least P.
    """

    contexts: np.ndarray
    queries: np.ndarray
    page_tokens: int = 16
    shares: np.ndarray | None = None
    current_fraction: float = 0.0
    min_fraction: float = 0.0

    @functools.cached_property
    def tokens(self) -> int:
        """T of the step."""
        return int(np.sum(self.queries))

    def share_of(self, pool_devices: int) -> np.ndarray:
        """[D] of the KV in the pool.

        Raises:
            ValueError: `shares` is for another number of pool devices.
        """
        if self.shares is None:
            return np.full(pool_devices, 1 / pool_devices)
        if np.shape(self.shares) != (pool_devices,):
            raise ValueError(f"shares {self.shares!r} must have one entry for each of the {pool_devices} pool devices")
        return np.asarray(self.shares, float)


def decoding(contexts: np.ndarray) -> KvLoad:
    """Sequences of one token each.

    Args:
        contexts: [B], the token of the step included.
    """
    return KvLoad(contexts=np.asarray(contexts), queries=np.ones(len(contexts), int))


class AttentionWork(NamedTuple):
    """Sums over sequences and layers.

    Attributes:
        stored_bytes: KV as it is kept, in whole pages.
        pages: of it.
        read_bytes: keys and values that queries see, each once a sequence.
        flops: of scores and outputs.
        q_bytes: of all queries.
        out_bytes: of all outputs and their statistics, from one place.
        sequences: B.
    """

    stored_bytes: float
    pages: float
    read_bytes: float
    flops: float
    q_bytes: float
    out_bytes: float
    sequences: int


def attention_work(shape: ModelShape, kv: KvLoad) -> AttentionWork:
    """The attention of a step, wherever it is computed."""
    attention, item = shape.attention, shape.item_bytes
    contexts, queries = np.asarray(kv.contexts, float), np.asarray(kv.queries, float)
    pages = float(np.ceil(contexts / kv.page_tokens).sum())
    read, pairs = 0.0, 0.0
    for layers, window in attention.windows:
        seen, before = contexts, queries * (contexts - (queries - 1) / 2)
        if window is not None:
            seen, before = np.minimum(contexts, window + queries - 1), np.minimum(before, queries * window)
        read += layers * float(seen.sum())
        pairs += layers * float(before.sum())
    rows = attention.layers * attention.heads * float(queries.sum())
    return AttentionWork(
        stored_bytes=pages * kv.page_tokens * attention.layers * shape.kv_bytes,
        pages=pages,
        read_bytes=read * shape.kv_bytes,
        flops=2 * attention.heads * (attention.score_dim + attention.value_dim) * pairs,
        q_bytes=rows * attention.score_dim * item,
        out_bytes=rows * (attention.value_dim * item + STATISTICS_BYTES),
        sequences=len(contexts),
    )
