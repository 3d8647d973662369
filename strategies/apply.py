"""All strategies at once: the lanes of a phase, each served in its way, added up.

A batch's tokens may belong to lanes of different strategies; a lane skips the groups of projections that none of its
adapters changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memory_pool.layout import PageLayout
from strategies.lanes import KvControl, KvLanes, LoraLane, Memory
from strategies.paged_attention import HeadMaths, finish
from strategies.setting import AttentionSetting, LoraSetting, Sums
from strategies.strategy_table import ATTENTION, LORA
from strategies.traffic import any_scope, group_scope


def add(
    sums: Mapping[str, jax.Array],
    x_NI: jax.Array,
    memory: Memory,
    layer: jax.Array,
    lanes: Mapping[str, LoraLane],
    control: Mapping[str, LoraLane],
    *,
    serves: Mapping[str, jax.Array],
    phase: str,
    setting: LoraSetting,
    first: int = 0,
) -> Sums:
    """Adds what the adapters of all lanes give to the projections of a group.

    A lane that changes nothing in the group passes the sums on, untouched and uncopied.

    Args:
        sums: [N, O] float32 by projection.
        x_NI: [N, I], the input that the projections share.
        memory: page arrays of this shard.
        layer: [] int32.
        lanes: by strategy, on the device.
        control: the same by strategy, in the pool.
        serves: by strategy, as `serving` found them; once for all layers.
        phase: the first part of the lanes' names in the trace.
        setting: what is fixed.
        first: row of the first token of the lanes; N is at least `first` + T.

    Returns:
        [N, O] float32 by projection.
    """

    def served(sums: Sums, name: str) -> Sums:
        return LORA[name].add(
            sums,
            x_NI,
            memory,
            layer,
            lanes[name],
            control[name],
            scope=f"{phase}.{name}",
            setting=setting,
            first=first,
        )

    def all_lanes(sums: Sums) -> Sums:
        for name in lanes:
            with jax.named_scope(f"{phase}.{name}"), jax.named_scope(group_scope(phase, name, setting.group)):
                sums = lax.cond(serves[name], lambda sums, name=name: served(sums, name), _untouched, sums)
        return sums

    group = {name: sums[name] for name in setting.group}
    # One condition around those of the strategies: a step of the base model alone asks once, not once a lane.
    with jax.named_scope(any_scope(phase)):
        return lax.cond(jnp.stack(list(serves.values())).any(), all_lanes, _untouched, group)


def serving(lanes: Mapping[str, LoraLane], group: Sequence[str], *, layout: PageLayout) -> dict[str, jax.Array]:
    """[] bool by strategy: whether an adapter of its lane changes a projection of a group."""
    indices = np.array([layout.index(name) for name in group])
    return {name: jnp.any(lane.ranks[:, :, indices] > 0) for name, lane in lanes.items()}


def _untouched(sums: Sums) -> Sums:
    return sums


def is_used(lanes: Mapping[str, LoraLane]) -> jax.Array:
    """[] bool, whether any lane has adapters."""
    return jnp.stack([lane.count for lane in lanes.values()]).sum() > 0


def attend(
    q_NQHD: jax.Array,
    memory: Memory,
    layer: jax.Array,
    lanes: KvLanes,
    control: KvControl,
    maths: HeadMaths,
    *,
    phase: str,
    setting: AttentionSetting,
) -> jax.Array:
    """Attention over pages on the device, and over the others as the strategy of each group wants.

    Args:
        q_NQHD: [N, Q, heads, H] of one shard.
        memory: page arrays of this shard; the tokens of this step are already written.
        layer: [] int32.
        lanes: tables, on the device.
        control: tables, in the pool.
        maths: how scores are made.
        phase: the first part of the strategies' names in the trace.
        setting: what is fixed.

    Returns:
        [N, Q, heads, H] in the dtype of q.
    """
    groups, queries, num_heads, dim = q_NQHD.shape
    kv_heads = setting.layout.kv_heads
    repeats = num_heads // kv_heads
    q = q_NQHD.reshape(groups, queries, kv_heads, repeats, dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(groups, kv_heads, queries * repeats, dim)
    seen = setting.device.attention.call(q, memory.kv, layer, lanes.device, maths, layout=setting.layout)
    for name, strategy in ATTENTION.items():
        if strategy.computes_near and setting.near is None:
            continue
        scope = f"{phase}.{name}"
        seen = strategy.add(seen, q, memory, layer, lanes, control, maths, scope=scope, setting=setting)
    out = finish(seen).reshape(groups, kv_heads, queries, repeats, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(q_NQHD.shape).astype(q_NQHD.dtype)
