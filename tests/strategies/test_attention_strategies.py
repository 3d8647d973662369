"""The two attention strategies against full attention in numpy: any split of pages between device and pool."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.strategy_table import ATTENTION
from tests.strategies.kv_rig import GROUPS, LAYERS, PAGE, TABLE, Maths, make_case, serve

TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-2}
SHARDS = 8
LENGTHS = st.lists(st.integers(0, PAGE * TABLE), min_size=GROUPS, max_size=GROUPS)
STRATEGIES = st.lists(st.sampled_from(list(ATTENTION)), min_size=GROUPS, max_size=GROUPS)


def check(case, maths, dtype):
    got = serve(case, maths)
    for layer in range(LAYERS):
        for shard, part in enumerate(np.split(got[layer], len(case.keys), axis=2)):
            np.testing.assert_allclose(part, case.want(layer, shard, maths), atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("queries", "pool_devices", "dtype", "soft_cap"),
    [
        (1, 1, "float32", None),
        (1, 3, "bfloat16", None),
        (1, 3, "float32", 5.0),
        (16, 3, "float32", None),
    ],
)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=LENGTHS,
    strategies=STRATEGIES,
    on_device=st.sampled_from([0.0, 0.3, 1.0]),
    window=st.sampled_from([None, 1, 20, 200]),
)
def test_attention_any_split_of_pages_equals_full_attention(
    queries, pool_devices, dtype, soft_cap, seed, lengths, strategies, on_device, window
):
    case = make_case(
        seed,
        lengths=lengths,
        queries=queries,
        strategies=strategies,
        on_device=on_device,
        pool_devices=pool_devices,
        dtype=dtype,
    )
    check(case, Maths(window, soft_cap), dtype)


@pytest.mark.parametrize("strategy", ATTENTION)
def test_attention_strategy_alone_serves_whole_contexts_from_the_pool(strategy):
    case = make_case(3, lengths=[384, 17, 200, 384], strategies=[strategy] * GROUPS, on_device=0.0, pool_devices=3)
    assert bool(case.lanes.rounds) == (strategy == "local")
    assert bool(case.lanes.near_groups) == (strategy == "distributed")
    check(case, Maths(), "float32")


@pytest.mark.parametrize(("queries", "dtype"), [(1, "bfloat16"), (16, "bfloat16"), (1, "float32")])
def test_attention_over_int8_pages_of_both_strategies_equals_full_attention(queries, dtype):
    case = make_case(
        5,
        lengths=[384, 17, 0, 200],
        queries=queries,
        strategies=["local", "distributed", "local", "distributed"],
        pool_devices=3,
        dtype=dtype,
        int8_kv=True,
    )
    assert case.lanes.rounds
    assert case.lanes.near_groups
    check(case, Maths(window=200, soft_cap=5.0), dtype)


def test_streamed_page_that_several_groups_read_crosses_once():
    """Groups 0 and 1 are two blocks of one sequence."""
    case = make_case(4, lengths=[384, 0, 100, 0], strategies=["local"] * GROUPS, on_device=0.4)
    for table in (case.lanes.device.tables, case.lanes.slots, case.keys.swapaxes(0, 1), case.values.swapaxes(0, 1)):
        table[1] = table[0]
    case.lanes.device.positions[1] = 130
    assert case.use.streamed_pages == len(np.unique(case.lanes.slots)) - 1
    check(case, Maths(), "float32")


@pytest.mark.skipif(len(jax.devices()) < SHARDS, reason=f"needs {SHARDS} devices: run by the test below")
def test_attention_strategies_on_eight_shards_equal_full_attention():
    both = ["local", "distributed", "local", "distributed"]
    check(
        make_case(5, lengths=[384, 300, 0, 90], strategies=both, pool_devices=3, shards=SHARDS), Maths(100), "float32"
    )


def test_attention_strategies_on_eight_virtual_devices_equal_full_attention():
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={SHARDS}"}
    command = [sys.executable, "-m", "pytest", "-k", "eight_shards", __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
