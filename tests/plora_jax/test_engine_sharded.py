"""Engines over shards: a process with eight devices serves the pack (sharded_engines.py), the tests here judge.

Also what a device's own link carries as a model is spread over more of them, from the formulas that the audit upholds.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from memory_pool import adapter_streams
from memory_pool.adapter_pool import PlacedAdapter
from plora_jax.checkpoints import load_config
from plora_jax.engine.batch import LORA_PHASES, StepUse
from plora_jax.engine.buckets import BatchShape, Bucket
from plora_jax.engine.build import EngineConfig, build_engine, page_layout
from plora_jax.engine.lora_lanes import AdapterUse
from plora_jax.engine.traffic import LAYER_GROUPS, StepTraffic
from plora_jax.parallel import EMBEDDING, HEAD, ROW_PARALLEL, TensorParallel
from strategies.kv_traffic import KvUse
from strategies.low_rank import CHUNK_ROWS

ROOT = Path(__file__).parent.parent.parent
PACK = ROOT / "tests" / "data" / "conformance"
STRATEGIES = ["fetch", "near_data", "resident", "split"]
ALWAYS = ["llama 8", "qwen3 2"]
MORE = ["gemma2 8 striped", "mixtral 4", "mistral_window 4", "qwen2_bias 2", "llama31_rope 4"]
CASES = ALWAYS + (MORE if os.environ.get("PLORA_TEST_ALL") else [])
"""Each model takes a minute to compile over shards: PLORA_TEST_ALL=1 serves them all."""
AUDITED = [name for name in ("llama 8", "gemma2 8 striped") if name in CASES]


@pytest.fixture(scope="module")
def served():
    """What sharded_engines.py prints; compiled programs are kept where the session keeps its own."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    cache = jax.config.values["jax_compilation_cache_dir"]
    kept = {"JAX_COMPILATION_CACHE_DIR": cache} if cache else {}
    result = subprocess.run(
        [sys.executable, "-m", "tests.plora_jax.sharded_engines", *CASES],
        cwd=ROOT,
        env={**os.environ, **kept, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_engine_over_shards_gives_the_golden_tokens_by_every_strategy_forced_and_mixed(served, name):
    case = served[name]
    assert "error" not in case, case["error"]
    assert case["devices"] == int(name.split()[1])
    assert case["fallbacks"] == 0
    rounds = dict(case["rounds"])
    assert rounds.pop("mixed mixed") == {"wrong": [], "lora": STRATEGIES, "attention": ["distributed", "local"]}
    for forced, outcome in rounds.items():
        lora, attention = forced.split()
        assert outcome == {"wrong": [], "lora": [lora], "attention": [attention]}, forced
    assert sorted(forced.split()[0] for forced in rounds) == sorted(STRATEGIES * (2 if name == "llama 8" else 1))
    assert case["ahead"]["wrong"] == []
    assert case["ahead"]["begun"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", AUDITED)
def test_ledger_equals_audit_for_every_step_on_eight_devices(served, name):
    assert "error" not in served[name], served[name]["error"]
    audit = served[name]["audit"]
    moving = ["distributed", "fetch", "local", "near_data", "split"]
    assert {f"{strategy} {phase}" for strategy in moving for phase in ("decode", "prefill")} <= set(audit["seen"])
    outer = {f"{lora} {phase}" for lora in ("fetch", "near_data", "split") for phase in ("embed", "head", "prompt")}
    assert (outer <= set(audit["seen"])) == (name == "llama 8"), "gemma2 has no adapter of the head"
    assert min(audit["steps"], audit["to_device"], audit["to_pool"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", AUDITED)
def test_tables_that_a_step_sends_to_the_pools_of_eight_devices_are_counted_as_the_audit_counts_them(served, name):
    for told, counted in served[name]["control"]:
        assert told == counted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("llama 3", "--tensor_parallel_size 3 does not divide the 8 query heads, .*: choose 1, 2, 4 or 8$"),
        ("qwen3_moe 5", "does not divide the expert width 48 and neither divides the 2 KV heads .*: choose 1, 2, 4 or"),
        ("llama 16", "^--tensor_parallel_size 16 does not divide the 8 query heads: choose 1, 2, 4 or 8$"),
    ],
)
def test_build_that_the_model_does_not_allow_is_refused_with_what_works(served, build, message):
    assert re.search(message, served["refused"][build])


def test_more_shards_than_devices_are_refused_with_what_to_do():
    shards = len(jax.devices()) + 1
    message = (
        f"--tensor_parallel_size {shards} needs as many devices, and this machine has {shards - 1} (cpu): lower it, or "
        f"set XLA_FLAGS=--xla_force_host_platform_device_count={shards} to try it on the CPU"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_engine(EngineConfig(model=str(PACK / "models" / "llama"), tensor_parallel_size=shards))


RANK, ROWS, PREFILL, PAGE_TOKENS = 16, 8, 16, 4
SHARDS = (1, 2, 4, 8)
D, F, V, HEADS, H, LAYERS = 64, 112, 256, 8, 8, 3
Q = KV = HEADS * H
"""Sizes of the pack's llama with as many KV heads as query heads."""


def plan_of(shards: int, **changes) -> TensorParallel:
    config = dataclasses.replace(load_config(PACK / "models" / "llama"), **{"num_kv_heads": HEADS, **changes})
    return TensorParallel(config, shards)


def lane_of(plan: TensorParallel, strategy: str, projections) -> AdapterUse:
    """An adapter of rank RANK on some projections of every layer, with one token."""
    layout = page_layout(plan, EngineConfig(page_tokens=PAGE_TOKENS), dtype=np.dtype(np.float32))
    modules = {}
    for name in projections:
        outer = {EMBEDDING: (D, V), HEAD: (V, D)}
        out, inputs = plan.config.projections.get(name) or outer[name]
        made = SimpleNamespace(a=np.zeros((RANK, inputs)), b=np.zeros((out, RANK)), scale=1.0)
        layers = [adapter_streams.OUTSIDE] if name in outer else range(LAYERS)
        modules |= {(layer, name): made for layer in layers}
    groups = [*LAYER_GROUPS, (EMBEDDING,), (HEAD,)]
    facts = adapter_streams.facts(modules, layout, groups)
    ranks, scales = adapter_streams.stripe_ranks(modules, layout, 1), adapter_streams.scales(modules, layout)
    pages = np.zeros((1, 1), np.int32)
    return AdapterUse(PlacedAdapter(strategy, ranks, scales, pages, pages, facts), 1)


def bytes_of_one_device(plan: TensorParallel, *, lora=None, kv=None) -> dict:
    """Bytes of a step over one device's link by (object, strategy, direction): (moved, useful).

    Args:
        plan: model over shards.
        lora: phase, strategy and projections of the one adapter.
        kv: of the decode rows.
    """
    layout = page_layout(plan, EngineConfig(page_tokens=PAGE_TOKENS), dtype=np.dtype(np.float32))
    shape = BatchShape(256, ROWS, layout, RANK, 1, 1, 100)
    traffic = StepTraffic(Bucket(ROWS, PREFILL), shape, config=plan.shard_config, num_shards=plan.num_shards)
    lanes: dict = {phase: {} for phase in LORA_PHASES}
    if lora:
        phase, strategy, projections = lora
        lanes[phase] = {strategy: [lane_of(plan, strategy, projections)]}
    nothing = KvUse()
    found = {}
    for crossing, size in traffic.of(StepUse(lanes, kv or nothing, nothing)):
        if crossing.object != "control":
            assert size.moved % plan.num_shards == size.useful % plan.num_shards == 0
            found[crossing[:3]] = (size.moved // plan.num_shards, size.useful // plan.num_shards)
    return found


COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
OUT = Q + 2 * KV + 2 * F
STAYS_AND_FALLS = {
    # What crosses: numbers a layer (of embedding and head in all) that every device moves, and those that it shares.
    ("decode", COLUMN, "adapter", "fetch", "to_device"): (RANK * 5 * D, RANK * OUT),
    ("decode", COLUMN, "activation", "near_data", "to_pool"): (2 * D, 0),
    ("decode", COLUMN, "activation", "near_data", "to_device"): (0, OUT),
    ("decode", COLUMN, "activation", "split", "to_pool"): (2 * D, 0),
    ("decode", COLUMN, "activation", "split", "to_device"): (5 * RANK, 0),
    ("decode", ROW_PARALLEL, "adapter", "fetch", "to_device"): (RANK * 2 * D, RANK * (Q + F)),
    ("decode", ROW_PARALLEL, "activation", "near_data", "to_pool"): (0, Q + F),
    ("decode", ROW_PARALLEL, "activation", "near_data", "to_device"): (2 * D, 0),
    ("decode", ROW_PARALLEL, "activation", "split", "to_pool"): (0, Q + F),
    ("decode", ROW_PARALLEL, "activation", "split", "to_device"): (2 * RANK, 0),
    ("head", (HEAD,), "adapter", "fetch", "to_device"): (RANK * D, RANK * V),
    ("head", (HEAD,), "activation", "near_data", "to_pool"): (D, 0),
    ("head", (HEAD,), "activation", "near_data", "to_device"): (0, V),
    ("head", (HEAD,), "activation", "split", "to_device"): (RANK, 0),
    ("embed", (EMBEDDING,), "adapter", "fetch", "to_device"): (RANK * D, 0),
    ("embed", (EMBEDDING,), "activation", "fetch", "to_device"): (RANK, 0),
    ("embed", (EMBEDDING,), "activation", "near_data", "to_device"): (D, 0),
}


@pytest.mark.parametrize("crossing", STAYS_AND_FALLS, ids=lambda c: f"{c[0]} {c[1][0]} {c[3]} {c[4]}")
def test_link_bytes_of_an_adapter_on_one_device_fall_with_the_devices_where_matrices_are_cut(crossing):
    """B of column-parallel projections and A of row-parallel ones are cut, and with them what is as wide.

    A of column-parallel and B of row-parallel ones are whole on every device: their inputs, outputs and all products
    with A cross on each.
    """
    phase, projections, *key = crossing
    stays, falls = STAYS_AND_FALLS[crossing]
    layers = LAYERS if phase == "decode" else 1
    for shards in SHARDS:
        found = bytes_of_one_device(plan_of(shards), lora=(phase, key[1], projections))
        assert found[tuple(key)][1] == 4 * layers * (stays + falls / shards), shards


@pytest.mark.parametrize("strategy", ["fetch", "near_data", "split"])
def test_bytes_with_padding_fall_on_one_device_as_those_without(strategy):
    projections = (*COLUMN, *ROW_PARALLEL)
    for shards in SHARDS:
        found = bytes_of_one_device(plan_of(shards), lora=("decode", strategy, projections))
        assert {key: moved for key, (moved, _) in found.items()} == {
            key: useful * (CHUNK_ROWS // RANK if strategy == "fetch" else ROWS) for key, (_, useful) in found.items()
        }


KV_USE = {
    "local": KvUse(rounds=1, streamed_pages=10, near_queries=(0,)),
    "distributed": KvUse(rounds=0, streamed_pages=0, near_queries=(5,)),
}


@pytest.mark.parametrize("strategy", KV_USE)
def test_link_bytes_of_attention_on_one_device_fall_as_the_devices(strategy):
    alone = bytes_of_one_device(plan_of(1), kv=KV_USE[strategy])
    wanted = {
        "local": {("kv", "local", "to_device"): 4 * LAYERS * 10 * 2 * KV * PAGE_TOKENS},
        "distributed": {
            ("activation", "distributed", "to_pool"): 4 * LAYERS * 5 * Q,
            ("activation", "distributed", "to_device"): 4 * LAYERS * 5 * (Q + 2 * HEADS),
        },
    }[strategy]
    assert {key: useful for key, (_, useful) in alone.items()} == wanted
    for shards in SHARDS:
        found = bytes_of_one_device(plan_of(shards), kv=KV_USE[strategy])
        assert {key: (moved * shards, useful * shards) for key, (moved, useful) in found.items()} == alone


def test_pages_stop_falling_where_several_devices_hold_the_same_kv_head():
    pages = [bytes_of_one_device(plan_of(n, num_kv_heads=2), kv=KV_USE["local"]) for n in SHARDS]
    useful = [found["kv", "local", "to_device"][1] for found in pages]
    assert [useful[0] // size for size in useful] == [1, 2, 2, 2]
    queries = [bytes_of_one_device(plan_of(n, num_kv_heads=2), kv=KV_USE["distributed"]) for n in SHARDS]
    sent = [found["activation", "distributed", "to_pool"][1] for found in queries]
    assert [sent[0] // size for size in sent] == [1, 2, 4, 8]
