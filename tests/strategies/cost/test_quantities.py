"""What lanes really do, counted; held against the ledger's formulas, which a test holds against the audit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memory_pool.adapter_entry import PlacedAdapter
from memory_pool.adapter_streams import AdapterFacts
from memory_pool.layout import PageLayout, whole
from memory_pool.ledger import LinkBytes
from strategies import kv_traffic, traffic
from strategies.cost import (
    KvLoad,
    adapter_features,
    attention_link_bytes,
    attention_quantities,
    lane_quantities,
    lora_link_bytes,
    lora_moved_bytes,
    predicted_s,
)
from strategies.cost.features import passes
from tests.strategies.cost.models import STRATEGIES, model, some_calibration

SHAPE = model("SmolLM2-135M-Instruct")
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
LAYOUT = PageLayout(
    num_layers=30,
    page_tokens=16,
    kv_heads=3,
    head_dim=64,
    projections={m.name: whole((m.outputs, m.inputs)) for m in SHAPE.matrices},
    dtype=np.dtype("uint16"),
)
# By whether adapters are int8.
SHAPES = {False: SHAPE, True: dataclasses.replace(SHAPE, lora_item_bytes=1)}
LAYOUTS = {int8: dataclasses.replace(LAYOUT, int8_adapters=int8) for int8 in SHAPES}
RANKS = np.array([[16] * 7, [8, 0, 64, 0, 0, 1, 0], [0, 0, 0, 0, 3, 0, 128]])
TOKENS = np.array([1, 4, 2])
ROWS = 16


def ledger_bytes(strategy: str, *, stripes: int = 1, int8: bool = False) -> dict[tuple[str, str], LinkBytes]:
    """The formulas of `strategies.traffic` for the same lane, by object and direction."""
    adapters = []
    for ranks in RANKS:
        held = [(m, int(r)) for m, r in zip(SHAPE.matrices, ranks, strict=True) if r]
        groups = {next(g for g in GROUPS if m.name in g): m.inputs for m, _ in held}
        facts = AdapterFacts(
            inputs=30 * sum(groups.values()),
            outputs=30 * sum(m.outputs for m, _ in held),
            ranks=30 * sum(r for _, r in held),
            a_numbers=30 * sum(r * m.inputs for m, r in held),
            b_numbers=30 * sum(r * m.outputs for m, r in held),
        )
        share = np.stack([np.array(ranks) // stripes] * stripes)
        share[0] += ranks - share.sum(axis=0)
        nothing = np.zeros((stripes, 1), int)
        adapters.append(PlacedAdapter(strategy, share, np.ones((30, 7)), nothing, nothing, facts))
    bucket = traffic.LoraBucket(
        phase="decode",
        tokens=ROWS,
        layout=LAYOUTS[int8],
        groups=GROUPS,
        max_rank=128,
        entries=3,
        a_pages=1,
        b_pages=1,
        stripes=stripes,
    )
    use = traffic.LoraUse(TOKENS.tolist(), traffic.lane_facts(adapters))
    found = getattr(traffic, strategy)(bucket, use)
    return {(c.object, c.direction): size for c, size in found if c.object != "control"}


@pytest.mark.parametrize("int8", SHAPES)
@pytest.mark.parametrize("stripes", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_useful_lora_bytes_are_those_of_the_ledger(strategy, stripes, int8):
    shape = SHAPES[int8]
    found = lora_link_bytes(shape, adapter_features(shape, RANKS), TOKENS, strategy=strategy, stripes=stripes)
    ledger = ledger_bytes(strategy, stripes=stripes, int8=int8)
    for way in ("to_pool", "to_device"):
        want = sum(size.useful for (_, direction), size in ledger.items() if direction == way)
        assert np.sum(getattr(found, way)) == want
    assert np.sum(found.to_device) > 0 or strategy == "resident"


@pytest.mark.parametrize("int8", SHAPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moved_lora_bytes_are_those_of_the_ledger(strategy, int8):
    shape = SHAPES[int8]
    found = lora_moved_bytes(shape, adapter_features(shape, RANKS), TOKENS, strategy=strategy, rows=ROWS)
    ledger = ledger_bytes(strategy, int8=int8)
    for way in ("to_pool", "to_device"):
        want = sum(size.moved for (_, direction), size in ledger.items() if direction == way)
        assert getattr(found, way) == pytest.approx(want, abs=0.5)


@pytest.mark.parametrize("pool_devices", [1, 3])
@pytest.mark.parametrize("strategy", ["local", "distributed"])
def test_useful_attention_bytes_are_those_of_the_ledger(strategy, pool_devices):
    kv = KvLoad(contexts=np.array([64, 100, 33]), queries=np.array([1, 1, 1]))
    bucket = kv_traffic.KvBucket(
        phase="decode",
        groups=8,
        queries=1,
        heads=9,
        layout=LAYOUT,
        table_pages=8,
        stream_pages=64,
        pool_devices=pool_devices,
    )
    use = kv_traffic.KvUse(rounds=1, streamed_pages=4 + 7 + 3)
    if strategy == "distributed":
        use = kv_traffic.KvUse(near_queries=[3] * pool_devices)
    ledger = {c.direction: size for c, size in getattr(kv_traffic, strategy)(bucket, use) if c.object != "control"}
    found = attention_link_bytes(SHAPE, kv, strategy=strategy, pool_devices=pool_devices)
    for way in ("to_pool", "to_device"):
        assert getattr(found, way) == (ledger[way].useful if way in ledger else 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_int8_adapters_halve_the_bytes_of_a_and_b_and_nothing_else(strategy):
    wide, narrow = (
        lane_quantities(shape, adapter_features(shape, RANKS), TOKENS, strategy=strategy, rows=ROWS)
        for shape in SHAPES.values()
    )
    streams = {f"{name}.{term}" for name in ("near_rows", "device_chunk") for term in ("byte_s",)}
    halved = {"device_delta.byte_s", "device_expand.byte_s", "near_delta.byte_s", "near_shrink.byte_s", *streams}
    halved |= {name.replace("byte_s", "again_byte_s") for name in halved}
    if strategy == "fetch":
        halved.add("to_device.byte_s")
    for name, amount in wide.items():
        assert narrow[name] == pytest.approx(amount / 2 if name in halved else amount), name


def test_streams_take_whole_chunks_of_every_projection():
    """Rank 16 of four adapters fills a chunk of 64; a fifth begins another."""
    for count, chunks in ((1, 1), (4, 1), (5, 2)):
        features = adapter_features(SHAPE, np.full((count, 7), 16))
        found = lane_quantities(SHAPE, features, np.ones(count), strategy="fetch", rows=8)
        assert found["device_chunk.call_s"] == pytest.approx(30 * 7 * chunks)
        assert found["near_rows.call_s"] == found["to_device.call_s"] == pytest.approx(2 * 30 * 7 * chunks)
        numbers = 30 * chunks * 64 * sum(m.inputs + m.outputs for m in SHAPE.matrices)
        assert found["near_rows.byte_s"] == pytest.approx(2 * numbers)
        assert found["device_chunk.flop_s"] == pytest.approx(2 * 8 * numbers)


def test_kernels_read_once_and_pass_again_for_tokens_that_do_not_fit():
    assert passes(np.array([1, 3, 4, 5, 8.0]), 4).tolist() == [1, 3, 1, 2, 2]
    features = adapter_features(SHAPE, np.full((2, 7), 8))
    found = lane_quantities(SHAPE, features, np.array([1, 8]), strategy="near_delta", rows=8)
    a, b = features.a_bytes.sum(axis=1), features.b_bytes.sum(axis=1)
    assert found["near_delta.byte_s"] == pytest.approx((a + b).sum())
    assert found["near_delta.again_byte_s"] == pytest.approx(a[1] + 3 * b[1])
    assert found["near_delta.flop_s"] == pytest.approx(2 * (a + b) @ [1, 8] / 2)
    assert found["near_delta.call_s"] == 4 * 30
    assert found["near_delta.piece_s"] == 2 * 7 * 30


def test_near_data_sends_all_rows_and_split_the_widest_product():
    features = adapter_features(SHAPE, np.full((1, 7), 8))
    found = lane_quantities(SHAPE, features, np.ones(1), strategy="split", rows=64, max_rank=32)
    assert found["to_device.byte_s"] == 30 * 64 * 32 * 7 * 2
    assert found["to_pool.byte_s"] == 30 * 64 * (576 + 576 + 576 + 1536) * 2
    assert found["device_expand.byte_s"] == pytest.approx(features.b_bytes.sum())


@pytest.mark.parametrize("strategy", ["device", "near", "local", "distributed"])
def test_attention_reads_every_visible_token_once(strategy):
    kv = KvLoad(contexts=np.array([512] * 4), queries=np.ones(4, int))
    found = attention_quantities(SHAPE, kv, strategy=strategy, pool_devices=2)
    where = "near" if strategy in ("near", "distributed") else "device"
    assert found[f"{where}_attention.byte_s"] == 30 * 4 * 512 * 2 * 3 * 64 * 2
    assert found[f"{where}_attention.flop_s"] == 30 * 4 * 512 * 4 * 9 * 64
    assert ("to_device.byte_s" in found) == (strategy in ("local", "distributed"))
    if strategy == "local":
        assert found["near_rows.byte_s"] == 2 * 64 * LAYOUT.page_bytes


def test_unknown_attention_is_refused():
    with pytest.raises(ValueError, match="attention 'ring' is unknown: choose device, near, local or distributed"):
        attention_quantities(SHAPE, KvLoad(contexts=np.ones(1), queries=np.ones(1)), strategy="ring")


def test_prediction_is_the_sum_of_terms():
    calibration = some_calibration(near_delta__byte_s=2e-9, near_delta__call_s=1e-3)
    assert predicted_s(calibration, {"near_delta.byte_s": 1e6, "near_delta.call_s": 3}) == pytest.approx(5e-3)
