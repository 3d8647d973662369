"""The strategy `local`: the device attends; KV pages that it does not hold are streamed to it, layer by layer.

The missing pages of all groups form one stream, each page in it once. It comes in rounds of SCRATCH_PAGES, so the
scratch is fixed and the number of rounds is data. A round is gathered near the data, or, where nothing computes there,
copied page by page.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from memory_pool import link
from memory_pool.near import near_data
from strategies.lanes import ABSENT, SCRATCH_PAGES, KvControl, KvLanes, Memory
from strategies.paged_attention import HeadMaths, Partial, merge
from strategies.setting import AttentionSetting


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
    """Adds attention over the pages that are streamed.

    Args:
        seen: attention so far.
        q_NKSH: [N, K, Q * R, H].
        memory: page arrays of this shard.
        layer: [] int32.
        lanes: places of pages in the stream, and the number of rounds.
        control: the stream, in the pool; on the device where nothing computes near the data.
        maths: how scores are made.
        scope: name under which the loop over rounds is in the trace.
        setting: what is fixed.

    Returns:
        Attention over the pages of `seen` and of the stream.

    Cost:
        Link: SCRATCH_PAGES pages of one layer a round.
    """

    def gather(pool_LPW: jax.Array, at: jax.Array, stream: jax.Array) -> jax.Array:
        pages = lax.dynamic_slice_in_dim(stream, at[1] * SCRATCH_PAGES, SCRATCH_PAGES)
        # Arithmetic with a scalar loses its memory space, so the layer is an array like the pages.
        layers = jnp.broadcast_to(at[:1], pages.shape)
        return pool_LPW.at[layers, pages].get(mode="promise_in_bounds")

    def gathered(i: jax.Array) -> jax.Array:
        at = link.to_pool(jnp.stack([layer, i]))
        return link.to_device(near_data(gather)(memory.pool, at, control.stream))

    def copied(i: jax.Array) -> jax.Array:
        def one(page: jax.Array) -> jax.Array:
            return link.read_block(memory.pool, (layer, page, 0), (1, 1, memory.pool.shape[2])).reshape(-1)

        return lax.map(one, lax.dynamic_slice_in_dim(control.stream, i * SCRATCH_PAGES, SCRATCH_PAGES))

    def one_round(i: jax.Array, seen: Partial) -> Partial:
        scratch_1PW = (copied(i) if setting.near is None else gathered(i))[None]
        place = lanes.slots - i * SCRATCH_PAGES
        here = (place >= 0) & (place < SCRATCH_PAGES) & (lanes.slots != ABSENT)
        lane = lanes.device._replace(tables=jnp.where(here, place, ABSENT))
        found = setting.device.attention.call(
            q_NKSH, scratch_1PW, jnp.zeros((), jnp.int32), lane, maths, layout=setting.layout
        )
        return merge(seen, found)

    with jax.named_scope(scope):
        return lax.fori_loop(0, lanes.rounds, one_round, seen)
