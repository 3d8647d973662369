"""The strategy `fetch`: A and B are in the pool and are streamed to the device, which computes.

The rank components of all adapters of a lane lie end to end and come in chunks of CHUNK_ROWS, so the scratch is one
chunk of A and one of B whatever the adapters are, each component crosses once however many tokens use it, and the
number of chunks is data. The rows of a chunk are gathered near the data, or, where nothing computes there, copied one
unit of a page after the other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from memory_pool import link
from memory_pool.layout import PageLayout
from memory_pool.near import near_data
from strategies import low_rank
from strategies.lanes import LoraLane, Memory, Stripe, rows_of, stripe_of
from strategies.setting import LoraSetting, Sums


def chunk_scope(scope: str, name: str, stripe: int) -> str:
    """Name under which the loop over chunks of a projection and a stripe is in the trace."""
    return f"{scope}.{name}.{stripe}"


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
        lane: owners, ranks and scales are used.
        control: in the pool; pages of A and B are pool pages. Not used where nothing computes near the data: then
            `lane` has those pages.
        scope: name under which the lane is in the trace; each projection and stripe has its own, `chunk_scope`.
        setting: what is fixed.
        first: row of the first token.

    Returns:
        [N, O] float32 by projection; what is added to tokens of the base model is 0.

    Cost:
        Link: CHUNK_ROWS rows of A and of B for each chunk, that is the rank components of the lane rounded up.
    """

    x_TI = rows_of(lane, x_NI, first)
    stripes = range(lane.ranks.shape[0])

    def stream(x_TI: jax.Array, name: str, stripe: int) -> jax.Array:
        with jax.named_scope(chunk_scope(scope, name, stripe)):
            return low_rank.delta(
                x_TI,
                memory.pool,
                layer,
                stripe_of(lane, stripe),
                layout=setting.layout,
                group=(name,),
                max_rank=setting.max_rank,
                gather=over_the_link(control, stripe, setting),
            )[0]

    return setting.added(sums, [[stream(x_TI, name, s) for name in setting.group] for s in stripes], first=first)


def over_the_link(control: LoraLane, stripe: int, setting: LoraSetting) -> low_rank.RowsKernel:
    """Rows of a chunk, gathered near the data and brought to the device; copied where nothing computes there."""
    if setting.near is None:
        return _copied
    kernels = setting.at_the_data

    def gather(
        pool: jax.Array, layer: jax.Array, lane: Stripe, chunk: jax.Array, *, layout: PageLayout, name: str, side: str
    ) -> jax.Array:
        del lane  # Its tables are on the device; the pool has its own.

        def near(pool: jax.Array, at: jax.Array, control: LoraLane) -> jax.Array:
            table = stripe_of(control, stripe)
            return kernels.rows.call(pool, at[0], table, at[1], layout=layout, name=name, side=side)

        return link.to_device(near_data(near)(pool, link.to_pool(jnp.stack([layer, chunk])), control))

    return gather


def _copied(
    pool: jax.Array, layer: jax.Array, lane: Stripe, chunk: jax.Array, *, layout: PageLayout, name: str, side: str
) -> jax.Array:
    """As `low_rank.rows`, of a lane on the device whose pages are pool pages: a copy a unit."""
    page_CN, unit_CN = low_rank.places(lane, chunk, layout=layout, name=name, side=side)

    def one(place: tuple[jax.Array, jax.Array]) -> jax.Array:
        page, unit = place
        return link.read_block(pool, (layer, page, unit * layout.unit), (1, 1, layout.unit)).reshape(-1)

    return lax.map(one, (page_CN.reshape(-1), unit_CN.reshape(-1))).reshape(low_rank.CHUNK_ROWS, -1)
