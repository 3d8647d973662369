"""The programs that the strategies benchmark times: one step's adapters by each LoRA strategy, and near-data functions.

Each goes through all layers, as a step does: a layer's input depends on the layer before it, so nothing is moved out of
the loop. Of what a projection gets only as many numbers as there are tokens are used, so that what is timed is the
strategy.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from launch.benchmarks.cold_pages import ColdPages
from memory_pool import link
from memory_pool.adapter_pool import AdapterFacts, PlacedAdapter
from memory_pool.auditing import LinkTraffic, audit
from memory_pool.layout import PageLayout
from memory_pool.near import near_data
from plora_jax.config import ModelConfig
from plora_jax.engine.build import EngineConfig, page_layout
from plora_jax.engine.traffic import groups_of
from plora_jax.parallel import TensorParallel
from strategies import apply, traffic
from strategies.kernel_tables import KernelSet
from strategies.lanes import ABSENT, BASE, AttentionLane, LoraLane, Memory, stripe_of
from strategies.paged_attention import CHUNK_TOKENS, NO_WINDOW, HeadMaths
from strategies.setting import LoraSetting
from strategies.strategy_table import LORA

SMALLEST_ROWS = 8
PHASE = "bench"


class LoraPoint(NamedTuple):
    """A point of the grid: `adapters` distinct adapters of one rank on all projections, each with as many tokens."""

    rank: int
    tokens_per_adapter: int
    adapters: int

    @property
    def rows(self) -> int:
        """T: rows of the step; the smallest bucket has 8."""
        return max(SMALLEST_ROWS, self.adapters * self.tokens_per_adapter)


class AttentionPoint(NamedTuple):
    """A point of the grid: `sequences` of one query and `context` tokens each."""

    context: int
    sequences: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program and what a call of it works on.

    Attributes:
        name: of the strategy or near-data function.
        call: runs it; the result is on its way when it returns.
        arguments: gives those of the next call, on pages that were not read for a round.
        data_bytes: of A, B, keys and values that a call reads, each once.
        moved: bytes over the link in a call, as the audit of the program counts them; tables of pages included.
        useful: the same without padding, by the strategy's formulas. None for near-data functions alone.
    """

    name: str
    call: Callable[..., jax.Array]
    arguments: Callable[[], tuple[Any, ...]]
    data_bytes: int
    moved: LinkTraffic | None = None
    useful: LinkTraffic | None = None


class Model(NamedTuple):
    """What the programs need of the base model.

    Attributes:
        layout: of pages.
        groups: projections by shared input.
        query_heads: query heads of a KV head.
    """

    layout: PageLayout
    groups: tuple[tuple[str, ...], ...]
    query_heads: int

    @property
    def targets(self) -> tuple[str, ...]:
        """Projections that the adapters change: all in the layers."""
        return tuple(name for group in self.groups for name in group)


def model_of(config: ModelConfig, dtype: np.dtype) -> Model:
    """The shapes of a base model."""
    layout = page_layout(TensorParallel(config), EngineConfig(), dtype=dtype)
    groups = groups_of(layout)
    return Model(layout, groups, config.num_heads // config.num_kv_heads)


def lora_programs(
    point: LoraPoint, model: Model, cold: ColdPages, kernels: KernelSet, *, leave_out: Collection[str] = ()
) -> Iterator[Program]:
    """Each LoRA strategy on a point of the grid, and the near-data functions that they are made of.

    Args:
        point: of the grid.
        model: its projections.
        cold: deals the pages.
        kernels: implementations.
        leave_out: strategies that are not compiled.
    """
    inputs = tuple(random_numbers((point.rows, model.layout.in_width(group[0])), model) for group in model.groups)
    for name in (name for name in LORA if name not in leave_out):
        yield _strategy_program(name, point, model, cold, kernels, inputs)
    middles = tuple(random_numbers((len(group), point.rows, point.rank), model) for group in model.groups)
    a_bytes, b_bytes = _data_bytes(point, model)
    for name, operands, data_bytes in (
        ("shrink", inputs, a_bytes),
        ("expand", middles, b_bytes),
        ("delta", inputs, a_bytes + b_bytes),
    ):
        yield _near_program(name, point, model, cold, kernels, operands, data_bytes)


def attention_program(point: AttentionPoint, model: Model, cold: ColdPages, kernels: KernelSet) -> Program:
    """Partial attention near the data on a point of the grid."""
    layout, shape = model.layout, (point.sequences, model.layout.kv_heads, model.query_heads, model.layout.head_dim)
    used = -(-point.context // layout.page_tokens)
    room = -(-point.context // CHUNK_TOKENS) * CHUNK_TOKENS // layout.page_tokens
    scale = layout.head_dim**-0.5

    def near(pool: jax.Array, at: jax.Array, q_NKRH: jax.Array, lane: AttentionLane) -> jax.Array:
        found = kernels.attention.call(
            q_NKRH, pool, at[0], lane, HeadMaths(scale=scale, soft_cap=None, window=at[1]), layout=layout
        )
        return lax.optimization_barrier(found)[0][:, 0, 0, 0]

    def step(pool: jax.Array, q_NKRH: jax.Array, lane: AttentionLane) -> jax.Array:
        def body(total: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            at = link.to_pool(jnp.stack([layer, jnp.int32(NO_WINDOW)]))
            return total + link.to_device(near_data(near)(pool, at, q_NKRH, lane)), None

        return over_layers(body, point.sequences, layout)

    q_NKRH = random_numbers(shape, model)
    positions = np.full((point.sequences, 1), point.context - 1, np.int32)

    def lane() -> AttentionLane:
        tables = np.full((point.sequences, room), ABSENT, np.int32)
        tables[:, :used] = cold.take("pool", point.sequences * used).reshape(point.sequences, used)
        end = np.int32(point.context)
        return AttentionLane(tables, positions, end - np.int32(1), end)

    def arguments() -> tuple[Any, ...]:
        return cold.memory.pool, q_NKRH, lane()

    page_bytes = 2 * layout.kv_heads * layout.head_dim * layout.dtype.itemsize
    data_bytes = layout.num_layers * point.sequences * point.context * page_bytes
    call = compile_step(step, cold, arguments(), in_pool=(1, 2))
    return Program("partial attention", call, arguments, data_bytes)


def _strategy_program(
    name: str, point: LoraPoint, model: Model, cold: ColdPages, kernels: KernelSet, inputs: tuple[np.ndarray, ...]
) -> Program:
    strategy = LORA[name]
    settings = [LoraSetting(model.layout, group, point.rank, kernels, kernels) for group in model.groups]

    def step(memory: Memory, inputs: tuple[jax.Array, ...], lane: LoraLane, control: LoraLane) -> jax.Array:
        return all_lanes(memory, inputs, {name: lane}, {name: control}, settings=settings)

    spaces = {True: "device", False: "pool"}
    a_space, b_space = spaces[strategy.needs.a], spaces[strategy.needs.b]

    def arguments() -> tuple[Any, ...]:
        lane = lane_of(point, model, cold, a_space=a_space, b_space=b_space)
        memory = Memory(cold.memory.pool, cold.memory.adapters, cold.memory.kv)
        return memory, inputs, lane, lane

    first = arguments()
    bucket, use = _bucket_and_use(name, point, model, first[2])
    shapes = _shapes(cold, first, in_pool=(3,))
    moved = audit(step, *shapes, loop_counts=traffic.lora_loop_counts(bucket, {name: use}), control_args=(3,))
    crossings = [*strategy.traffic(bucket, use), traffic.lora_tables(bucket, name, use)]
    useful = {way: sum(int(b.useful) for c, b in crossings if c.direction == way) for way in ("to_device", "to_pool")}
    call = compile_step(step, cold, first, in_pool=(3,))
    return Program(
        name, call, arguments, sum(_data_bytes(point, model)), moved, LinkTraffic(**useful, transfers=moved.transfers)
    )


def _near_program(
    name: str,
    point: LoraPoint,
    model: Model,
    cold: ColdPages,
    kernels: KernelSet,
    operands: tuple[np.ndarray, ...],
    data_bytes: int,
) -> Program:
    kernel, layout = getattr(kernels, name), model.layout
    static = {} if name == "expand" else {"max_rank": point.rank}

    def step(pool: jax.Array, operands: tuple[jax.Array, ...], lane: LoraLane) -> jax.Array:
        def near(pool: jax.Array, layer: jax.Array, operands: tuple[jax.Array, ...], lane: LoraLane) -> jax.Array:
            stripe = stripe_of(lane, 0)
            parts = [
                kernel.call(operand, pool, layer, stripe, layout=layout, group=group, **static)
                for operand, group in zip(operands, model.groups, strict=True)
            ]
            ends = [y.reshape(-1)[: point.rows] for y in jax.tree.leaves(_hold(parts))]
            return functools.reduce(operator.add, ends).astype(np.float32)

        def body(total: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            part = near_data(near)(pool, link.to_pool(layer), operands, lane)
            return total + link.to_device(part), None

        return over_layers(body, point.rows, layout)

    def arguments() -> tuple[Any, ...]:
        return cold.memory.pool, operands, lane_of(point, model, cold, a_space="pool", b_space="pool")

    return Program(name, compile_step(step, cold, arguments(), in_pool=(1, 2)), arguments, data_bytes)


def lane_of(point: LoraPoint, model: Model, cold: ColdPages, *, a_space: str, b_space: str) -> LoraLane:
    """A lane of adapters on the next pages.

    Args:
        point: how many, and of which rank.
        model: its projections.
        cold: deals the pages.
        a_space: "pool" or "device", where A is.
        b_space: the same of B.
    """
    layout, count = model.layout, point.adapters
    ranks = np.zeros((1, count, len(layout.names)), np.int32)
    ranks[..., [layout.index(name) for name in model.targets]] = point.rank
    a_pages, b_pages = layout.a_pages(ranks[0, 0]), layout.b_pages(ranks[0, 0])
    owner = np.full(point.rows, BASE, np.int32)
    owner[: count * point.tokens_per_adapter] = np.arange(count * point.tokens_per_adapter) % count
    return LoraLane(
        owner=owner,
        count=np.int32(count),
        ranks=ranks,
        scale=np.ones((count, layout.num_layers, len(layout.names)), np.float32),
        a_pages=cold.take(a_space, count * a_pages).reshape(1, count, a_pages),
        b_pages=cold.take(b_space, count * b_pages).reshape(1, count, b_pages),
    )


def _bucket_and_use(
    name: str, point: LoraPoint, model: Model, lane: LoraLane
) -> tuple[traffic.LoraBucket, traffic.LoraUse]:
    layout = model.layout
    a_bytes, b_bytes = (size // layout.dtype.itemsize // point.adapters for size in _data_bytes(point, model))
    layers = layout.num_layers
    facts = AdapterFacts(
        inputs=layers * sum(layout.in_width(group[0]) for group in model.groups),
        outputs=layers * sum(map(layout.out_width, model.targets)),
        ranks=layers * point.rank * len(model.targets),
        a_numbers=a_bytes,
        b_numbers=b_bytes,
    )
    adapters = [
        PlacedAdapter(name, lane.ranks[:, e], lane.scale[e], lane.a_pages[:, e], lane.b_pages[:, e], facts)
        for e in range(point.adapters)
    ]
    bucket = traffic.LoraBucket(
        phase=PHASE,
        tokens=point.rows,
        layout=layout,
        groups=model.groups,
        max_rank=point.rank,
        entries=point.adapters,
        a_pages=lane.a_pages.shape[-1],
        b_pages=lane.b_pages.shape[-1],
    )
    return bucket, traffic.LoraUse([point.tokens_per_adapter] * point.adapters, traffic.lane_facts(adapters))


def _data_bytes(point: LoraPoint, model: Model) -> tuple[int, int]:
    """Bytes of all A and of all B of a point."""
    layout = model.layout
    components = point.adapters * point.rank * layout.num_layers * layout.dtype.itemsize
    return components * sum(map(layout.in_width, model.targets)), components * sum(map(layout.out_width, model.targets))


def _hold(values: Any) -> Any:
    """Keeps the compiler from computing only the numbers that are used."""
    return lax.optimization_barrier(values)


def over_layers(body: Callable[..., Any], rows: int, layout: PageLayout) -> jax.Array:
    """Runs a body for each layer: (total [rows] float32, layer) to (total, None)."""
    layers = jnp.arange(layout.num_layers, dtype=jnp.int32)
    return lax.scan(body, jnp.zeros(rows, jnp.float32), layers)[0]


def all_lanes(
    memory: Memory,
    inputs: tuple[jax.Array, ...],
    lanes: Mapping[str, LoraLane],
    control: Mapping[str, LoraLane],
    *,
    settings: Sequence[LoraSetting],
) -> jax.Array:
    """What a step does for adapters, through all layers: every strategy that has any adds to the sums of projections.

    Args:
        memory: page arrays.
        inputs: [rows, I] by group.
        lanes, control: by strategy, on the device and in the pool.
        settings: by group.

    Returns:
        [rows] float32.
    """
    rows, layout = inputs[0].shape[0], settings[0].layout
    serves = [apply.serving(lanes, setting.group, layout=layout) for setting in settings]
    names = [name for setting in settings for name in setting.group]

    def body(carry: tuple[jax.Array, dict[str, jax.Array]], layer: jax.Array) -> tuple[Any, None]:
        total, sums = carry
        for setting, x_TI, serve in zip(settings, inputs, serves, strict=True):
            own = x_TI + (total[:, None] * 0).astype(x_TI.dtype)
            added = apply.add(sums, own, memory, layer, lanes, control, serves=serve, phase=PHASE, setting=setting)
            total, sums = total + sum(y_TO[:, 0] for y_TO in added.values()), {**sums, **added}
        return (total, sums), None

    # The sums go from layer to layer, so that no layer begins with writing zeros.
    zeros = {name: jnp.zeros((rows, layout.out_width(name)), jnp.float32) for name in names}
    layers = jnp.arange(layout.num_layers, dtype=jnp.int32)
    return lax.optimization_barrier(lax.scan(body, (jnp.zeros(rows, jnp.float32), zeros), layers)[0])[0]


def random_numbers(shape: tuple[int, ...], model: Model) -> np.ndarray:
    """Standard normal numbers in the dtype of the adapters."""
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(model.layout.dtype)


def _shapes(cold: ColdPages, arguments: tuple[Any, ...], *, in_pool: tuple[int, ...]) -> tuple[Any, ...]:
    """Shapes of arguments with the memory they go to; those at `in_pool` go to the pool."""

    def shape(value: Any, position: int) -> jax.ShapeDtypeStruct:
        place = link.pool_sharding if position in in_pool else link.device_sharding
        sharding = value.sharding if isinstance(value, jax.Array) else place(cold.mesh)
        return jax.ShapeDtypeStruct(np.shape(value), value.dtype, sharding=sharding)

    return tuple(jax.tree.map(lambda v, i=i: shape(v, i), argument) for i, argument in enumerate(arguments))


def compile_step(
    step: Callable[..., jax.Array], cold: ColdPages, arguments: tuple[Any, ...], *, in_pool: tuple[int, ...]
) -> Callable[..., jax.Array]:
    """Compiles a step.

    Args:
        step: of arrays.
        cold: whose mesh it runs on.
        arguments: for their shapes.
        in_pool: positions of arguments that are in the pool.
    """
    return jax.jit(step).lower(*_shapes(cold, arguments, in_pool=in_pool)).compile()
