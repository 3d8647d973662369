"""The strategy `near_data`: A and B stay in the pool; x goes to them, and what they add comes back.

The input that a group of projections shares is sent once. Adapters striped over S pool devices get it S times and give
S partial results, which the device adds up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from memory_pool import link
from memory_pool.near import near_data
from strategies.lanes import LoraLane, Memory, rows_of, stripe_of
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
        lane: its count and number of stripes are used.
        control: in the pool; pages of A and B are pool pages.
        scope: name under which the lane is in the trace.
        setting: what is fixed.
        first: row of the first token.

    Returns:
        [N, O] float32 by projection. What is added is rounded to the dtype of x by each stripe, and 0 for tokens of the
        base model.

    Cost:
        Link: x to each stripe, y of each projection back from each, in the dtype of x.
    """
    x_TI = rows_of(lane, x_NI, first)
    stripes = lane.ranks.shape[0]

    def near(pool: jax.Array, layer: jax.Array, x_STI: jax.Array, control: LoraLane) -> list[tuple[jax.Array, ...]]:
        def stripe(s: int) -> tuple[jax.Array, ...]:
            return setting.at_the_data.delta.call(
                x_STI[s],
                pool,
                layer,
                stripe_of(control, s),
                layout=setting.layout,
                group=setting.group,
                max_rank=setting.max_rank,
                out_dtype=x_STI.dtype,
            )

        return [stripe(s) for s in range(stripes)]

    x_STI = jnp.broadcast_to(x_TI, (stripes, *x_TI.shape))
    parts = near_data(near)(memory.pool, link.to_pool(layer), link.to_pool(x_STI), control)
    back = [[link.to_device(y) for y in part] for part in parts]
    return setting.added(sums, back, first=first)
