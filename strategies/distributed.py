"""The strategy `distributed`: queries go to the KV pages in the pool, and each pool device attends over its own.

Back come, from every pool device, the normalised output in the dtype of q and per head the maximum and sum (float32),
which the device merges exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from memory_pool import link
from memory_pool.near import near_data
from strategies.lanes import AttentionLane, KvControl, KvLanes, Memory
from strategies.paged_attention import HeadMaths, Partial, merge
from strategies.setting import AttentionSetting

_TINY = 1e-30


def add(
    seen: Partial,
    q_NKSH: jax.Array,
    memory: Memory,
    layer: jax.Array,
    lanes: KvLanes,
    control: KvControl,
    maths: HeadMaths,
    *,
    scope: str,
    setting: AttentionSetting,
) -> Partial:
    """Adds attention over the pages that stay in the pool.

    Args:
        seen: attention so far.
        q_NKSH: [N, K, Q * R, H].
        memory: page arrays of this shard.
        layer: [] int32.
        lanes: `near_groups` decides whether anything is done.
        control: tables of every pool device, in the pool.
        maths: how scores are made.
        scope: name under which it is in the trace.
        setting: what is fixed.

    Returns:
        Attention over the pages of `seen` and of the tables.

    Cost:
        Link: q to each of the D pool devices, from each the output and 8 bytes a head.
    """
    num_devices = control.tables.shape[0]

    def near(pool: jax.Array, at: jax.Array, q_DNKSH: jax.Array, control: KvControl) -> Partial:
        def part(d: int) -> Partial:
            lane = AttentionLane(control.tables[d], control.positions, control.first, control.end)
            own = maths._replace(window=at[1])
            found = setting.at_the_data.attention.call(q_DNKSH[d], pool, at[0], lane, own, layout=setting.layout)
            out = found.out / jnp.maximum(found.sum, _TINY)[..., None]
            return Partial(out.astype(q_DNKSH.dtype), found.max, found.sum)

        return jax.tree.map(lambda *parts: jnp.stack(parts), *(part(d) for d in range(num_devices)))

    def serve(seen: Partial) -> Partial:
        at = link.to_pool(jnp.stack([layer, jnp.asarray(maths.window, jnp.int32)]))
        q_DNKSH = link.to_pool(jnp.broadcast_to(q_NKSH, (num_devices, *q_NKSH.shape)))
        out, top, total = map(link.to_device, near_data(near)(memory.pool, at, q_DNKSH, control))
        for d in range(num_devices):
            seen = merge(seen, Partial(out[d].astype(jnp.float32) * total[d][..., None], top[d], total[d]))
        return seen

    with jax.named_scope(scope):
        return lax.cond(lanes.near_groups > 0, serve, lambda seen: seen, seen)
