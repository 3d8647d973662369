"""The four LoRA strategies against plain numpy: mixed lanes, any ranks, one or several pool devices, several shards."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.lanes import BASE
from strategies.strategy_table import LORA
from tests.strategies.lora_rig import GROUPS, LAYERS, WIDTHS, make_case, serve

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
SHARDS = 8


def random_case(seed, *, tokens, adapters, dtype="float32", stripes=1, most=128):
    """Adapters spread over the strategies at random, and tokens of a fixed batch over the adapters and the base."""
    rng = np.random.default_rng(seed)
    where = rng.integers(len(LORA), size=adapters)
    ranks = {name: _ranks(rng, int((where == i).sum()), most) for i, name in enumerate(LORA)}
    places = [(i, e) for i, name in enumerate(LORA) for e in range(len(ranks[name]))] or [(BASE, BASE)]
    owners = np.full((64, 2), BASE)
    for t in range(tokens):
        if rng.random() < 0.9:
            owners[t] = places[rng.integers(len(places))]
    return make_case(seed, ranks=ranks, owners=owners, dtype=dtype, stripes=stripes, entries=32)


def _ranks(rng, count, most):
    """Ranks 1 to 128 of small and large adapters alike; some leave a projection alone."""
    top = rng.choice([1, 8, 16, 64, most], size=(count, 1))
    ranks = rng.integers(1, top + 1, size=(count, len(WIDTHS)))
    return np.where(rng.random(ranks.shape) < 0.2, 0, ranks)


def check(case, got, dtype, *, shards=1):
    nobody = np.all([lane.owner == BASE for lane in case.lanes.values()], axis=0)
    for name in (name for group in GROUPS for name in group):
        for layer in range(LAYERS):
            want = case.want(name, layer)
            bound = TOLERANCE[dtype] * max(1.0, np.abs(want).max())
            for i, part in enumerate(np.split(got[name][layer], shards, axis=1)):
                np.testing.assert_allclose(part / 4.0**i, want, atol=bound, err_msg=f"{name} layer {layer} shard {i}")
                assert not part[nobody].any(), "the base model's tokens must get exact zeros"


@pytest.mark.parametrize(("dtype", "stripes"), [("float32", 1), ("bfloat16", 1), ("float32", 3)])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 64), adapters=st.sampled_from([0, 1, 5, 32]))
def test_lora_strategies_any_mix_equals_numpy(dtype, stripes, seed, tokens, adapters):
    case = random_case(seed, tokens=tokens, adapters=adapters, dtype=dtype, stripes=stripes)
    check(case, serve(case), dtype)


@pytest.mark.parametrize("strategy", LORA)
def test_lora_strategy_alone_equals_numpy_and_others_are_skipped(strategy):
    ranks = {name: np.array([[128, 1, 70], [3, 0, 64]] if name == strategy else np.zeros((0, 3))) for name in LORA}
    index = list(LORA).index(strategy)
    owners = np.array([(index, 0), (BASE, BASE), (index, 1), (index, 0)] * 16)
    case = make_case(1, ranks={n: r.astype(int) for n, r in ranks.items()}, owners=owners, entries=32)
    check(case, serve(case), "float32")


@pytest.mark.skipif(len(jax.devices()) < SHARDS, reason=f"needs {SHARDS} devices: run by the test below")
def test_lora_strategies_on_eight_shards_equal_numpy():
    case = random_case(7, tokens=50, adapters=9, most=70)
    check(case, serve(case, shards=SHARDS), "float32", shards=SHARDS)


def test_lora_strategies_on_eight_virtual_devices_equal_numpy():
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={SHARDS}"}
    command = [sys.executable, "-m", "pytest", "-k", "eight_shards", __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
