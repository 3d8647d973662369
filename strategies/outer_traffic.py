"""What embedding and head adapters move over the link in a step: closed formulas, for the ledger.

As in `strategies.traffic`, moved bytes are those of the arrays that cross and useful ones those that exactly these
tokens and ranks need; both on all shards together. b tokens of an adapter, r its rank, I and O of one shard:

                embedding                                       head
    resident    0                                               0
    fetch       S b token ids to the pool; b r back, and r O    r (I + O) back
    near_data   S b token ids to the pool; S b O back           S b I to the pool; S b O back
    split       S b token ids to the pool; b r back             S b I to the pool; b r back

Token ids, and the layer and chunk of every chunk of `fetch`, are control.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from memory_pool.layout import PageLayout
from memory_pool.ledger import Crossing, Direction, LinkBytes
from strategies.fetch import chunk_scope
from strategies.low_rank import CHUNK_ROWS
from strategies.traffic import WORD, Bytes, LoraBucket, LoraUse, chunks, lane_counts

EMBEDDING, HEAD = "embed_tokens", "lm_head"
"""Names of the projections in the layout."""


class _Numbers(NamedTuple):
    """Numbers, not bytes, on one shard."""

    moved: int
    useful: int


def embedding(bucket: LoraBucket, strategy: str, use: LoraUse) -> list[Bytes]:
    """Bytes of one call of `outer.embed_delta`.

    Args:
        bucket: sizes; its groups are not used.
        strategy: "resident", "fetch", "near_data" or "split".
        use: of the lane, which is not empty.
    """
    if strategy == "resident":
        return []
    back = _y(bucket, use, EMBEDDING) if strategy == "near_data" else _m(bucket, use, EMBEDDING)
    sent = _once_a_stripe(bucket, use, 1)
    crossed = [_numbers(bucket, strategy, "activation", "to_device", back)]
    calls = 0
    if strategy == "fetch":
        calls = _num_chunks(use, bucket.layout, EMBEDDING) * bucket.layout.num_layers
        crossed.append(_numbers(bucket, strategy, "adapter", "to_device", _streamed(bucket, use, EMBEDDING, ("b",))))
    control = _Numbers(sent.moved + 2 * calls, sent.useful + 2 * calls)
    return [*crossed, _control(bucket, strategy, control)]


def head(bucket: LoraBucket, strategy: str, use: LoraUse, *, calls: int = 1) -> list[Bytes]:
    """Bytes of `outer.head_delta`.

    Args:
        bucket: sizes; its groups are not used.
        strategy: "resident", "fetch", "near_data" or "split".
        use: of the lane, which is not empty.
        calls: over how many calls the bucket's tokens are spread evenly; `fetch` streams in each.
    """
    if strategy == "resident":
        return []
    if strategy == "fetch":
        streamed = _streamed(bucket, use, HEAD, ("a", "b"))
        words = calls * 2 * 2 * _num_chunks(use, bucket.layout, HEAD) * bucket.layout.num_layers
        moved = _Numbers(calls * streamed.moved, streamed.useful)
        return [
            _numbers(bucket, strategy, "adapter", "to_device", moved),
            _control(bucket, strategy, _Numbers(words, words)),
        ]
    back = _y(bucket, use, HEAD) if strategy == "near_data" else _m(bucket, use, HEAD)
    start, stop = bucket.layout.projections[HEAD].inputs[0]
    return [
        _numbers(bucket, strategy, "activation", "to_pool", _once_a_stripe(bucket, use, stop - start)),
        _numbers(bucket, strategy, "activation", "to_device", back),
    ]


def loop_counts(bucket: LoraBucket, use: Mapping[str, LoraUse]) -> dict[str, int]:
    """How often what is data in a program runs, for `audit`; scopes are named as `traffic.lora_loop_counts` names them.

    Args:
        bucket: sizes; its groups are not used.
        use: by strategy; one that is absent is an empty lane.
    """
    counts = lane_counts(bucket.phase, use)
    for name in (EMBEDDING, HEAD):
        if name not in bucket.layout.names:
            continue
        of_stripe = np.zeros(bucket.stripes, int)
        if "fetch" in use:
            of_stripe = chunks(use["fetch"].facts.totals)[:, bucket.layout.index(name)]
        scope = f"{bucket.phase}.fetch"
        counts |= {chunk_scope(scope, name, stripe): int(count) for stripe, count in enumerate(of_stripe)}
    return counts


def _num_chunks(use: LoraUse, layout: PageLayout, name: str) -> int:
    """Chunks of all stripes."""
    return int(chunks(use.facts.totals)[:, layout.index(name)].sum())


def _once_a_stripe(bucket: LoraBucket, use: LoraUse, width: int) -> _Numbers:
    """What each stripe gets, or gives, for each token."""
    return _Numbers(bucket.stripes * bucket.tokens * width, bucket.stripes * int(np.sum(use.tokens)) * width)


def _y(bucket: LoraBucket, use: LoraUse, name: str) -> _Numbers:
    start, stop = bucket.layout.projections[name].out[0]
    return _once_a_stripe(bucket, use, stop - start)


def _m(bucket: LoraBucket, use: LoraUse, name: str) -> _Numbers:
    components = use.facts.components[:, bucket.layout.index(name)]
    return _Numbers(bucket.stripes * bucket.tokens * bucket.max_rank, int(np.dot(use.tokens, components)))


def _streamed(bucket: LoraBucket, use: LoraUse, name: str, sides: tuple[str, ...]) -> _Numbers:
    """Rows of A ("a") and of B ("b"), chunk by chunk, layer by layer."""
    layout, cut = bucket.layout, bucket.layout.projections[name]
    in_layer = {"a": layout.in_width(name), "b": layout.out_width(name)}
    real = {side: stop - start for side, (start, stop) in (("a", cut.inputs[0]), ("b", cut.out[0]))}
    rows = CHUNK_ROWS * _num_chunks(use, layout, name) * layout.num_layers
    components = int(use.facts.totals[:, layout.index(name)].sum())
    return _Numbers(rows * sum(in_layer[s] for s in sides), components * sum(real[s] for s in sides))


def _numbers(bucket: LoraBucket, strategy: str, item: str, direction: Direction, numbers: _Numbers) -> Bytes:
    width = bucket.adapter_item if item == "adapter" else bucket.item
    return Crossing(item, strategy, direction, bucket.phase), LinkBytes(numbers.moved * width, numbers.useful * width)


def _control(bucket: LoraBucket, strategy: str, words: _Numbers) -> Bytes:
    size = LinkBytes(words.moved * WORD * bucket.shards, words.useful * WORD * bucket.shards)
    return Crossing("control", strategy, "to_pool", bucket.phase), size
