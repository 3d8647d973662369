"""The strategy `split`: A stays in the pool, B is on the device; x goes to A, and the narrow product comes back.

The input that a group of projections shares is sent once. Adapters striped over S pool devices get it S times; each
stripe gives the product with its own rank components.
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
        lane: pages of B are device pages.
        control: in the pool; pages of A are pool pages.
        scope: name under which the lane is in the trace.
        setting: what is fixed.
        first: row of the first token.

    Returns:
        [N, O] float32 by projection; what is added to tokens of the base model is 0.

    Cost:
        Link: x to each stripe, m [T, max_rank] of each projection back from each, in the dtype of x.
    """
    x_TI = rows_of(lane, x_NI, first)
    stripes = lane.ranks.shape[0]

    def near(pool: jax.Array, layer: jax.Array, x_STI: jax.Array, control: LoraLane) -> jax.Array:
        def stripe(s: int) -> jax.Array:
            return setting.at_the_data.shrink.call(
                x_STI[s],
                pool,
                layer,
                stripe_of(control, s),
                layout=setting.layout,
                group=setting.group,
                max_rank=setting.max_rank,
            )

        return jnp.stack([stripe(s) for s in range(stripes)])

    x_STI = jnp.broadcast_to(x_TI, (stripes, *x_TI.shape))
    m_SGTR = link.to_device(near_data(near)(memory.pool, link.to_pool(layer), link.to_pool(x_STI), control))
    parts = [
        setting.device.expand.call(
            m_SGTR[s], memory.adapters, layer, stripe_of(lane, s), layout=setting.layout, group=setting.group
        )
        for s in range(stripes)
    ]
    return setting.added(sums, parts, first=first)
