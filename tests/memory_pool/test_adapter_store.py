import itertools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_pool import AdapterStore, CapacityError, Crossing, Ledger, audit, link, one_device_mesh
from memory_pool.adapter_store import PIECE_ROWS

PROJECTIONS = {"q": (6, 4), "v": (2, 4)}
LAYERS = 2
LOADED = Crossing("adapter", "resident", "to_device", "load")


class Matrices(NamedTuple):
    a: np.ndarray
    b: np.ndarray
    scale: float


class Adapter(NamedTuple):
    identity: int
    modules: dict


def make_adapter(identity, ranks):
    """`ranks`: rank by (layer, projection)."""
    rng = np.random.default_rng(identity)
    modules = {
        (layer, name): Matrices(
            rng.normal(size=(rank, PROJECTIONS[name][1])).astype(np.float32),
            rng.normal(size=(PROJECTIONS[name][0], rank)).astype(np.float32),
            1.5,
        )
        for (layer, name), rank in ranks.items()
    }
    return Adapter(identity, modules)


def make_store(slots, ledger=None):
    width = LAYERS * (sum(o + i for o, i in PROJECTIONS.values()) * 4 + 4 * len(PROJECTIONS))
    return AdapterStore(
        PROJECTIONS,
        LAYERS,
        dtype=np.dtype(np.float32),
        mesh=one_device_mesh(),
        device_bytes=slots * width + width - 1,
        ledger=ledger or Ledger(),
    )


def rows_of(store, identity, name, layer):
    slots = store.slots(identity)
    rows = store.device_rows[name]
    a, b = (np.asarray(m)[layer, slots].view(np.float32) for m in (rows.a, rows.b))
    return a, b, np.asarray(rows.scale)[layer, slots]


def test_acquire_mixed_ranks_puts_true_values_on_the_device():
    store = make_store(40)
    adapter = make_adapter(7, {(0, "q"): 11, (1, "v"): 3})
    store.put(adapter)
    store.acquire(7)
    a, b, scale = rows_of(store, 7, "q", 0)
    np.testing.assert_array_equal(a, adapter.modules[0, "q"].a)
    np.testing.assert_array_equal(b, adapter.modules[0, "q"].b.T)
    np.testing.assert_array_equal(scale, np.full(11, 1.5, np.float32))
    a, _, scale = rows_of(store, 7, "v", 1)
    np.testing.assert_array_equal(a[:3], adapter.modules[1, "v"].a)
    assert not a[3:].any()
    assert not scale[3:].any()
    assert not any(np.asarray(leaf)[:, 0].any() for leaf in jax.tree.leaves(store.device_rows)), "slot 0 must stay zero"


def test_acquire_full_device_evicts_the_least_recently_used_idle_adapter():
    store = make_store(21)
    for identity in (1, 2, 3):
        store.put(make_adapter(identity, {(0, "q"): 8}))
    for identity in (1, 2):
        store.acquire(identity)
        store.release(identity)
    store.acquire(3)
    assert [store.status(i).tier for i in (1, 2, 3)] == ["pool", "device", "device"]
    store.check_integrity()


def test_can_acquire_all_held_says_no_and_a_release_says_yes():
    store = make_store(17)
    for identity in (1, 2, 3):
        store.put(make_adapter(identity, {(0, "q"): 8}))
    store.acquire(1)
    store.acquire(2)
    assert not store.can_acquire(3)
    assert store.can_acquire(1)
    store.release(2)
    assert store.can_acquire(3)


def test_retire_in_use_is_dropped_at_the_last_release():
    store = make_store(16)
    store.put(make_adapter(1, {(0, "q"): 8}))
    store.acquire(1)
    store.retire(1)
    assert store.status(1).references == 1
    store.release(1)
    with pytest.raises(KeyError):
        store.status(1)
    assert store.pool_bytes == 0
    store.check_integrity()


def test_put_rank_over_the_budget_names_the_flag():
    store = make_store(9)
    with pytest.raises(
        CapacityError, match=r"rank 9 does not fit .* holds 8 rank components: raise --device_adapter_mb"
    ):
        store.put(make_adapter(1, {(0, "q"): 9}))
    assert store.pool_bytes == 0


def test_store_budget_below_one_piece_names_the_flag():
    with pytest.raises(CapacityError, match="raise --device_adapter_mb to 1 or more"):
        make_store(PIECE_ROWS - 1)


def test_promotion_is_counted_with_and_without_padding():
    ledger = Ledger()
    store = make_store(40, ledger)
    assert LOADED not in ledger.totals(), "nothing was promoted yet"
    store.put(make_adapter(1, {(0, "q"): 11}))
    store.acquire(1)
    assert ledger.totals()[LOADED] == (16 * store.slot_bytes, 11 * store.slot_bytes)
    store.release(1)
    store.acquire(1)
    assert ledger.totals()[LOADED].moved == 16 * store.slot_bytes, "it was still on the device"


def test_pool_arrays_live_in_host_memory():
    store = make_store(16)
    store.put(make_adapter(1, {(0, "q"): 4}))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(store._entries[1].pieces)}
    assert kinds == {"pinned_host"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(store.device_rows)} == {"device"}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["put", "acquire", "release", "retire"]), st.integers(0, 5)), max_size=60))
def test_store_random_operations_keep_integrity(operations):
    store = make_store(25)
    identities = itertools.count(1)
    known, held, retired = [], [], set()
    for operation, pick in operations:
        if operation == "put":
            identity = next(identities)
            store.put(make_adapter(identity, {(0, "q"): 1 + identity * 7 % 12}))
            known.append(identity)
        elif operation == "acquire" and known:
            identity = known[pick % len(known)]
            if store.can_acquire(identity):
                store.acquire(identity)
                held.append(identity)
        elif operation == "release" and held:
            store.release(held.pop(pick % len(held)))
        elif operation == "retire" and known:
            identity = known.pop(pick % len(known))
            store.retire(identity)
            retired.add(identity)
        store.check_integrity()
    for identity in held:
        store.release(identity)
    for identity in retired:
        with pytest.raises(KeyError):
            store.status(identity)


def test_promotion_counted_by_the_ledger_equals_the_audit():
    ledger = Ledger()
    store = make_store(40, ledger)
    store.put(make_adapter(1, {(0, "q"): 11}))
    pieces = store._entries[1].pieces
    slots = np.zeros(PIECE_ROWS, np.int32)
    audited = sum(audit(link.copy_rows_to_device, store.device_rows, piece, slots).to_device for piece in pieces)
    store.acquire(1)
    assert ledger.totals()[LOADED].moved == audited
