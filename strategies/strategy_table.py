"""The strategies by name. Adding one is a function with the same signature, its formulas, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from memory_pool.adapter_entry import Needs
from strategies import distributed, fetch, kv_traffic, local, near_data, resident, split, traffic
from strategies.paged_attention import Partial


class LoraStrategy(NamedTuple):
    """How adapters change projections.

    Attributes:
        add: (sums [N, O] float32 by projection, x [N, I], memory, layer, lane, control, scope=, setting=, first=) to
            sums with what a lane adds to the T rows from `first` on.
        needs: matrices that it reads from adapter pages on the device.
        traffic: (bucket, use) to the link bytes of one step.
        computes_near: it is nowhere without near-data compute.
    """

    add: Callable[..., dict[str, jax.Array]]
    needs: Needs
    traffic: Callable[[traffic.LoraBucket, traffic.LoraUse], list[traffic.Bytes]]
    computes_near: bool


class AttentionStrategy(NamedTuple):
    """How queries attend over KV pages that are not on the device.

    Attributes:
        add: (seen, q [N, K, Q * R, H], memory, layer, lanes, control, maths, scope=, setting=) to Partial.
        traffic: (bucket, use) to the link bytes of one step.
        computes_near: it is nowhere without near-data compute.
    """

    add: Callable[..., Partial]
    traffic: Callable[[kv_traffic.KvBucket, kv_traffic.KvUse], list[traffic.Bytes]]
    computes_near: bool


LORA = {
    "resident": LoraStrategy(resident.add, Needs(True, True), traffic.resident, False),
    "fetch": LoraStrategy(fetch.add, Needs(False, False), traffic.fetch, False),
    "near_data": LoraStrategy(near_data.add, Needs(False, False), traffic.near_data, True),
    "split": LoraStrategy(split.add, Needs(False, True), traffic.split, True),
}
ATTENTION = {
    "local": AttentionStrategy(local.add, kv_traffic.local, False),
    "distributed": AttentionStrategy(distributed.add, kv_traffic.distributed, True),
}
