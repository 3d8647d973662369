import functools
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from memory_pool import Crossing, Ledger, audit, link
from memory_pool.adapter_pool import AdapterPool, CapacityError, Needs
from memory_pool.adapter_streams import OUTSIDE
from memory_pool.page_memory import PageMemory, copies
from memory_pool.pool_pages import PoolPages
from tests.memory_pool.adapters_for_tests import (
    GROUPS,
    LAYERS,
    check_matrices,
    make_adapter,
    make_layout,
    matrices_in,
    random_ranks,
)

ROOT = Path(__file__).parents[2]
NEEDS = {
    "resident": Needs(True, True),
    "fetch": Needs(False, False),
    "near_data": Needs(False, False),
    "split": Needs(False, True),
}
AUTO = ("resident", "near_data")
LOADED = Crossing("adapter", "resident", "to_device", "load")
POOL_DEVICES, MAX_RANK = 3, 9
PAGE = LAYERS * 32 * 4  # bytes


@functools.cache
def make_memory(adapter_pages, pool_pages, shards=1):
    mesh = Mesh(np.array(jax.devices()[:shards]), (link.TENSOR_AXIS,))
    sizes = {"pool_devices": POOL_DEVICES, "pool_pages": pool_pages, "adapter_pages": adapter_pages, "kv_pages": 2}
    return PageMemory(make_layout(shards), mesh, **sizes)


def make_pool(preferred=("resident",), *, adapter_pages=11, pool_pages=41, shards=1, **options):
    """A device budget of `adapter_pages` - 1 pages; `options.pages` to look at the pool's pages."""
    pages = options.pop("pages", None) or PoolPages(POOL_DEVICES, pool_pages)
    options = {"ledger": Ledger(), "groups": GROUPS, "max_rank": MAX_RANK} | options
    memory = make_memory(adapter_pages, pool_pages, shards)
    return AdapterPool(memory, pages, needs=NEEDS, preferred=preferred, **options)


def small(identity):
    """8 rows of 12 numbers and 8 columns of 8, in pages of 32."""
    return make_adapter(identity, {(0, "q"): 8})


SMALL_PAGES = (3, 2)


def put_small(pool, *identities):
    for identity in identities:
        pool.put(small(identity))


@pytest.mark.parametrize("preferred", ["resident", "split", "near_data", "fetch"])
@pytest.mark.parametrize("placement", ["pinned", "striped"])
def test_placed_tables_lead_to_the_matrices(preferred, placement):
    check_placed_tables_lead_to_the_matrices(preferred, placement, shards=1)


def check_placed_tables_lead_to_the_matrices(preferred, placement, *, shards):
    pool = make_pool((preferred,), placement=placement, adapter_pages=130, shards=shards)
    memory = make_memory(130, 41, shards)
    adapters = [make_adapter(i, random_ranks(np.random.default_rng(i), MAX_RANK)) for i in range(1, 4)]
    for adapter in adapters:
        pool.put(adapter)
        pool.acquire(adapter.identity)
    pool.check_integrity()
    for identity, modules in adapters:
        placed = pool.placed(identity)
        assert placed is pool.placed(identity)
        assert placed.strategy == preferred
        assert placed.a_pages.shape == (pool.num_stripes, pool.most_pages[0])
        assert placed.b_pages.shape == (pool.num_stripes, pool.most_pages[1])
        for side, shard in itertools.product(("a", "b"), range(shards)):
            pages = memory.adapters if getattr(NEEDS[preferred], side) else memory.pool
            check_matrices(
                matrices_in(pages, memory.layout, placed, side=side, shard=shard),
                modules,
                memory.layout,
                side=side,
                shard=shard,
            )


def test_adapters_over_two_shards():
    """In a process of its own: the number of devices is fixed when JAX starts."""
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.memory_pool.test_adapter_pool"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done"]


def test_placed_scale_and_facts_are_those_of_the_modules():
    pool = make_pool(("near_data",))
    pool.put(make_adapter(1, {(1, "q"): 2, (OUTSIDE, "head"): 1}))
    pool.acquire(1)
    placed = pool.placed(1)
    assert placed.scale.tolist() == [[0, 0, 0, 1.5], [0.5, 0, 0, 1.5], [0, 0, 0, 1.5]]
    assert placed.facts == (12, 8, 2, 24, 16)
    assert placed.ranks.tolist() == [[2, 0, 0, 1]]


@pytest.mark.parametrize("placement", ["pinned", "striped"])
def test_put_takes_pages_of_true_ranks(placement):
    pages = PoolPages(POOL_DEVICES, 41)
    pool = make_pool(placement=placement, pages=pages)
    put_small(pool, 1)
    taken = [40 - free for free in pages.free_by_device]
    # Striped: 3, 3 and 2 rank components of 12 and of 8 numbers in pages of 32.
    assert taken == {"pinned": [5, 0, 0], "striped": [3, 3, 2]}[placement]
    assert pool.pool_bytes == sum(taken) * PAGE == pool.status(1).pool_bytes
    assert (pool.status(1).tier, pool.status(1).strategy) == ("pool", "resident")
    assert pool.device_bytes_used == 0


def test_put_pinned_goes_to_the_pool_device_with_most_room():
    pages = PoolPages(POOL_DEVICES, 41)
    pool = make_pool(pages=pages)
    put_small(pool, 1, 2, 3, 4)
    assert pages.free_by_device == [30, 35, 35]


def test_put_writes_chunks_between_steps_on_the_callers_request_only():
    pool, sizes, write = make_pool(), [], PageMemory.write
    memory = make_memory(11, 41)
    calls = []

    def between_steps(function):
        calls.append(threading.get_ident())
        function()

    pool.between_steps = between_steps
    adapter = make_adapter(1, {(layer, "q"): 9 for layer in range(LAYERS)} | {(0, "o"): 9, (OUTSIDE, "embed"): 9})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageMemory, "write", lambda self, ids, pages: sizes.append(len(ids)) or write(self, ids, pages))
        pool.put(adapter)
    assert sum(sizes) == pool.status(1).pool_bytes // PAGE
    assert max(sizes) == memory.copy_pages == 8
    assert len(calls) == 1 + len(sizes), "one for the room and one for each chunk"


@pytest.mark.parametrize("broken", range(4))
def test_put_that_fails_midway_leaves_nothing(broken):
    pages = PoolPages(POOL_DEVICES, 41)
    pool = make_pool(pages=pages)
    calls = itertools.count()

    def between_steps(function):
        if next(calls) >= broken:
            raise RuntimeError("the engine is gone")
        function()

    pool.between_steps = between_steps
    with pytest.raises(RuntimeError, match="the engine is gone"):
        pool.put(make_adapter(1, {(0, "q"): 9, (0, "o"): 9, (OUTSIDE, "embed"): 9, (OUTSIDE, "head"): 9}))
    assert pages.num_free == pages.num_usable
    assert pool.pool_bytes == 0
    with pytest.raises(KeyError):
        pool.status(1)
    pool.check_integrity()


def test_put_rank_over_the_largest_names_the_flag():
    with pytest.raises(
        CapacityError, match=r"rank 10 of q in layer 2; this server holds rank <= 9: raise --max_lora_rank"
    ):
        make_pool().put(make_adapter(1, {(2, "q"): 10}))


def test_put_into_a_full_pool_names_sizes_and_flag():
    pages = PoolPages(POOL_DEVICES, 9)
    pool = make_pool(pool_pages=9, pages=pages)
    put_small(pool, 1, 2, 3)
    text = r"pinned to one of 3 pool devices\) does not fit: .* raise --pool_memory_gb to 0.001 or more, or unload"
    with pytest.raises(CapacityError, match=text):
        put_small(pool, 4)
    assert pages.num_free == 9
    pool.retire(2)
    put_small(pool, 4)
    pool.check_integrity()


@pytest.mark.parametrize("placement", ["pinned", "striped"])
def test_put_never_takes_the_room_kept_for_kv(placement):
    pages = PoolPages(POOL_DEVICES, 9)
    pool = make_pool(pool_pages=9, pages=pages, placement=placement, keep_for_kv=15)
    put_small(pool, 1)
    with pytest.raises(CapacityError, match="kept for the longest sequence: raise --pool_memory_gb"):
        put_small(pool, 2)
    assert pages.num_free >= 15
    kv = pages.alloc(15)
    with pytest.raises(CapacityError, match="does not fit"):
        put_small(pool, 2)
    pages.free(kv)
    pool.check_integrity()


def test_kv_pages_count_towards_the_room_kept_for_kv():
    pages = PoolPages(POOL_DEVICES, 9)
    pool = make_pool(pool_pages=9, pages=pages, keep_for_kv=15)
    pages.alloc(9)
    put_small(pool, 1)
    assert pages.num_free == 24 - 9 - 5
    pool.check_integrity()


def test_acquire_full_device_evicts_the_least_recently_used_idle_adapter():
    pool = make_pool()
    put_small(pool, 1, 2, 3)
    for identity in (1, 2):
        pool.acquire(identity)
        pool.release(identity)
    pool.acquire(3)
    assert [pool.status(i).tier for i in (1, 2, 3)] == ["pool", "device", "device"]
    assert pool.device_bytes_used == 10 * PAGE <= pool.device_bytes
    pool.check_integrity()


def test_can_acquire_forced_waits_while_others_hold_the_budget():
    pool = make_pool()
    put_small(pool, 1, 2, 3)
    pool.acquire(1)
    pool.acquire(2)
    assert not pool.can_acquire(3)
    assert pool.can_acquire(1)
    pool.release(2)
    assert pool.can_acquire(3)
    assert pool.can_acquire(0)


def test_acquire_auto_never_waits_and_serves_near_the_data_when_the_budget_is_held():
    pool = make_pool(AUTO)
    put_small(pool, 1, 2, 3)
    for identity in (1, 2, 3):
        assert pool.can_acquire(identity)
        pool.acquire(identity)
    assert [pool.placed(i).strategy for i in (1, 2, 3)] == ["resident", "resident", "near_data"]
    assert pool.strategies() == {"resident": 2, "fetch": 0, "near_data": 1, "split": 0}
    first = pool.placed(3)
    pool.release(1)
    pool.acquire(3)
    assert pool.placed(3) is first, "it is not moved while it is used"
    pool.release(3)
    pool.release(3)
    pool.acquire(3)
    assert pool.placed(3).strategy == "resident"
    assert pool.fallbacks == 0
    pool.check_integrity()


@pytest.mark.parametrize(("preferred", "most"), [("resident", 4), ("split", 1)])
def test_acquire_that_can_never_fit_falls_back_to_fetch_and_is_counted(preferred, most):
    pool = make_pool((preferred,), adapter_pages=1 + most)
    put_small(pool, 1, 2)
    assert pool.status(1).strategy == "fetch"
    for identity in (1, 2):
        assert pool.can_acquire(identity)
        pool.acquire(identity)
    assert pool.placed(1).strategy == "fetch"
    assert pool.fallbacks == 2
    assert pool.device_bytes_used == 0
    pool.check_integrity()


def test_acquire_prefers_another_strategy_while_the_device_has_room_for_all():
    pool = make_pool(("near_data",), while_all_fit="resident")  # for two of 5 pages
    for identity in (1, 2):
        pool.put(small(identity))
    pool.acquire(1)
    assert pool.placed(1).strategy == "resident"
    pool.put(small(3))
    pool.acquire(2)
    assert pool.placed(2).strategy == "near_data", "the third has no room"
    assert pool.placed(1).strategy == "resident", "who has pages there keeps them"
    assert pool.status(3).strategy == "near_data"
    pool.release(2)
    pool.retire(3)
    pool.acquire(2)
    assert pool.placed(2).strategy == "resident"
    pool.check_integrity()


def test_acquire_while_all_fit_takes_what_works_where_near_data_is_lost():
    pool = make_pool(("near_data",), while_all_fit="resident")
    pool.lose(("near_data", "split"), instead="fetch")
    for identity in (1, 2):
        pool.put(small(identity))
    assert pool.status(1).strategy == "resident"
    pool.put(small(3))
    assert pool.status(1).strategy == "fetch"


def test_acquire_split_holds_only_b_on_the_device():
    pool = make_pool(("split",))
    put_small(pool, 1)
    pool.acquire(1)
    assert pool.status(1).device_bytes == SMALL_PAGES[1] * PAGE
    assert pool.status(1).tier == "device"


def test_acquire_twice_copies_once():
    ledger = Ledger()
    pool = make_pool(ledger=ledger)
    put_small(pool, 1)
    for _ in range(2):
        pool.acquire(1)
        pool.release(1)
    useful = (8 * 12 + 8 * 8) * 4
    assert ledger.totals()[LOADED] == (5 * PAGE, useful)


def test_adapter_that_changes_nothing_takes_nothing():
    pool = make_pool()
    pool.put(make_adapter(1, {}))
    pool.acquire(1)
    assert pool.pool_bytes == pool.device_bytes_used == 0
    assert not pool.placed(1).ranks.any()
    pool.check_integrity()


def test_retire_in_use_is_dropped_at_the_last_release():
    pages = PoolPages(POOL_DEVICES, 41)
    pool = make_pool(pages=pages)
    put_small(pool, 1)
    pool.acquire(1)
    pool.retire(1)
    assert pool.status(1).references == 1
    pool.release(1)
    with pytest.raises(KeyError):
        pool.status(1)
    assert pool.pool_bytes == pool.device_bytes_used == 0
    assert pages.num_free == pages.num_usable
    pool.check_integrity()


def test_device_budget_without_a_page_names_the_flag():
    with pytest.raises(CapacityError, match="holds 1 pages of 384 bytes, and 2 are needed: raise --device_adapter_mb"):
        make_pool(adapter_pages=1)


def test_promotion_counted_by_the_ledger_equals_the_audit():
    check_promotion_counted_by_the_ledger_equals_the_audit(shards=1)


def check_promotion_counted_by_the_ledger_equals_the_audit(*, shards):
    ledger = Ledger()
    pool = make_pool(ledger=ledger, shards=shards)
    put_small(pool, 1)
    pool.acquire(1)
    memory = make_memory(11, 41, shards)
    # Of two shards each has half of B's columns.
    ids = np.arange(1, 1 + SMALL_PAGES[0] + SMALL_PAGES[1] // shards, dtype=np.int32)
    near = jax.device_put(ids, link.pool_sharding(memory.mesh))
    audited = audit(copies(memory.mesh).load, memory.adapters, memory.pool, ids, near, control_args=[3])
    assert ledger.totals()[LOADED].moved == audited.to_device
    assert ledger.totals()[Crossing("control", "resident", "to_pool", "load")].moved == audited.to_pool


OPERATIONS = st.tuples(st.sampled_from(["put", "acquire", "acquire", "release", "retire", "kv"]), st.integers(0, 9))


@pytest.mark.parametrize("preferred", [("resident",), ("split",), ("near_data",), ("fetch",), AUTO], ids="-".join)
@pytest.mark.parametrize("placement", ["pinned", "striped"])
@settings(max_examples=25, deadline=None)
@given(operations=st.lists(OPERATIONS, min_size=10, max_size=60))
def test_random_operations_keep_integrity(preferred, placement, operations):
    pages = PoolPages(POOL_DEVICES, 41)
    pool = make_pool(preferred, pages=pages, placement=placement, keep_for_kv=20, adapter_pages=21)
    identities, rng = itertools.count(1), np.random.default_rng(len(operations))
    known, held, kv = [], [], []
    for operation, pick in operations:
        if operation == "put":
            identity = next(identities)
            try:
                pool.put(make_adapter(identity, random_ranks(rng, 1 + pick % MAX_RANK)))
                known.append(identity)
            except CapacityError:
                assert pages.num_free < 120 - 20, "an empty pool takes any adapter"
        elif operation == "acquire" and known:
            identity = known[pick % len(known)]
            assert pool.can_acquire(identity) or (len(set(preferred)) == 1 and held)
            if pool.can_acquire(identity):
                pool.acquire(identity)
                held.append(identity)
        elif operation == "release" and held:
            pool.release(held.pop(pick % len(held)))
        elif operation == "retire" and known:
            pool.retire(known.pop(pick % len(known)))
        elif operation == "kv":
            pages.free(kv)
            kv = pages.alloc(min(pages.num_free, 3 * pick))
        pool.check_integrity()
        for identity in set(held):
            assert pool.placed(identity).strategy in (*preferred, "fetch")
            assert pool.status(identity).references == held.count(identity)
    for identity in held:
        pool.release(identity)
    for identity in known:
        pool.retire(identity)
    assert pool.pool_bytes == pool.device_bytes_used == 0
    assert pages.num_usable - pages.num_free == len(kv)


if __name__ == "__main__":
    for strategy in ("resident", "near_data"):
        for how in ("pinned", "striped"):
            check_placed_tables_lead_to_the_matrices(strategy, how, shards=2)
    check_promotion_counted_by_the_ledger_equals_the_audit(shards=2)
    print("done")
