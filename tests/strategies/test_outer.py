"""Embedding and head adapters under the four strategies against plain numpy, and their bytes against the audit."""

import dataclasses
import functools
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from memory_pool import audit, device_sharding, near_data, pool_sharding
from memory_pool.adapter_pool import PlacedAdapter
from memory_pool.adapter_streams import OUTSIDE, AdapterFacts, pack, scales, share_of
from memory_pool.int8_adapters import quantize_modules
from memory_pool.layout import Cut, PageLayout
from memory_pool.link import TENSOR_AXIS
from memory_pool.raw import raw_dtype
from strategies import outer, outer_traffic, spread
from strategies.kernel_tables import XLA, KernelSet, choose_kernels
from strategies.lanes import BASE, LoraLane, Memory, stripe_of
from strategies.outer_traffic import EMBEDDING, HEAD
from strategies.setting import LoraSetting
from strategies.traffic import LoraBucket, LoraUse, lane_facts

STRATEGIES = ("resident", "fetch", "near_data", "split")
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Of the model, and of adapters unless they are int8.
LORA_DTYPES = (*DTYPES, *(f"{dtype}, int8" for dtype in DTYPES))
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
LAYERS, WIDTH, VOCAB, ENTRIES = 3, 40, 202, 5
RANKS = ((4, 0), (0, 7), (70, 3), (5, 129))  # of the embedding and of the head
OWNER = np.array([0, 2, BASE, 3, 1, 2, 0, BASE, 3], np.int32)
SHARDED, WHOLE = PartitionSpec(TENSOR_AXIS), PartitionSpec()
TWO_SHARDS = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices: run by the last test")
PLACES = [(1, 1), (3, 1), pytest.param(1, 2, id="sharded", marks=TWO_SHARDS)]


class Matrices(NamedTuple):
    """One change: a [R, I], b [O, R], and the factor on their product."""

    a: np.ndarray
    b: np.ndarray
    scale: float


@dataclasses.dataclass(frozen=True)
class Case:
    """Adapters in both memories, their lane, and the same matrices in float64."""

    layout: PageLayout
    mesh: Mesh
    memory: Memory
    device: LoraLane
    control: LoraLane
    modules: list[dict]
    max_rank: int

    def setting(self, name: str, kernels: KernelSet = XLA) -> LoraSetting:
        return LoraSetting(self.layout, (name,), self.max_rank, kernels, kernels)

    def matrices(self, adapter: int, name: str) -> tuple[np.ndarray, np.ndarray, float]:
        found = self.modules[adapter].get((OUTSIDE, name))
        if found is None:
            return np.zeros((0, VOCAB if name == EMBEDDING else WIDTH)), np.zeros((1, 0)), 0.0
        return found.a.astype(np.float64), found.b.astype(np.float64), found.scale

    def use(self) -> LoraUse:
        ranks = self.device.ranks
        facts = AdapterFacts(0, 0, 0, 0, 0)
        lane = self.device
        placed = [
            PlacedAdapter("any", ranks[:, e], lane.scale[e], lane.a_pages[:, e], lane.b_pages[:, e], facts)
            for e in range(len(self.modules))
        ]
        return LoraUse([int(np.sum(e == OWNER)) for e in range(len(placed))], lane_facts(placed))

    def bucket(self, phase: str) -> LoraBucket:
        return LoraBucket(
            phase=phase,
            tokens=len(OWNER),
            layout=self.layout,
            groups=(),
            max_rank=self.max_rank,
            entries=ENTRIES,
            a_pages=self.device.a_pages.shape[2],
            b_pages=self.device.b_pages.shape[2],
            stripes=len(self.device.ranks),
            shards=self.layout.num_shards,
        )


def make_case(dtype: str, *, stripes: int = 1, shards: int = 1, seed: int = 0) -> Case:
    (dtype, _, int8), rng = dtype.partition(", "), np.random.default_rng(seed)
    numbers = DTYPES[dtype]
    shares = tuple((i * VOCAB // shards, (i + 1) * VOCAB // shards) for i in range(shards))
    cuts = {
        "q": Cut(((0, 24),) * shards, ((0, 16),) * shards),
        EMBEDDING: Cut(((0, WIDTH),) * shards, ((0, VOCAB),) * shards, spread=True),
        HEAD: Cut(shares, ((0, WIDTH),) * shards, spread=True),
    }
    sizes = {"num_layers": LAYERS, "page_tokens": 4, "kv_heads": 1, "head_dim": 8}
    layout = PageLayout(projections=cuts, dtype=numbers, int8_adapters=bool(int8), **sizes)
    modules = [make_modules(rng, numbers, *ranks) for ranks in RANKS]
    modules = [quantize_modules(m) if int8 else m for m in modules]
    mesh = Mesh(np.array(jax.devices()[:shards]), (TENSOR_AXIS,))
    ranks = np.zeros((stripes, ENTRIES, 3), np.int32)
    for e, (embedding, head) in enumerate(RANKS):
        ranks[:, e] = [share_of(np.array([2, embedding, head], np.int32), s, stripes) for s in range(stripes)]
    scale = np.zeros((ENTRIES, LAYERS, 3), np.float32)
    scale[: len(RANKS)] = [scales(m, layout) for m in modules]
    lane = LoraLane(OWNER, np.int32(len(RANKS)), ranks, scale, None, None)
    pages = [
        [pack(m, layout, ranks[s, e], stripe=s, stripes=stripes) for e, m in enumerate(modules)] for s in range(stripes)
    ]
    pool, control = scatter(rng, layout, pages, lane)
    adapters, device = scatter(rng, layout, pages, lane)
    memory = Memory(
        jax.device_put(pool, pool_sharding(mesh, SHARDED)),
        jax.device_put(adapters, device_sharding(mesh, SHARDED)),
        jax.device_put(adapters[:, :1], device_sharding(mesh, SHARDED)),
    )
    control = jax.tree.map(lambda x: jax.device_put(x, pool_sharding(mesh)), control)
    return Case(layout, mesh, memory, device, control, modules, -(-129 // stripes))


def make_modules(rng: np.random.Generator, dtype: np.dtype, embedding: int, head: int) -> dict:
    def matrices(out: int, inputs: int, rank: int) -> Matrices:
        a, b = rng.normal(size=(rank, inputs)), rng.normal(size=(out, rank))
        return Matrices(a.astype(dtype), b.astype(dtype), rng.uniform(0.5, 2))

    modules = {(1, "q"): matrices(24, 16, 2)}
    if embedding:
        modules[OUTSIDE, EMBEDDING] = matrices(WIDTH, VOCAB, embedding)
    if head:
        modules[OUTSIDE, HEAD] = matrices(VOCAB, WIDTH, head)
    return modules


def scatter(rng, layout: PageLayout, pages, lane: LoraLane) -> tuple[np.ndarray, LoraLane]:
    """Pages in no order, NaN around them, and the lane with their numbers."""
    counts = [[(layout.a_pages(r.tolist()), layout.b_pages(r.tolist())) for r in of_stripe] for of_stripe in lane.ranks]
    most = np.max(counts, axis=(0, 1))
    tables = [np.zeros((*lane.ranks.shape[:2], m), np.int32) for m in most]
    num_pages = 3 + int(np.sum(counts))
    free = rng.permutation(np.arange(1, num_pages)).tolist()
    shape = (layout.num_shards * layout.num_layers, num_pages, layout.page_width)
    memory = np.full(shape, np.nan, layout.dtype).view(raw_dtype(layout.dtype))
    for s, of_stripe in enumerate(pages):
        for e, content in enumerate(of_stripe):
            numbers = [free.pop() for _ in range(content.shape[1])]
            memory[:, numbers] = content
            (a, b) = counts[s][e]
            tables[0][s, e, :a], tables[1][s, e, :b] = numbers[:a], numbers[a:]
    return memory, lane._replace(a_pages=tables[0], b_pages=tables[1])


def run(case: Case, name: str, strategy: str, inputs: np.ndarray, *, scope: str = "x", kernels: KernelSet = XLA):
    """The function over the mesh and its arguments."""
    function = outer.embed_delta if name == EMBEDDING else outer.head_delta
    call = functools.partial(function, strategy=strategy, scope=scope, setting=case.setting(name, kernels))
    out = WHOLE if name == EMBEDDING else PartitionSpec(None, TENSOR_AXIS)
    specs = (WHOLE, SHARDED, WHOLE, WHOLE)
    whole_call = jax.shard_map(call, mesh=case.mesh, in_specs=specs, out_specs=out, check_vma=False)
    return whole_call, (jnp.asarray(inputs), case.memory, case.device, case.control)


def want(case: Case, name: str, inputs: np.ndarray) -> np.ndarray:
    result = np.zeros((len(OWNER), WIDTH if name == EMBEDDING else VOCAB))
    for t, e in enumerate(OWNER):
        if e != BASE:
            a, b, scale = case.matrices(e, name)
            m = a[:, inputs[t]] if name == EMBEDDING else a @ inputs[t].astype(np.float64)
            result[t] = scale * (b @ m)
    return result


def make_inputs(case: Case, name: str) -> np.ndarray:
    rng = np.random.default_rng(9)
    if name == EMBEDDING:
        return np.concatenate([[0, VOCAB - 1], rng.integers(0, VOCAB, len(OWNER) - 2)]).astype(np.int32)
    return rng.normal(size=(len(OWNER), WIDTH)).astype(case.layout.dtype)


@pytest.mark.parametrize("dtype", LORA_DTYPES)
@pytest.mark.parametrize(("stripes", "shards"), PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_outer_delta_of_any_strategy_equals_numpy(name, strategy, stripes, shards, dtype):
    case = make_case(dtype, stripes=stripes, shards=shards)
    inputs = make_inputs(case, name)
    function, args = run(case, name, strategy, inputs)
    got, wanted = np.asarray(jax.jit(function)(*args)), want(case, name, inputs)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE[dtype.partition(",")[0]] * np.abs(wanted).max())
    assert not got[OWNER == BASE].any()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_outer_delta_with_the_kernels_of_this_machine_equals_numpy(name, strategy):
    case = make_case("float32")
    inputs = make_inputs(case, name)
    function, args = run(case, name, strategy, inputs, kernels=choose_kernels().decode)
    np.testing.assert_allclose(jax.jit(function)(*args), want(case, name, inputs), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_outer_delta_of_an_empty_lane_is_zero_and_skipped(name, strategy):
    case = make_case("float32", stripes=2)
    empty = case.device._replace(count=np.int32(0), owner=np.full_like(OWNER, BASE))
    function, (inputs, memory, _, control) = run(case, name, strategy, make_inputs(case, name), scope=f"x.{strategy}")
    assert not np.asarray(jax.jit(function)(inputs, memory, empty, control)).any()
    counts = outer_traffic.loop_counts(case.bucket("x"), {})
    assert audit(function, inputs, memory, empty, control, loop_counts=counts) == (0, 0, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16, int8"])
@pytest.mark.parametrize(("stripes", "shards"), [*PLACES, pytest.param(2, 2, id="sharded-2", marks=TWO_SHARDS)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_outer_traffic_equals_the_audit_to_the_byte(name, strategy, stripes, shards, dtype):
    case = make_case(dtype, stripes=stripes, shards=shards)
    function, args = run(case, name, strategy, make_inputs(case, name), scope=f"x.{strategy}")
    bucket, use = case.bucket("x"), case.use()
    counted = audit(function, *args, loop_counts=outer_traffic.loop_counts(bucket, {strategy: use}))
    declared = (outer_traffic.embedding if name == EMBEDDING else outer_traffic.head)(bucket, strategy, use)
    for direction, size in (("to_device", counted.to_device), ("to_pool", counted.to_pool)):
        assert sum(b.moved for c, b in declared if c.direction == direction) == size
    assert all(0 <= size.useful <= size.moved for _, size in declared)
    assert {crossing.strategy for crossing, _ in declared} <= {strategy}
    assert bool(declared) == (strategy != "resident")


def useful(declared, item: str) -> dict[str, int]:
    return {c.direction: b.useful for c, b in declared if c.object == item}


@pytest.mark.parametrize(("dtype", "of_adapter"), [("bfloat16", 2), ("bfloat16, int8", 1)])
@pytest.mark.parametrize("stripes", [1, 3])
def test_outer_traffic_useful_bytes_equal_the_table(stripes, dtype, of_adapter):
    case = make_case(dtype, stripes=stripes)
    bucket, use, size = case.bucket("x"), case.use(), 2
    tokens = [int(np.sum(e == OWNER)) for e in range(4)]
    total = sum(tokens)
    m = [sum(b * r[i] for b, r in zip(tokens, RANKS, strict=True)) * size for i in (0, 1)]
    ranks = [sum(r[i] for r in RANKS) for i in (0, 1)]
    embed, head = (
        {name: f(bucket, name, use) for name in STRATEGIES} for f in (outer_traffic.embedding, outer_traffic.head)
    )
    assert useful(embed["near_data"], "activation") == {"to_device": stripes * total * WIDTH * size}
    assert useful(embed["near_data"], "control") == {"to_pool": stripes * total * 4}
    assert useful(embed["split"], "activation") == {"to_device": m[0]}
    assert useful(embed["fetch"], "activation") == {"to_device": m[0]}
    assert useful(embed["fetch"], "adapter") == {"to_device": ranks[0] * WIDTH * of_adapter}
    to_pool = stripes * total * WIDTH * size
    assert useful(head["near_data"], "activation") == {"to_pool": to_pool, "to_device": stripes * total * VOCAB * size}
    assert useful(head["split"], "activation") == {"to_pool": to_pool, "to_device": m[1]}
    assert useful(head["fetch"], "adapter") == {"to_device": ranks[1] * (WIDTH + VOCAB) * of_adapter}


def test_head_traffic_of_several_calls_streams_in_each():
    case = make_case("float32")
    bucket, use = case.bucket("x"), case.use()
    one, three = (dict(outer_traffic.head(bucket, "fetch", use, calls=n)) for n in (1, 3))
    assert {c: b.moved for c, b in three.items()} == {c: 3 * b.moved for c, b in one.items()}
    assert outer_traffic.head(bucket, "split", use, calls=3) == outer_traffic.head(bucket, "split", use)


@pytest.mark.parametrize("dtype", LORA_DTYPES)
def test_lookup_is_scaled_in_the_dtype_of_the_pages_and_zero_beyond_a_rank(dtype):
    case = make_case(dtype)
    tokens, lane = make_inputs(case, EMBEDDING), stripe_of(jax.tree.map(jnp.asarray, case.device), 0)
    call = functools.partial(spread.lookup, layout=case.layout, name=EMBEDDING, max_rank=case.max_rank)
    got = call(jnp.asarray(tokens), case.memory.adapters, lane)
    assert (got.dtype, got.shape) == (case.layout.dtype, (len(tokens), case.max_rank))
    for t, e in enumerate(OWNER):
        expected = np.zeros(case.max_rank, case.layout.dtype)
        if e != BASE and RANKS[e][0]:
            found = case.modules[e][OUTSIDE, EMBEDDING]
            numbers = found.a[:, tokens[t]].astype(np.float32) * np.float32(found.scale)
            expected[: RANKS[e][0]] = numbers.astype(case.layout.dtype)
        np.testing.assert_array_equal(np.asarray(got[t]), expected)
    near = jax.jit(near_data(call))
    in_pool = jax.tree.map(lambda x: jax.device_put(x, pool_sharding(case.mesh)), (tokens, lane))
    control = stripe_of(jax.tree.map(np.asarray, case.control), 0)
    control = jax.tree.map(lambda x: jax.device_put(x, pool_sharding(case.mesh)), control)
    np.testing.assert_array_equal(near(in_pool[0], case.memory.pool, control), got)


def test_outer_delta_and_traffic_on_two_virtual_devices():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "pytest", "-k", "sharded", __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "64 passed" in done.stdout, done.stdout + done.stderr
