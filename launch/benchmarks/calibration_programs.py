"""Programs that a calibration times beside those of the strategies benchmark: attention, links, products, empty lanes.

Each goes through all layers of the base model, as a step does, and says what it does in the words of the cost model.
What the loop over layers costs by itself has a name of its own, FRAME, so that it is not taken for a call's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from launch.benchmarks.cold_pages import ColdPages
from launch.benchmarks.strategy_programs import (
    PHASE,
    AttentionPoint,
    LoraPoint,
    Model,
    Program,
    all_lanes,
    attention_program,
    compile_step,
    lane_of,
    over_layers,
    random_numbers,
)
from memory_pool import link
from plora_jax.checkpoints import LoadedModel
from plora_jax.model.dense import forward_full
from plora_jax.model.layers import matmul
from strategies.cost import ModelShape, attention_quantities, decoding
from strategies.cost.quantities import WIDE_BYTES
from strategies.kernel_tables import KernelSet
from strategies.lanes import ABSENT, SCRATCH_PAGES, AttentionLane, KvControl, KvLanes, LoraLane, Memory
from strategies.paged_attention import CHUNK_TOKENS, NO_WINDOW, HeadMaths, Partial
from strategies.products import pack, products, unsupported
from strategies.setting import AttentionSetting, LoraSetting
from strategies.strategy_table import ATTENTION, LORA

FRAME = "frame"
"""Function that no calibration has: the loop over layers."""


class Sample(NamedTuple):
    """A program and the work of one call.

    Attributes:
        kind: what it measures, for the report.
        label: its size in words.
        program: to time.
        quantities: by flat name of the coefficient; empty for what is not in the fit.
    """

    kind: str
    label: str
    program: Program
    quantities: dict[str, float]


class Bench(NamedTuple):
    """What all programs are made of.

    Attributes:
        model: base model as the programs need it.
        shape: the same for the cost model.
        cold: pages.
        kernels: implementations.
        base: weights of the base model; None where its steps are not timed.
    """

    model: Model
    shape: ModelShape
    cold: ColdPages
    kernels: KernelSet
    base: LoadedModel | None = None

    @property
    def layers(self) -> int:
        return self.model.layout.num_layers


def attention_samples(bench: Bench, point: AttentionPoint, *, strategies: bool) -> list[Sample]:
    """Attention on the device and near the data, and by each attention strategy with all KV in the pool.

    Args:
        bench: what programs are made of.
        point: how many sequences, and their context.
        strategies: the attention strategies too.
    """
    programs = {
        "device": _device_attention(bench, point),
        "near": attention_program(point, bench.model, bench.cold, bench.kernels),
    }
    if strategies:
        programs |= {name: _attention_strategy(bench, point, name) for name in ATTENTION}
    kv, label = decoding(np.full(point.sequences, point.context)), f"{point.sequences} x {point.context} tokens"
    return [
        Sample(f"attention {name}", label, program, attention_quantities(bench.shape, kv, strategy=name))
        for name, program in programs.items()
    ]


def link_samples(bench: Bench, num_bytes: int) -> list[Sample]:
    """A crossing each way on its own. They are not in the fit: within a step a crossing that reads and writes the same
    memory may be no copy at all, and what strategies pay for it comes out of their own times."""
    model, mesh = bench.model, bench.cold.mesh
    numbers = random_numbers((num_bytes // model.layout.dtype.itemsize,), model)
    ways = {
        "to_pool": (link.store_on_device(numbers, mesh), link.to_pool, link.pool_sharding(mesh)),
        "to_device": (link.store_in_pool(numbers, mesh), link.to_device, link.device_sharding(mesh)),
    }
    samples = []
    for way, (value, cross, place) in ways.items():
        call = jax.jit(cross, out_shardings=place).lower(value).compile()
        program = Program(way, call, lambda value=value: (value,), num_bytes)
        samples.append(Sample(f"link {way}", f"{num_bytes // 1024} KiB", program, {}))
    return samples


def matmul_sample(bench: Bench, *, rows: int, inputs: int, outputs: int) -> Sample:
    """A product with a base weight of each layer, kept as the engine keeps it."""
    layers, item = bench.layers, bench.shape.item_bytes
    key = jax.random.key(0)
    weights = jax.random.normal(key, (layers, outputs, inputs), bench.model.layout.dtype)
    x = random_numbers((rows, inputs), bench.model)
    packed = unsupported(weights.shape, weights.dtype) is None
    weights = jax.jit(pack)(weights) if packed else weights

    def step(weights: Any, x_TI: jax.Array) -> jax.Array:
        def body(total: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            own = x_TI + (total[:, None] * 0).astype(x_TI.dtype)
            y = products(own, [weights], layer)[0] if packed else matmul(own, weights[layer])
            return total + lax.optimization_barrier(y)[:, 0], None

        return over_layers(body, rows, bench.model.layout)

    numbers = float(layers * inputs * outputs)
    quantities = {
        f"{FRAME}.call_s": float(layers),
        "matmul.call_s": float(layers),
        "matmul.byte_s": numbers * item,
        "matmul.flop_s": 2 * rows * numbers,
        "matmul.operand_byte_s": float(layers * rows * (inputs + outputs) * item),
    }
    call = compile_step(step, bench.cold, (weights, x), in_pool=())
    program = Program("matmul", call, lambda: (weights, x), int(numbers) * item)
    return Sample("matmul", f"{rows} rows, {inputs} x {outputs}", program, quantities)


def base_sample(bench: Bench, base: LoadedModel, rows: int) -> Sample:
    """The base model on rows that each see only themselves, up to the logits of all of them. Not in the fit.

    Args:
        bench: what programs are made of.
        base: with its weights as the engine has them (`pack_params`).
        rows: tokens.
    """
    tokens = np.zeros((rows, 1), np.int32)

    def step(params: Any, tokens_B1: jax.Array) -> jax.Array:
        logits_B1V = forward_full(params, base.config, tokens_B1, dtype=base.dtype)
        return lax.optimization_barrier(logits_B1V)[:, 0, 0]

    call = compile_step(step, bench.cold, (base.params, tokens), in_pool=())
    return Sample("base step", f"{rows} rows", Program("base", call, lambda: (base.params, tokens), 0), {})


def lanes_sample(bench: Bench, rows: int) -> Sample:
    """All LoRA strategies with empty lanes, for all projections."""
    model, cold = bench.model, bench.cold
    inputs = tuple(random_numbers((rows, model.layout.in_width(group[0])), model) for group in model.groups)
    settings = [LoraSetting(model.layout, group, 8, bench.kernels, bench.kernels) for group in model.groups]
    lane = lane_of(LoraPoint(8, 1, 1), model, cold, a_space="pool", b_space="pool")
    lane = lane._replace(owner=np.full(rows, -1, np.int32), count=np.int32(0), ranks=np.zeros_like(lane.ranks))
    lanes = dict.fromkeys(LORA, lane)

    def step(memory: Memory, inputs: Any, lanes: dict[str, LoraLane], control: dict[str, LoraLane]) -> jax.Array:
        return all_lanes(memory, inputs, lanes, control, settings=settings)

    memory = Memory(cold.memory.pool, cold.memory.adapters, cold.memory.kv)
    arguments = (memory, inputs, lanes, lanes)
    calls = float(len(LORA) * bench.layers * len(model.groups))
    wide = float(len(LORA) * bench.layers * rows * sum(map(model.layout.out_width, model.targets)) * WIDE_BYTES)
    quantities = {f"{FRAME}.call_s": float(bench.layers), "lanes.call_s": calls, "lanes.operand_byte_s": wide}
    call = compile_step(step, cold, arguments, in_pool=(3,))
    return Sample("empty lanes", f"{rows} rows", Program("lanes", call, lambda: arguments, 0), quantities)


class _AttentionArrays(NamedTuple):
    q_NKRH: np.ndarray
    positions: np.ndarray
    used: int
    room: int


def _attention_arrays(bench: Bench, point: AttentionPoint) -> _AttentionArrays:
    layout = bench.model.layout
    shape = (point.sequences, layout.kv_heads, bench.model.query_heads, layout.head_dim)
    return _AttentionArrays(
        random_numbers(shape, bench.model),
        np.full((point.sequences, 1), point.context - 1, np.int32),
        -(-point.context // layout.page_tokens),
        -(-point.context // CHUNK_TOKENS) * CHUNK_TOKENS // layout.page_tokens,
    )


def _device_attention(bench: Bench, point: AttentionPoint) -> Program:
    layout, arrays = bench.model.layout, _attention_arrays(bench, point)

    def step(pages: jax.Array, q_NKRH: jax.Array, lane: AttentionLane) -> jax.Array:
        def body(total: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            own = q_NKRH + (total[:, None, None, None] * 0).astype(q_NKRH.dtype)
            maths = HeadMaths(layout.head_dim**-0.5, None, jnp.int32(NO_WINDOW))
            found = bench.kernels.attention.call(own, pages, layer, lane, maths, layout=layout)
            return total + lax.optimization_barrier(found)[0][:, 0, 0, 0], None

        return over_layers(body, point.sequences, layout)

    def arguments() -> tuple[Any, ...]:
        tables = np.full((point.sequences, arrays.room), ABSENT, np.int32)
        pages = bench.cold.take("device", point.sequences * arrays.used)
        tables[:, : arrays.used] = pages.reshape(point.sequences, arrays.used)
        end = np.int32(point.context)
        return (
            bench.cold.memory.adapters,
            arrays.q_NKRH,
            AttentionLane(tables, arrays.positions, end - np.int32(1), end),
        )

    call = compile_step(step, bench.cold, arguments(), in_pool=())
    return Program("device attention", call, arguments, 0)


def _attention_strategy(bench: Bench, point: AttentionPoint, name: str) -> Program:
    """A strategy with all KV in the pool: what it adds to attention that has seen nothing on the device."""
    layout, arrays = bench.model.layout, _attention_arrays(bench, point)
    setting = AttentionSetting(layout, bench.kernels, bench.kernels)

    def step(memory: Memory, q_NKRH: jax.Array, lanes: KvLanes, control: KvControl) -> jax.Array:
        def body(total: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            own = q_NKRH + (total[:, None, None, None] * 0).astype(q_NKRH.dtype)
            nothing = jnp.zeros(own.shape[:-1], jnp.float32)
            seen = Partial(jnp.zeros(own.shape, jnp.float32), nothing - 1e30, nothing)
            maths = HeadMaths(layout.head_dim**-0.5, None, jnp.int32(NO_WINDOW))
            scope = f"{PHASE}.{name}"
            found = ATTENTION[name].add(seen, own, memory, layer, lanes, control, maths, scope=scope, setting=setting)
            return total + lax.optimization_barrier(found)[0][:, 0, 0, 0], None

        return over_layers(body, point.sequences, layout)

    def arguments() -> tuple[Any, ...]:
        memory = Memory(bench.cold.memory.pool, bench.cold.memory.adapters, bench.cold.memory.kv)
        return memory, arrays.q_NKRH, *_kv_tables(bench, point, arrays, name)

    return Program(name, compile_step(step, bench.cold, arguments(), in_pool=(3,)), arguments, 0)


def _kv_tables(bench: Bench, point: AttentionPoint, arrays: _AttentionArrays, name: str) -> tuple[KvLanes, KvControl]:
    count = point.sequences * arrays.used
    pages = bench.cold.take("pool", count)
    absent = np.full((point.sequences, arrays.room), ABSENT, np.int32)
    placed = absent.copy()
    order = pages if name == "distributed" else np.arange(count, dtype=np.int32)
    placed[:, : arrays.used] = order.reshape(point.sequences, arrays.used)
    rounds = -(-count // SCRATCH_PAGES)
    stream = np.zeros(rounds * SCRATCH_PAGES, np.int32)
    stream[:count] = pages
    end = np.int32(point.context)
    lane = AttentionLane(absent, arrays.positions, end - np.int32(1), end)
    if name == "local":
        lanes, tables = KvLanes(lane, placed, np.int32(rounds), np.int32(0)), absent
    else:
        lanes, tables = KvLanes(lane, absent, np.int32(0), np.int32(point.sequences)), placed
    return lanes, KvControl(stream, tables[None], arrays.positions, end - np.int32(1), end)
