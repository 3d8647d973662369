"""The strategies by name. Adding one is a function with the same signature, its formulas, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from memory_pool.adapter_entry import Needs
from memory_pool.probe import ProbeReport
from strategies import distributed, fetch, local, near_data, resident, split, traffic
from strategies.paged_attention import Partial


class LoraStrategy(NamedTuple):
    """How adapters change projections.

    Attributes:
        delta: (x [T, I], memory, layer, lane, control, scope=, setting=) to [T, O] float32 by projection.
        needs: matrices that it reads from adapter pages on the device.
        traffic: (bucket, use) to the link bytes of one step.
        unsupported: None when it can run on a machine, else why not.
    """

    delta: Callable[..., dict[str, jax.Array]]
    needs: Needs
    traffic: Callable[[traffic.LoraBucket, traffic.LoraUse], list[traffic.Bytes]]
    unsupported: Callable[[ProbeReport], str | None]


class AttentionStrategy(NamedTuple):
    """How queries attend over KV pages that are not on the device.

    Attributes:
        add: (seen, q [N, K, Q * R, H], memory, layer, lanes, control, maths, scope=, setting=) to Partial.
        traffic: (bucket, use) to the link bytes of one step.
        unsupported: None when it can run on a machine, else why not.
    """

    add: Callable[..., Partial]
    traffic: Callable[[traffic.KvBucket, traffic.KvUse], list[traffic.Bytes]]
    unsupported: Callable[[ProbeReport], str | None]


def _always(report: ProbeReport) -> str | None:
    del report
    return None


def _reads_the_pool(report: ProbeReport) -> str | None:
    if report.near_data:
        return None
    return f"near-data functions do not work on {report.platform}: {report.problem}"


LORA = {
    "resident": LoraStrategy(resident.delta, Needs(True, True), traffic.resident, _always),
    "fetch": LoraStrategy(fetch.delta, Needs(False, False), traffic.fetch, _reads_the_pool),
    "near_data": LoraStrategy(near_data.delta, Needs(False, False), traffic.near_data, _reads_the_pool),
    "split": LoraStrategy(split.delta, Needs(False, True), traffic.split, _reads_the_pool),
}
ATTENTION = {
    # Without a pool nothing is streamed, and every page is on the device.
    "local": AttentionStrategy(local.add, traffic.local, _always),
    "distributed": AttentionStrategy(distributed.add, traffic.distributed, _reads_the_pool),
}
