"""LoRA outside the layers, on the embedding and the head, by the same four strategies.

They work on whole pages instead of one layer of them (`strategies.spread`). The embedding's shrink looks one number of
each row of A up, wherever A is, so `fetch` sends the tokens to the pool and has m back instead of rows of A, which are
as long as the vocabulary; where nothing computes in the pool, these numbers are copied one by one. An adapter striped
over S pool devices gets the input S times; the device adds up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memory_pool import link
from memory_pool.near import near_data
from strategies import low_rank
from strategies.fetch import chunk_scope, over_the_link
from strategies.lanes import LoraLane, Memory, Stripe, stripe_of
from strategies.setting import LoraSetting
from strategies.spread import Shrink, Take, expand_spread, lookup, numbers, out_size, shrink_spread


class _Work(NamedTuple):
    """What a strategy is called with; the fields are the arguments of `head_delta`."""

    inputs: jax.Array
    memory: Memory
    lane: LoraLane
    control: LoraLane
    scope: str
    setting: LoraSetting

    @property
    def stripes(self) -> range:
        return range(self.lane.ranks.shape[0])


_First = Callable[..., jax.Array]
"""The first half, (inputs, pages, lane, setting=, shrink=) to m [T, R]: that of the embedding or of the head."""


def embed_delta(
    tokens_T: jax.Array,
    memory: Memory,
    lane: LoraLane,
    control: LoraLane,
    *,
    strategy: str,
    scope: str,
    setting: LoraSetting,
) -> jax.Array:
    """What the adapters of a lane add to the embeddings of tokens, before the model scales them.

    Args:
        tokens_T: [T] int32 token ids.
        memory: page arrays of this shard.
        lane: device side; pages are device pages where the strategy reads them on the device.
        control: in the pool; pages are pool pages where the strategy reads them there.
        strategy: "resident", "fetch", "near_data" or "split".
        scope: name under which the lane is in the trace; `fetch` has `fetch.chunk_scope` of each stripe too.
        setting: what is fixed; its group is the embedding alone.

    Returns:
        [T, D] float32, D of this shard; 0 for tokens of the base model.

    Cost:
        Link: `strategies.outer_traffic`. Numbers cross in the dtype of the pages.
    """
    return _serve(_EMBEDDING[strategy], _Work(tokens_T, memory, lane, control, scope, setting))


def head_delta(
    hidden_TD: jax.Array,
    memory: Memory,
    lane: LoraLane,
    control: LoraLane,
    *,
    strategy: str,
    scope: str,
    setting: LoraSetting,
) -> jax.Array:
    """What the adapters of a lane add to logits, before their soft cap.

    Args:
        hidden_TD: [T, D] after the final norm.
        memory: page arrays of this shard.
        lane: device side; pages are device pages where the strategy reads them on the device.
        control: in the pool; pages are pool pages where the strategy reads them there.
        strategy: "resident", "fetch", "near_data" or "split".
        scope: name under which the lane is in the trace; `fetch` has `fetch.chunk_scope` of each stripe too.
        setting: what is fixed; its group is the head alone.

    Returns:
        [T, V] float32, V of this shard; 0 for tokens of the base model.

    Cost:
        Link: `strategies.outer_traffic`. Activations cross in the dtype of hidden.
    """
    return _serve(_HEAD[strategy], _Work(hidden_TD, memory, lane, control, scope, setting))


def _serve(strategy: Callable[[_Work], jax.Array], work: _Work) -> jax.Array:
    def serve(inputs: jax.Array) -> jax.Array:
        return strategy(work._replace(inputs=inputs))

    def skip(inputs: jax.Array) -> jax.Array:
        return jnp.zeros((inputs.shape[0], out_size(work.setting)), jnp.float32)

    with jax.named_scope(work.scope):
        return lax.cond(work.lane.count > 0, serve, skip, work.inputs)


def _look_up(
    tokens_T: jax.Array,
    pages_LPW: jax.Array,
    lane: Stripe,
    *,
    setting: LoraSetting,
    shrink: Shrink | None = None,
    take: Take = numbers,
) -> jax.Array:
    del shrink  # Nothing is multiplied.
    (name,) = setting.group
    return lookup(tokens_T, pages_LPW, lane, layout=setting.layout, name=name, max_rank=setting.max_rank, take=take)


def _resident(first: _First, work: _Work) -> jax.Array:
    setting, pages = work.setting, work.memory.adapters

    def stripe(lane: Stripe) -> jax.Array:
        m_TR = first(work.inputs, pages, lane, setting=setting, shrink=setting.device.shrink.call)
        return expand_spread(m_TR, pages, lane, setting=setting, expand=setting.device.expand.call)

    return _total([stripe(stripe_of(work.lane, s)) for s in work.stripes])


def _near_data(first: _First, work: _Work) -> jax.Array:
    setting, near_kernels = work.setting, work.setting.at_the_data

    def near(inputs: jax.Array, pool: jax.Array, lane: Stripe) -> jax.Array:
        m_TR = first(inputs, pool, lane, setting=setting, shrink=near_kernels.shrink.call)
        return expand_spread(m_TR, pool, lane, setting=setting, expand=near_kernels.expand.call, out_dtype=m_TR.dtype)

    y_STO = _at_the_data(near, work)
    return _total([y_STO[s].astype(jnp.float32) for s in work.stripes])


def _split(first: _First, work: _Work) -> jax.Array:
    m_STR, setting = _first_at_the_data(first, work), work.setting

    def stripe(s: int) -> jax.Array:
        lane = stripe_of(work.lane, s)
        return expand_spread(m_STR[s], work.memory.adapters, lane, setting=setting, expand=setting.device.expand.call)

    return _total([stripe(s) for s in work.stripes])


def _fetch_embedding(work: _Work) -> jax.Array:
    pool, setting = work.memory.pool, work.setting
    if setting.near is None:
        lanes = [stripe_of(work.lane, s) for s in work.stripes]
        m_STR = jnp.stack([_look_up(work.inputs, pool, lane, setting=setting, take=_copied) for lane in lanes])
    else:
        m_STR = _first_at_the_data(_look_up, work)

    def stripe(s: int) -> jax.Array:
        expand = _streamed(low_rank.expand, work, s)
        return expand_spread(m_STR[s], pool, stripe_of(work.lane, s), setting=setting, expand=expand)

    return _total([stripe(s) for s in work.stripes])


def _copied(pool: jax.Array, layer: jax.Array, page: jax.Array, place: jax.Array) -> jax.Array:
    """Single numbers of pool pages, a copy each."""

    def one(at: tuple[jax.Array, ...]) -> jax.Array:
        return link.read_block(pool, at, (1, 1, 1)).reshape(())

    where = tuple(jnp.broadcast_to(part, page.shape).reshape(-1) for part in (layer, page, place))
    return lax.map(one, where).reshape(page.shape)


def _fetch_head(work: _Work) -> jax.Array:
    setting, pool = work.setting, work.memory.pool

    def stripe(s: int) -> jax.Array:
        lane = stripe_of(work.lane, s)
        m_TR = shrink_spread(work.inputs, pool, lane, setting=setting, shrink=_streamed(low_rank.shrink, work, s))
        return expand_spread(m_TR, pool, lane, setting=setting, expand=_streamed(low_rank.expand, work, s))

    return _total([stripe(s) for s in work.stripes])


def _streamed(kernel: Callable[..., Any], work: _Work, stripe: int) -> Callable[..., Any]:
    """A kernel whose rows come over the link."""
    (name,) = work.setting.group
    gather = over_the_link(work.control, stripe, work.setting)

    def call(*args: Any, **options: Any) -> Any:
        # Here, not around the loop over layers: what is traced inside a loop does not know the names around it.
        with jax.named_scope(chunk_scope(work.scope, name, stripe)):
            return kernel(*args, gather=gather, **options)

    return call


def _first_at_the_data(first: _First, work: _Work) -> jax.Array:
    """m [S, T, R] of every stripe, computed where A is and brought to the device."""

    def near(inputs: jax.Array, pool: jax.Array, lane: Stripe) -> jax.Array:
        return first(inputs, pool, lane, setting=work.setting, shrink=work.setting.at_the_data.shrink.call)

    return _at_the_data(near, work)


def _at_the_data(near: Callable[[jax.Array, jax.Array, Stripe], jax.Array], work: _Work) -> jax.Array:
    """Sends the inputs to each stripe, runs `near` there and brings the results [S, ...] back."""

    def run(pool: jax.Array, sent: jax.Array, control: LoraLane) -> jax.Array:
        return jnp.stack([near(sent[s], pool, stripe_of(control, s)) for s in work.stripes])

    sent = link.to_pool(jnp.broadcast_to(work.inputs, (len(work.stripes), *work.inputs.shape)))
    return link.to_device(near_data(run)(work.memory.pool, sent, work.control))


def _total(parts: Sequence[jax.Array]) -> jax.Array:
    return sum(parts[1:], start=parts[0])


_EMBEDDING: Mapping[str, Callable[[_Work], jax.Array]] = {
    "resident": functools.partial(_resident, _look_up),
    "fetch": _fetch_embedding,
    "near_data": functools.partial(_near_data, _look_up),
    "split": functools.partial(_split, _look_up),
}
_HEAD: Mapping[str, Callable[[_Work], jax.Array]] = {
    "resident": functools.partial(_resident, shrink_spread),
    "fetch": _fetch_head,
    "near_data": functools.partial(_near_data, shrink_spread),
    "split": functools.partial(_split, shrink_spread),
}
