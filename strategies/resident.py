"""The strategy `resident`: A and B are in device pages, and the device computes. Nothing crosses the link."""

from __future__ import annotations

import jax

from strategies.lanes import LoraLane, Memory, stripe_of
from strategies.setting import LoraSetting


def delta(
    x_TI: jax.Array,
    memory: Memory,
    layer: jax.Array,
    lane: LoraLane,
    control: LoraLane,
    *,
    scope: str,
    setting: LoraSetting,
) -> dict[str, jax.Array]:
    """What the adapters of a lane add to the projections of a group.

    Args:
        x_TI: [T, I], the input that the projections share.
        memory: page arrays of this shard.
        layer: [] int32.
        lane: pages of A and B are device pages.
        control: not used.
        scope: name under which the lane is in the trace.
        setting: what is fixed.

    Returns:
        [T, O] float32 by projection; 0 for tokens of the base model.
    """
    del control

    parts = [
        setting.device.delta.call(
            x_TI,
            memory.adapters,
            layer,
            stripe_of(lane, s),
            layout=setting.layout,
            group=setting.group,
            max_rank=setting.max_rank,
        )
        for s in range(lane.ranks.shape[0])
    ]
    return setting.total(parts)
