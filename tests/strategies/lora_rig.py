"""Random lanes of all four LoRA strategies over pages, with the same sums in plain numpy; for the tests of strategies.

Each strategy has adapters of its own; their pages lie at different numbers in the pool and on the device, and where a
strategy does not look there is NaN. Over several shards, shard i holds the numbers of shard 0 times 2 ** i.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from memory_pool import link
from memory_pool.adapter_entry import PlacedAdapter
from memory_pool.adapter_streams import AdapterFacts, share_of
from memory_pool.layout import PageLayout
from memory_pool.raw import raw_dtype
from strategies import apply, traffic
from strategies.kernel_tables import choose_kernels
from strategies.lanes import BASE, LoraLane, Memory
from strategies.setting import LoraSetting
from strategies.strategy_table import LORA
from tests.strategies.pages_for_tests import PackedAdapters, make_layout, pack_adapters

WIDTHS = {"q": (24, 16), "k": (8, 16), "down": (16, 40)}
GROUPS = (("q", "k"), ("down",))
LAYERS, MAX_RANK, ENTRIES = 2, 128, 8
SHARDED, WHOLE = PartitionSpec(link.TENSOR_AXIS), PartitionSpec()


def layout_of(dtype: str) -> PageLayout:
    return make_layout(widths=WIDTHS, num_layers=LAYERS, page_tokens=16, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Lane:
    """Adapters of one strategy: what is packed, stripe by stripe, and the lane's arrays on both sides (numpy)."""

    packs: list[PackedAdapters]
    owner: np.ndarray
    device: LoraLane
    control: LoraLane
    use: traffic.LoraUse | None


@dataclasses.dataclass(frozen=True)
class Case:
    """Lanes of a batch, the memory they lie in, and inputs by group."""

    layout: PageLayout
    lanes: Mapping[str, Lane]
    memory: Memory
    x: tuple[np.ndarray, ...]

    def want(self, name: str, layer: int) -> np.ndarray:
        """[T, O] float64 in plain numpy."""
        x = self.x[next(i for i, group in enumerate(GROUPS) if name in group)]
        return sum(pack.delta(x, layer, lane.owner, name) for lane in self.lanes.values() for pack in lane.packs)

    def bucket(self, phase: str, shards: int = 1) -> traffic.LoraBucket:
        lane = next(iter(self.lanes.values())).device
        return traffic.LoraBucket(
            phase=phase,
            tokens=len(self.x[0]),
            layout=self.layout,
            groups=GROUPS,
            max_rank=max_rank(len(lane.ranks)),
            entries=lane.ranks.shape[1],
            a_pages=lane.a_pages.shape[2],
            b_pages=lane.b_pages.shape[2],
            stripes=len(lane.ranks),
            shards=shards,
        )


def max_rank(stripes: int) -> int:
    return -(-MAX_RANK // stripes)


def make_case(
    seed: int,
    *,
    ranks: Mapping[str, np.ndarray],
    owners: np.ndarray,
    dtype: str = "float32",
    stripes: int = 1,
    entries: int = ENTRIES,
) -> Case:
    """Random matrices.

    Args:
        seed: of the numbers.
        ranks: by strategy, [n, J].
        owners: [T, 2], index of a strategy in LORA or BASE, and of an adapter of it.
        dtype: of the numbers.
        stripes: S.
        entries: E.
    """
    rng, layout = np.random.default_rng(seed), layout_of(dtype)
    most = np.full(len(layout.names), max_rank(stripes))
    room = layout.a_pages(most), layout.b_pages(most)
    num_pages = 1 + len(LORA) * stripes * (4 + entries * sum(room))
    shape = (LAYERS, num_pages, layout.page_width)
    pool, device = (np.full(shape, np.nan, layout.dtype).view(raw_dtype(layout.dtype)) for _ in range(2))
    lanes, start = {}, 1
    for index, name in enumerate(LORA):
        packs = []
        for s in range(stripes):
            share = [share_of(np.asarray(r), s, stripes).tolist() for r in ranks[name]]
            packs.append(pack_adapters(rng, layout, ranks=share or [[0] * len(layout.names)], room=entries))
        packs = [dataclasses.replace(pack, scale=packs[0].scale) for pack in packs]
        owner = np.where(owners[:, 0] == index, owners[:, 1], BASE).astype(np.int32)
        device_lane, control = [], []
        for pack in packs:
            for memory, needs, tables in ((pool, (True, True), control), (device, LORA[name].needs, device_lane)):
                offset = start if memory is pool else num_pages - start - pack.pages.shape[1]
                if memory is pool or any(needs):
                    memory[:, offset : offset + pack.pages.shape[1]] = pack.pages
                tables.append(
                    tuple(_moved(t, offset, m) for t, m in zip((pack.a_pages, pack.b_pages), room, strict=True))
                )
            start += pack.pages.shape[1]
        lane = LoraLane(
            owner, np.int32(len(ranks[name])), np.stack([p.ranks for p in packs]), packs[0].scale, None, None
        )
        lanes[name] = Lane(
            packs,
            owner,
            _with_pages(lane, device_lane),
            _with_pages(lane, control),
            _use(layout, packs, _with_pages(lane, control)),
        )
    x = tuple(rng.normal(size=(len(owners), layout.in_width(group[0]))).astype(layout.dtype) for group in GROUPS)
    return Case(layout, lanes, Memory(pool, device, np.zeros((LAYERS, 1, layout.page_width), pool.dtype)), x)


def _moved(table: np.ndarray, offset: int, room: int) -> np.ndarray:
    """Page numbers in a larger memory; 0 stays the reserved page."""
    padded = np.zeros((len(table), room), np.int32)
    padded[:, : table.shape[1]] = np.where(table > 0, table + offset, 0)
    return padded


def _with_pages(lane: LoraLane, tables: list[tuple[np.ndarray, np.ndarray]]) -> LoraLane:
    a, b = (np.stack(side) for side in zip(*tables, strict=True))
    return lane._replace(a_pages=a, b_pages=b)


def _use(layout: PageLayout, packs: list[PackedAdapters], control: LoraLane) -> traffic.LoraUse | None:
    """What the ledger is told of a lane, from the matrices themselves."""
    count = int(control.count)
    if not count:
        return None
    placed = []
    for e in range(count):
        ranks = {name: sum(len(pack.a[e][name][0]) for pack in packs) for name in layout.names}
        facts = AdapterFacts(
            inputs=LAYERS * sum(WIDTHS[g[0]][1] for g in GROUPS if any(ranks[name] for name in g)),
            outputs=LAYERS * sum(WIDTHS[name][0] for name in ranks if ranks[name]),
            ranks=LAYERS * sum(ranks.values()),
            a_numbers=LAYERS * sum(r * WIDTHS[name][1] for name, r in ranks.items()),
            b_numbers=LAYERS * sum(r * WIDTHS[name][0] for name, r in ranks.items()),
        )
        pages = control.a_pages[:, e], control.b_pages[:, e]
        placed.append(PlacedAdapter("", control.ranks[:, e], control.scale[e], *pages, facts))
    tokens = [int((control.owner == e).sum()) for e in range(count)]
    return traffic.LoraUse(tokens, traffic.lane_facts(placed))


@functools.cache
def mesh_of(shards: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:shards]), (link.TENSOR_AXIS,))


def program(
    layout: PageLayout, mesh: Mesh | AbstractMesh, *, phase: str, stripes: int
) -> Callable[..., dict[str, jax.Array]]:
    """(memory, x by group, lanes, control) to [L, T, n O] by projection: every layer of a step, over shards."""
    kernels = choose_kernels().decode

    def layer_of(carry: Any, layer: jax.Array, args: Any) -> Any:
        memory, x, lanes, control = args
        added = {}
        for group, x_TI in zip(GROUPS, x, strict=True):
            setting = LoraSetting(layout, group, max_rank(stripes), kernels, kernels)
            nothing = {name: jnp.zeros((len(x_TI), layout.out_width(name)), jnp.float32) for name in group}
            serves = apply.serving(lanes, group, layout=layout)
            added |= apply.add(
                nothing, x_TI, memory, layer, lanes, control, serves=serves, phase=phase, setting=setting
            )
        return carry, added

    def shard(*args: Any) -> dict[str, jax.Array]:
        return jax.lax.scan(lambda c, layer: layer_of(c, layer, args), None, jnp.arange(LAYERS, dtype=jnp.int32))[1]

    specs = (SHARDED, WHOLE, WHOLE, WHOLE)
    out = PartitionSpec(None, None, link.TENSOR_AXIS)
    return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


def arguments(case: Case, mesh: Mesh) -> tuple[Any, ...]:
    """The arrays of a case where the program takes them from."""

    def sharded(raw: np.ndarray, sharding: NamedSharding) -> jax.Array:
        numbers = raw.view(case.layout.dtype)
        shards = [(numbers * np.asarray(2**i, numbers.dtype)).view(raw.dtype) for i in range(mesh.size)]
        return jax.device_put(np.concatenate(shards), sharding)

    device, pool = link.device_sharding(mesh), link.pool_sharding(mesh)
    memory = Memory(
        sharded(case.memory.pool, link.pool_sharding(mesh, SHARDED)),
        sharded(case.memory.adapters, link.device_sharding(mesh, SHARDED)),
        sharded(case.memory.kv, link.device_sharding(mesh, SHARDED)),
    )
    lanes = {name: jax.device_put(lane.device, device) for name, lane in case.lanes.items()}
    control = {name: jax.device_put(lane.control, pool) for name, lane in case.lanes.items()}
    return memory, jax.device_put(case.x, device), lanes, control


@functools.cache
def traced(dtype: str, shards: int, phase: str, stripes: int) -> Callable[..., dict[str, jax.Array]]:
    """The program on a mesh of devices that need not exist, which is traced only once."""
    mesh = AbstractMesh((shards,), (link.TENSOR_AXIS,))
    return jax.jit(program(layout_of(dtype), mesh, phase=phase, stripes=stripes))


def shapes(case: Case, shards: int) -> tuple[Any, ...]:
    """The program's arguments as shapes, on a mesh of devices that need not exist."""
    mesh = AbstractMesh((shards,), (link.TENSOR_AXIS,))

    def shape(array: np.ndarray, spec: PartitionSpec, kind: str) -> jax.ShapeDtypeStruct:
        array = np.asarray(array)
        size = (shards * array.shape[0], *array.shape[1:]) if spec == SHARDED else array.shape
        return jax.ShapeDtypeStruct(size, array.dtype, sharding=NamedSharding(mesh, spec, memory_kind=kind))

    memory = Memory(
        shape(case.memory.pool, SHARDED, "pinned_host"),
        shape(case.memory.adapters, SHARDED, "device"),
        shape(case.memory.kv, SHARDED, "device"),
    )
    on_device, in_pool = (functools.partial(shape, spec=WHOLE, kind=kind) for kind in ("device", "pinned_host"))
    lanes = {name: jax.tree.map(on_device, lane.device) for name, lane in case.lanes.items()}
    control = {name: jax.tree.map(in_pool, lane.control) for name, lane in case.lanes.items()}
    return memory, jax.tree.map(on_device, case.x), lanes, control


def serve(case: Case, *, shards: int = 1) -> dict[str, np.ndarray]:
    """Runs the program of a case: [L, T, n O] by projection."""
    mesh, stripes = mesh_of(shards), len(next(iter(case.lanes.values())).device.ranks)
    out = _compiled(case.layout.dtype.name, shards, stripes)(*arguments(case, mesh))
    return {name: np.asarray(y, np.float64) for name, y in out.items()}


@functools.cache
def _compiled(dtype: str, shards: int, stripes: int) -> Callable[..., dict[str, jax.Array]]:
    return jax.jit(program(layout_of(dtype), mesh_of(shards), phase="decode", stripes=stripes))
