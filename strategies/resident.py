"""The strategy `resident`: A and B are in device pages, and the device computes. Nothing crosses the link."""

from __future__ import annotations

import jax

from strategies.lanes import LoraLane, Memory, stripe_of
from strategies.setting import LoraSetting, Sums


def add(
    sums: Sums,
    x_NI: jax.Array,
    memory: Memory,
    layer: jax.Array,
    lane: LoraLane,
    control: LoraLane,
    *,
    scope: str,
    setting: LoraSetting,
    first: int,
) -> Sums:
    """Adds what the adapters of a lane give to the projections of a group.

    Args:
        sums: [N, O] float32 by projection.
        x_NI: [N, I], the input that the projections share.
        memory: page arrays of this shard.
        layer: [] int32.
        lane: pages of A and B are device pages.
        control: not used.
        scope: name under which the lane is in the trace.
        setting: what is fixed.
        first: row of the first token.

    Returns:
        [N, O] float32 by projection; rows of tokens of the base model are as they were.
    """
    del control
    own = tuple(sums[name] for name in setting.group)
    for s in range(lane.ranks.shape[0]):
        own = setting.device.add.call(
            own,
            x_NI,
            memory.adapters,
            layer,
            stripe_of(lane, s),
            layout=setting.layout,
            group=setting.group,
            max_rank=setting.max_rank,
            first=first,
        )
    return dict(zip(setting.group, own, strict=True))
