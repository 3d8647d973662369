"""Many adapters over a small device: all served, on true-rank pages, under the budget, with their solo tokens.

A hundred adapters of ranks 8 to 64 on q_proj and v_proj of the default model. `PLORA_TEST_ADAPTERS=1000` runs the
thousand: they take 7 GB of pool in float32 and some minutes.
"""

import os

import jax
import numpy as np
import pytest

from plora_jax.engine import SamplingParams
from plora_jax.engine.build import EngineConfig, build_engine
from plora_jax.engine.restart import restart
from strategies.strategy_table import LORA
from tests.plora_jax.scarce import make_adapter, true_pages

COUNT = int(os.environ.get("PLORA_TEST_ADAPTERS", "100"))
TARGETS = ("q_proj", "v_proj")
RANKS = [(8, 16, 24, 32, 48, 64)[i % 6] for i in range(COUNT)]
BUDGET_BYTES = 64 * 2**20
SAMPLE = range(0, COUNT, max(1, COUNT // 5))
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
CHOICES = ("auto", *LORA)


def prompt_of(index):
    return np.random.default_rng(1000 + index).integers(100, 40_000, 5).tolist()


def device_bytes():
    """Device memory of all arrays that are alive."""
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device")


class Watched:
    """An executor that looks at the device memory for adapters before each step."""

    def __init__(self, built):
        self._inner, self._built = built.executor, built
        self.served_by = set()
        self.most_used_bytes = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def execute(self, plan):
        adapters, memory = self._built.adapters, self._built.memory
        self.most_used_bytes = max(self.most_used_bytes, adapters.device_bytes_used)
        assert adapters.device_bytes_used <= memory.adapters.nbytes <= BUDGET_BYTES
        self.served_by |= {adapters.status(row.sequence.adapter_id).strategy for row in plan.rows}
        return self._inner.execute(plan)


class Fleet:
    """The deployment, its adapters and what each of the sample says alone."""

    def __init__(self):
        config = EngineConfig(
            dtype="float32",
            max_model_len=64,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            device_adapter_mb=64,
            device_kv_mb=32,
            hardware="cpu",
            pool_memory_gb=COUNT * 0.0085 + 0.2,
        )
        self.built = build_engine(config)
        self.engine = self.built.engine
        self.watched = self.engine._loop._executor = Watched(self.built)
        self.solo = {i: self.alone(i) for i in SAMPLE}
        self.device_bytes = [device_bytes()]
        for index in range(COUNT):
            self.load(index)
            if index in (COUNT // 10, COUNT - 1):
                self.generate([index])
                self.device_bytes.append(device_bytes())

    def load(self, index):
        adapter = make_adapter(f"a{index}", seed=index, rank=RANKS[index], config=self.built.model, targets=TARGETS)
        return self.engine.add_adapter(adapter)

    def alone(self, index):
        """Tokens of an adapter that is alone in the pool."""
        self.load(index)
        (tokens,) = self.generate([index])
        self.engine.unload_adapter(f"a{index}")
        assert self.built.adapters.pool_bytes == 0
        return tokens

    def generate(self, indices):
        done = self.engine.generate([prompt_of(i) for i in indices], GREEDY, adapters=[f"a{i}" for i in indices])
        return [completions[0].token_ids for completions in done]


@pytest.fixture(scope="module")
def fleet():
    return Fleet()


@pytest.mark.slow
def test_pool_holds_exactly_the_pages_of_true_ranks(fleet):
    layout, model = fleet.built.memory.layout, fleet.built.model
    page_bytes = model.num_layers * 2 * model.num_kv_heads * 16 * model.head_dim * 4
    wanted = {i: sum(true_pages(rank, TARGETS, layout, model)) * page_bytes for i, rank in enumerate(RANKS)}
    assert fleet.built.adapters.pool_bytes == sum(wanted.values())
    held = {status.name: status.nbytes for status in fleet.engine.adapters()}
    assert held == {f"a{i}": size for i, size in wanted.items()}
    assert sum(wanted.values()) > 3 * BUDGET_BYTES, "the adapters must not fit the device"


@pytest.mark.slow
def test_device_memory_does_not_grow_with_adapters(fleet):
    few, some, all_ = fleet.device_bytes
    assert few == some == all_


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES if os.environ.get("PLORA_TEST_ALL") else ["auto", "split"])
def test_every_adapter_is_served_with_its_solo_tokens_under_the_budget(fleet, choice):
    adapters = fleet.built.adapters
    restart(fleet.built, lora_strategy=choice)
    fleet.watched.served_by.clear()
    fleet.watched.most_used_bytes = 0
    order = np.random.default_rng(len(choice)).permutation(COUNT).tolist()
    tokens = dict(zip(order, fleet.generate(order), strict=True))
    assert {i: tokens[i] for i in SAMPLE} == fleet.solo
    assert len(set(tokens.values())) > COUNT // 4, "the adapters must say different things"
    assert fleet.watched.served_by == {choice} or choice == "auto"
    if choice == "resident":
        assert fleet.watched.most_used_bytes > BUDGET_BYTES * 0.75, "the budget must be scarce"
    assert adapters.fallbacks == 0
    fleet.engine.check_integrity()
    adapters.check_integrity()
