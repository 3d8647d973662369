"""Link bytes of a step as closed forms: useful ones, as the ledger counts them, and what compiled programs move.

Useful bytes equal those of `strategies.traffic` for the same adapters, tokens and sequences (a test holds them
together); moved bytes are those of whole rows, chunks and rounds. Control tables are not in either.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strategies.cost.attention_work import KvLoad, attention_work
from strategies.cost.features import AdapterFeatures, adapter_work
from strategies.cost.quantities import lane_quantities
from strategies.cost.shapes import ModelShape


class LinkWork(NamedTuple):
    """Bytes over the link in a step.

    Attributes:
        to_pool: by adapter [N], or of all.
        to_device: the same.
    """

    to_pool: np.ndarray | float
    to_device: np.ndarray | float


def lora_link_bytes(
    shape: ModelShape, features: AdapterFeatures, tokens: np.ndarray, *, strategy: str, stripes: int = 1
) -> LinkWork:
    """Useful bytes of each adapter.

    Args:
        shape: of the base model.
        features: of N adapters.
        tokens: [N] of each.
        strategy: a LoRA strategy.
        stripes: pool devices that an adapter lies on.

    Returns:
        [N] each way, all pool devices together.

    Raises:
        ValueError: there is no such strategy.
    """
    work = adapter_work(shape, features, np.asarray(tokens, float))
    nothing = np.zeros(len(features.ranks))
    x = stripes * work.x_bytes.sum(axis=1)
    ways = {
        "resident": (nothing, nothing),
        "fetch": (nothing, (work.a_bytes + work.b_bytes).sum(axis=1)),
        "near_data": (x, stripes * work.y_bytes.sum(axis=1)),
        "split": (x, work.m_bytes.sum(axis=1)),
    }
    if strategy not in ways:
        raise ValueError(f"LoRA strategy {strategy!r} is unknown: choose {', '.join(ways)}")
    return LinkWork(*ways[strategy])


def lora_moved_bytes(
    shape: ModelShape,
    features: AdapterFeatures,
    tokens: np.ndarray,
    *,
    strategy: str,
    rows: int,
    max_rank: int | None = None,
) -> LinkWork:
    """Bytes that a lane's program moves, padding included, for adapters that are pinned.

    Args:
        shape: of the base model.
        features: of the adapters of the lane.
        tokens: [N] of each.
        strategy: a LoRA strategy.
        rows: of the program.
        max_rank: that it has room for; None for the widest of the lane.
    """
    found = lane_quantities(shape, features, tokens, strategy=strategy, rows=rows, max_rank=max_rank)
    return LinkWork(found.get("to_pool.byte_s", 0.0), found.get("to_device.byte_s", 0.0))


def attention_link_bytes(shape: ModelShape, kv: KvLoad, *, strategy: str, pool_devices: int = 1) -> LinkWork:
    """Useful bytes of attention when all KV is in the pool.

    Args:
        shape: of the base model.
        kv: of the running sequences.
        strategy: an attention strategy.
        pool_devices: that hold pages of every sequence.

    Raises:
        ValueError: there is no such strategy.
    """
    work = attention_work(shape, kv)
    if strategy == "local":
        return LinkWork(0.0, work.stored_bytes)
    if strategy == "distributed":
        return LinkWork(pool_devices * work.q_bytes, pool_devices * work.out_bytes)
    raise ValueError(f"attention strategy {strategy!r} is unknown: choose local or distributed")
