"""The ledger's formulas against the audit of the same programs, to the byte, and against the table of useful bytes."""

import dataclasses

import numpy as np
import pytest

from memory_pool.auditing import audit
from memory_pool.ledger import Ledger
from strategies import kv_traffic, traffic
from strategies.lanes import ABSENT, BASE
from strategies.strategy_table import ATTENTION, LORA
from tests.strategies import kv_rig
from tests.strategies.lora_rig import GROUPS, LAYERS, WIDTHS, make_case, shapes, traced

RANKS = np.array([[128, 1, 70], [3, 0, 64], [0, 0, 9]])
PHASES = {"decode": 8, "prefill": 48}


def case_of(strategies, *, phase, stripes, dtype="bfloat16", changed=(1, 1, 1)):
    """Some tokens for each strategy; `changed` has 0 for projections that no adapter changes."""
    owners = np.full((PHASES[phase], 2), BASE)
    for t, name in enumerate(strategies):
        index = list(LORA).index(name)
        owners[t::8] = (index, 0)
        owners[4 + t :: 24] = (index, 2)
    ranks = {name: RANKS * changed if name in strategies else np.zeros((0, 3), int) for name in LORA}
    return make_case(0, ranks=ranks, owners=owners, dtype=dtype, stripes=stripes)


def uses(case):
    return {name: lane.use for name, lane in case.lanes.items() if lane.use is not None}


def ledger_of(bucket, case):
    ledger = Ledger()
    for name, use in uses(case).items():
        ledger.add_all(LORA[name].traffic(bucket, use))
    return ledger


def moved(ledger, direction):
    return sum(size.moved for crossing, size in ledger.totals().items() if crossing.direction == direction)


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("stripes", [1, 3])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("served", [*([name] for name in LORA), [], list(LORA)], ids="+".join)
def test_lora_ledger_equals_the_audit(served, phase, stripes, shards):
    case = case_of(served, phase=phase, stripes=stripes)
    bucket = case.bucket(phase, shards)
    step = traced("bfloat16", shards, phase, stripes)
    args, counts = shapes(case, shards), traffic.lora_loop_counts(bucket, uses(case))
    counted, ledger = audit(step, *args, loop_counts=counts), ledger_of(bucket, case)
    assert (counted.to_device, counted.to_pool) == (moved(ledger, "to_device"), moved(ledger, "to_pool"))
    tables = [traffic.lora_tables(bucket, name, uses(case).get(name)) for name in LORA]
    with_tables = audit(step, *args, loop_counts=counts, control_args=(3,))
    assert with_tables.to_pool - counted.to_pool == sum(size.moved for _, size in tables)
    assert all(0 < size.useful <= size.moved for _, size in tables)


@pytest.mark.parametrize("changed", [(1, 1, 0), (0, 1, 0), (0, 0, 1)])
def test_lora_ledger_and_audit_leave_out_groups_that_no_adapter_changes(changed):
    case, whole = (case_of(list(LORA), phase="decode", stripes=1, changed=c) for c in (changed, (1, 1, 1)))
    bucket, step = case.bucket("decode"), traced("bfloat16", 1, "decode", 1)
    ledger = ledger_of(bucket, case)
    counted = audit(step, *shapes(case, 1), loop_counts=traffic.lora_loop_counts(bucket, uses(case)))
    assert (counted.to_device, counted.to_pool) == (moved(ledger, "to_device"), moved(ledger, "to_pool"))
    for strategy in ("near_data", "split"):
        some, all_of_them = (LORA[strategy].traffic(bucket, uses(c)[strategy]) for c in (case, whole))
        for (crossing, size), (_, largest) in zip(some, all_of_them, strict=True):
            assert size.useful <= size.moved < largest.moved, crossing


@pytest.mark.parametrize("stripes", [1, 3])
def test_lora_useful_bytes_are_those_of_true_ranks_and_tokens(stripes):
    """The table, matrix by matrix and token by token."""
    case = case_of(list(LORA), phase="decode", stripes=stripes)
    ledger, item = ledger_of(case.bucket("decode"), case), 2
    useful = {(c.strategy, c.object, c.direction): size.useful for c, size in ledger.totals().items()}
    group_of = {name: group for group in GROUPS for name in group}
    matrices = {e: {n: r for n, r in zip(WIDTHS, ranks, strict=True) if r} for e, ranks in enumerate(RANKS.tolist())}
    table = {key: 0 for key in useful if key[1] != "control"}
    for ranks in matrices.values():
        table["fetch", "adapter", "to_device"] += sum(r * sum(WIDTHS[n]) for n, r in ranks.items())
    for name in ("near_data", "split"):
        for e in (e for e in case.lanes[name].owner.tolist() if e != BASE):
            groups = {group_of[n] for n in matrices[e]}
            table[name, "activation", "to_pool"] += stripes * sum(WIDTHS[group[0]][1] for group in groups)
            back = (
                stripes * sum(WIDTHS[n][0] for n in matrices[e]) if name == "near_data" else sum(matrices[e].values())
            )
            table[name, "activation", "to_device"] += back
    assert {key: size for key, size in useful.items() if key[1] != "control"} == {
        key: LAYERS * item * numbers for key, numbers in table.items()
    }
    assert not any(strategy == "resident" for strategy, _, _ in useful)


@pytest.mark.parametrize("shards", [1, 8])
def test_int8_adapters_halve_what_fetch_moves_of_a_and_b_and_nothing_else(shards):
    case = case_of(list(LORA), phase="decode", stripes=3)
    wide = case.bucket("decode", shards)
    narrow = dataclasses.replace(wide, layout=dataclasses.replace(wide.layout, int8_adapters=True))
    of_wide, of_narrow = (ledger_of(bucket, case).totals() for bucket in (wide, narrow))
    fetched = {crossing for crossing in of_wide if crossing.object == "adapter"}
    assert {crossing.strategy for crossing in fetched} == {"fetch"}
    for crossing, size in of_wide.items():
        times = 2 if crossing in fetched else 1
        assert [times * number for number in of_narrow[crossing]] == list(size), crossing


def kv_case(name, *, queries, pool_devices, shards):
    """Sequences of 384, 0, 200 and 33 tokens, none or half of them on the device."""
    strategies = {"both": ["local", "distributed"] * 2, "none": ["local"] * 4}.get(name, [name] * 4)
    on_device = 1.0 if name == "none" else 0.3
    return kv_rig.make_case(
        2,
        lengths=[384, 0, 200, 33],
        queries=queries,
        strategies=strategies,
        on_device=on_device,
        pool_devices=pool_devices,
        dtype="bfloat16",
        shards=shards,
    )


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("pool_devices", [1, 3])
@pytest.mark.parametrize(("phase", "queries"), [("decode", 1), ("prefill", 16)])
@pytest.mark.parametrize("served", [*ATTENTION, "both", "none"])
def test_attention_ledger_equals_the_audit(served, phase, queries, pool_devices, shards):
    case = kv_case(served, queries=queries, pool_devices=pool_devices, shards=shards)
    bucket, ledger = case.bucket(phase), Ledger()
    for strategy in ATTENTION.values():
        ledger.add_all(strategy.traffic(bucket, case.use))
    step = kv_rig.traced("bfloat16", shards, phase)
    args, counts = kv_rig.shapes(case), kv_traffic.kv_loop_counts(bucket, case.use)
    counted = audit(step, *args, loop_counts=counts)
    assert (counted.to_device, counted.to_pool) == (moved(ledger, "to_device"), moved(ledger, "to_pool"))
    near_pages = int((case.control.tables != ABSENT).sum())
    tables = kv_traffic.kv_tables(bucket, streamed_pages=case.use.streamed_pages, near_pages=near_pages)
    with_tables = audit(step, *args, loop_counts=counts, control_args=(3,))
    assert with_tables.to_pool - counted.to_pool == sum(size.moved for _, size in tables)
    assert all(0 <= size.useful <= size.moved for _, size in tables)


def test_attention_useful_bytes_are_those_of_missing_pages_and_of_queries_where_their_pages_are():
    case = kv_case("both", queries=16, pool_devices=3, shards=1)
    useful = {
        (crossing.strategy, crossing.object, crossing.direction): size.useful
        for strategy in ATTENTION.values()
        for crossing, size in strategy.traffic(case.bucket("prefill"), case.use)
        if crossing.object != "control"
    }
    missing = int((case.lanes.slots != ABSENT).sum())
    page_bytes = kv_rig.LAYERS * 2 * kv_rig.KV_HEADS * kv_rig.PAGE * kv_rig.DIM * 2
    real = (case.control.positions >= 0).sum(axis=1)
    queries = sum(int(real[n]) for d in range(3) for n in range(4) if (case.control.tables[d, n] != ABSENT).any())
    heads = kv_rig.LAYERS * kv_rig.HEADS * queries
    assert useful == {
        ("local", "kv", "to_device"): missing * page_bytes,
        ("distributed", "activation", "to_pool"): heads * kv_rig.DIM * 2,
        ("distributed", "activation", "to_device"): heads * (kv_rig.DIM * 2 + 8),
    }


def test_resident_and_pages_on_the_device_cross_nothing():
    case = case_of(["resident"], phase="decode", stripes=1)
    assert ledger_of(case.bucket("decode"), case).totals() == {}
    kv = kv_case("none", queries=1, pool_devices=3, shards=1)
    assert [strategy.traffic(kv.bucket("decode"), kv.use) for strategy in ATTENTION.values()] == [[], []]


def test_useful_bytes_never_exceed_moved_ones_when_every_adapter_is_full():
    ranks = np.full((8, 3), 128)
    owners = np.array([(list(LORA).index("split"), e) for e in range(8)])
    for stripes in (1, 3):
        case = make_case(
            0, ranks={n: ranks if n == "split" else ranks[:0] for n in LORA}, owners=owners, stripes=stripes
        )
        for name in ("split", "near_data", "fetch"):
            for crossing, size in LORA[name].traffic(case.bucket("decode"), case.lanes["split"].use):
                assert size.useful <= size.moved, crossing
                if stripes == 1 and crossing.object != "control":
                    assert size.useful == size.moved, "no padding: all tokens, entries and components are in use"
