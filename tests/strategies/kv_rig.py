"""Random sequences with KV pages partly on the device and partly in the pool, and full attention in plain numpy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from memory_pool import link
from memory_pool.layout import PageLayout
from memory_pool.raw import raw_dtype
from strategies import apply, kv_traffic
from strategies.kernel_tables import choose_kernels
from strategies.lanes import ABSENT, SCRATCH_PAGES, AttentionLane, KvControl, KvLanes, Memory
from strategies.paged_attention import NO_WINDOW, HeadMaths
from strategies.setting import AttentionSetting
from tests.strategies.lora_rig import SHARDED, WHOLE, mesh_of
from tests.strategies.pages_for_tests import int8_pages, make_layout

LAYERS, PAGE, KV_HEADS, DIM, HEADS, TABLE, GROUPS = 2, 16, 2, 8, 4, 24, 4
POOL_PAGES = 1 + GROUPS * TABLE
NOBODYS = 1000.0
"""Number in pages that belong to nobody: a kernel that reads one is seen."""
STREAM = -(-GROUPS * TABLE // SCRATCH_PAGES) * SCRATCH_PAGES


class Maths(NamedTuple):
    """How scores are made, with a static window; None for all tokens."""

    window: int | None = None
    soft_cap: float | None = None


@dataclasses.dataclass(frozen=True)
class KvCase:
    """Queries, tables and memory of a batch; `keys` and `values` are [n, GROUPS, L, K, S, H] in plain numpy."""

    layout: PageLayout
    q: np.ndarray
    lanes: KvLanes
    control: KvControl
    memory: Memory
    keys: np.ndarray
    values: np.ndarray
    use: kv_traffic.KvUse

    def want(self, layer: int, shard: int, maths: Maths) -> np.ndarray:
        """[N, Q, heads, H] of one shard in float64."""
        q = np.split(self.q.astype(np.float64), len(self.keys), axis=2)[shard]
        out = np.zeros(q.shape)
        for n, i, head in np.ndindex(q.shape[:3]):
            keys, values = (kv[shard, n, layer, head // (HEADS // KV_HEADS)] for kv in (self.keys, self.values))
            scores = keys @ q[n, i, head] * 0.3
            if maths.soft_cap:
                scores = maths.soft_cap * np.tanh(scores / maths.soft_cap)
            behind = self.lanes.device.positions[n, i] - np.arange(len(keys))
            seen = (behind >= 0) & (behind < (maths.window or NO_WINDOW))
            if seen.any():
                p = np.exp(scores[seen] - scores[seen].max())
                out[n, i, head] = p @ values[seen] / p.sum()
        return out

    def bucket(self, phase: str) -> kv_traffic.KvBucket:
        return kv_traffic.KvBucket(
            phase=phase,
            groups=GROUPS,
            queries=self.q.shape[1],
            heads=HEADS,
            layout=self.layout,
            table_pages=TABLE,
            stream_pages=STREAM,
            pool_devices=len(self.control.tables),
            shards=len(self.keys),
        )


def layout_of(dtype: str, *, int8_kv: bool = False) -> PageLayout:
    return make_layout(
        widths={"q": (16, 16)},
        num_layers=LAYERS,
        page_tokens=PAGE,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=dtype,
        int8_kv=int8_kv,
    )


def make_case(
    seed: int,
    *,
    lengths: Sequence[int],
    queries: int = 1,
    strategies: Sequence[str] = ("local",) * GROUPS,
    on_device: float = 0.5,
    pool_devices: int = 1,
    dtype: str = "float32",
    shards: int = 1,
    int8_kv: bool = False,
) -> KvCase:
    """Random keys and values; the last page of a sequence is on the device, others with probability `on_device`.

    Args:
        seed: of the numbers.
        lengths: tokens of each sequence, its queries included; 0 for a group of padding.
        queries: Q; a group's queries are the last ones of its sequence.
        strategies: of each group's missing pages.
        on_device: share of pages on the device.
        pool_devices: D.
        dtype: of the numbers.
        shards: of the mesh; each has other numbers in the same pages.
        int8_kv: keys and values are int8, and `keys` and `values` are what they stand for.
    """
    rng, layout = np.random.default_rng(seed), layout_of(dtype, int8_kv=int8_kv)
    contents = rng.normal(size=(shards, GROUPS, LAYERS, TABLE, 2, KV_HEADS, PAGE, DIM)).astype(layout.dtype)
    pages, nobodys = contents.reshape(*contents.shape[:4], -1).view(raw_dtype(layout.dtype)), _nobodys(layout)
    if int8_kv:
        pages, contents = int8_pages(contents, layout)
    positions = np.full((GROUPS, queries), -1, np.int32)
    placed = _Placed(rng, pages, nobodys, pool_devices)
    for n, length in enumerate(lengths):
        first = max(0, length - queries)
        positions[n, : length - first] = np.arange(first, length)
        placed.sequence(n, -(-length // PAGE), strategies[n], on_device)
    real = positions[positions >= 0]
    first, end = np.int32(real.min() if real.size else 0), np.int32(real.max(initial=-1) + 1)
    rounds = -(-len(placed.stream) // SCRATCH_PAGES)
    in_near_DN = (placed.near != ABSENT).any(axis=2)
    device = AttentionLane(placed.tables, positions, first, end)
    by_head = np.moveaxis(contents.astype(np.float64), 4, 0).swapaxes(4, 5)
    keys, values = by_head.reshape(2, shards, GROUPS, LAYERS, KV_HEADS, TABLE * PAGE, DIM)
    pool, kv = (m.reshape(shards * LAYERS, -1, layout.page_width) for m in placed.memory)
    return KvCase(
        layout=layout,
        q=rng.normal(size=(GROUPS, queries, HEADS * shards, DIM)).astype(layout.dtype),
        lanes=KvLanes(device, placed.slots, np.int32(rounds), np.int32(in_near_DN.any(axis=0).sum())),
        control=KvControl(placed.padded_stream(), placed.near, positions, first, end),
        memory=Memory(pool, kv[:, :1], kv),
        keys=keys,
        values=values,
        use=kv_traffic.KvUse(
            rounds, len(placed.stream), [int((positions[groups] >= 0).sum()) for groups in in_near_DN]
        ),
    )


def _nobodys(layout: PageLayout) -> np.ndarray:
    """[W] raw numbers of a page that belongs to nobody."""
    numbers = np.full((2, KV_HEADS, PAGE, DIM), NOBODYS, layout.dtype)
    return int8_pages(numbers, layout)[0] if layout.int8_kv else numbers.reshape(-1).view(raw_dtype(layout.dtype))


class _Placed:
    """Pages of sequences, at random places in the pool and on the device."""

    def __init__(self, rng: np.random.Generator, contents: np.ndarray, nobodys: np.ndarray, pool_devices: int) -> None:
        self._rng, self._contents = rng, contents
        self.tables, self.slots = (np.full((GROUPS, TABLE), ABSENT, np.int32) for _ in range(2))
        self.near = np.full((pool_devices, GROUPS, TABLE), ABSENT, np.int32)
        self.stream: list[int] = []
        shards, _, layers, _, width = self._contents.shape
        self.memory = [
            np.broadcast_to(nobodys, (shards, layers, pages, width)).copy()
            for pages in (pool_devices * POOL_PAGES, POOL_PAGES)
        ]
        self._free, self._free_in_pool = (
            [(rng.permutation(np.arange(1, POOL_PAGES)) + d * POOL_PAGES).tolist() for d in range(n)]
            for n in (1, pool_devices)
        )

    def sequence(self, n: int, pages: int, strategy: str, on_device: float) -> None:
        """Places the pages of group n; the last one is on the device."""
        pool, kv = self.memory
        for m in range(pages):
            content = self._contents[:, n, :, m]
            if m == pages - 1 or self._rng.random() < on_device:
                self.tables[n, m] = self._free[0].pop()
                kv[:, :, self.tables[n, m]] = content
                continue
            d = int(self._rng.integers(len(self._free_in_pool)))
            page = self._free_in_pool[d].pop()
            pool[:, :, page] = content
            if strategy == "local":
                self.slots[n, m] = len(self.stream)
                self.stream.append(page)
            else:
                self.near[d, n, m] = page

    def padded_stream(self) -> np.ndarray:
        return np.array(self.stream + [0] * (STREAM - len(self.stream)), np.int32)


def program(
    layout: PageLayout, mesh: Mesh | AbstractMesh, *, phase: str, soft_cap: float | None = None
) -> Callable[..., jax.Array]:
    """(memory, q, lanes, control, window) to [L, N, Q, n heads, H]: attention of every layer, over shards."""
    kernels = choose_kernels()
    chosen = kernels.decode if phase == "decode" else kernels.prefill
    setting = AttentionSetting(layout, chosen, chosen)

    def shard(memory: Memory, q: jax.Array, lanes: KvLanes, control: KvControl, window: jax.Array) -> jax.Array:
        def layer_of(carry: Any, layer: jax.Array) -> Any:
            maths = HeadMaths(0.3, soft_cap, window)
            return carry, apply.attend(q, memory, layer, lanes, control, maths, phase=phase, setting=setting)

        return jax.lax.scan(layer_of, None, jnp.arange(LAYERS, dtype=jnp.int32))[1]

    heads = PartitionSpec(None, None, link.TENSOR_AXIS)
    specs = (SHARDED, heads, WHOLE, WHOLE, WHOLE)
    out = PartitionSpec(None, *heads)
    return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


@functools.cache
def traced(dtype: str, shards: int, phase: str) -> Callable[..., jax.Array]:
    """The program on a mesh of devices that need not exist, which is traced only once."""
    return jax.jit(program(layout_of(dtype), AbstractMesh((shards,), (link.TENSOR_AXIS,)), phase=phase))


def shapes(case: KvCase) -> tuple[Any, ...]:
    """The program's arguments as shapes, on a mesh of devices that need not exist."""
    mesh = AbstractMesh((len(case.keys),), (link.TENSOR_AXIS,))

    def shape(tree: Any, spec: PartitionSpec, kind: str) -> Any:
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype, sharding=sharding), tree)

    memory = Memory(shape(case.memory.pool, SHARDED, "pinned_host"), *shape(case.memory[1:], SHARDED, "device"))
    lanes, control = shape(case.lanes, WHOLE, "device"), shape(case.control, WHOLE, "pinned_host")
    return memory, shape(case.q, PartitionSpec(None, None, link.TENSOR_AXIS), "device"), lanes, control, np.int32(0)


def serve(case: KvCase, maths: Maths) -> np.ndarray:
    """Runs the program of a case: [L, N, Q, n heads, H]."""
    mesh = mesh_of(len(case.keys))
    device, pool = link.device_sharding(mesh), link.pool_sharding(mesh)
    in_pool = jax.device_put(case.memory.pool, link.pool_sharding(mesh, SHARDED))
    memory = Memory(in_pool, *jax.device_put(case.memory[1:], link.device_sharding(mesh, SHARDED)))
    lanes, control = jax.device_put(case.lanes, device), jax.device_put(case.control, pool)
    phase = "decode" if case.q.shape[1] == 1 else "prefill"
    run = _compiled(case.layout.dtype.name, case.layout.int8_kv, len(case.keys), phase, maths.soft_cap)
    return np.asarray(run(memory, case.q, lanes, control, np.int32(maths.window or NO_WINDOW)), np.float64)


@functools.cache
def _compiled(dtype: str, int8_kv: bool, shards: int, phase: str, soft_cap: float | None) -> Callable[..., jax.Array]:
    return jax.jit(program(layout_of(dtype, int8_kv=int8_kv), mesh_of(shards), phase=phase, soft_cap=soft_cap))
