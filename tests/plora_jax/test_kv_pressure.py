"""The real engine with too little room for keys and values: the tokens of an unlimited run, and every page counted."""

import dataclasses
import os
from collections import Counter

import numpy as np
import pytest

from memory_pool.kv_pool import ABSENT, KvPool
from memory_pool.ledger import Crossing, LinkBytes
from memory_pool.pages import PageAllocator
from plora_jax.engine import SamplingParams
from strategies.lanes import SCRATCH_PAGES
from strategies.strategy_table import ATTENTION
from tests.plora_jax.conformance import engine_over
from tests.plora_jax.scarce import deploy_pages, make_adapter

MODELS = [("llama", "auto"), ("gemma2", "auto")]
"""Plain, and with sliding windows and soft caps; PLORA_TEST_ALL=1 adds int8 keys and values, a minute more."""
if os.environ.get("PLORA_TEST_ALL"):
    MODELS.append(("llama", "int8"))

pytestmark = pytest.mark.slow
PAGE_TOKENS = 4
LONGEST = 256
ROOMY = 300
"""Pages that hold everything that a test computes."""


class Counted:
    """Stands before an executor and a page memory and counts, on its own, what moves of keys and values."""

    def __init__(self, built):
        self._executor, self._memory = built.executor, built.memory
        self.saved = self.restored = 0
        self.missing: Counter[str] = Counter()
        self.rounds: Counter[str] = Counter()
        self.queries: Counter[str] = Counter()

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def save_kv(self, pool_ids, device_ids):
        self.saved += len(pool_ids)
        return self._memory.save_kv(pool_ids, device_ids)

    def load_kv(self, device_ids, pool_ids):
        self.restored += len(pool_ids)
        return self._memory.load_kv(device_ids, pool_ids)

    def execute(self, plan):
        missing = Counter()
        for row in plan.rows:
            phase = "decode" if row.decode else "prefill"
            pages = int((row.sequence.kv.device_table() == ABSENT).sum())
            missing[phase] += pages
            self.queries[phase] += row.count if pages else 0
        self.missing += missing
        self.rounds += Counter({phase: -(-pages // SCRATCH_PAGES) for phase, pages in missing.items()})
        return self._executor.execute(plan)


class Rig:
    """An engine over the programs of a deployment, with other numbers of KV pages.

    Args:
        built: the deployment.
        device: KV pages of the device.
        attention: "local" or "distributed".
    """

    def __init__(self, built, *, device, attention="distributed"):
        self.built, self.attention, self._before = built, attention, built.ledger.totals()
        built.executor._attention_of = lambda sequence: attention
        self.counted, self.device, home = Counted(built), PageAllocator(device + 1), built.kv._pool
        self._withheld = []
        self.kv = KvPool(
            home,
            self.device,
            self.counted,
            page_tokens=PAGE_TOKENS,
            token_bytes=built.memory.page_bytes // PAGE_TOKENS,
            ledger=built.ledger,
        )
        self.engine = engine_over(dataclasses.replace(built, kv=self.kv), self.counted, chunk=16)

    def generate(self, prompts, sampling, adapters=None):
        done = self.engine.generate(prompts, sampling, adapters=adapters)
        return [completions[0].token_ids for completions in done]

    def leave_pool_pages(self, count):
        """Takes all but so many free pages of the pool away, until the end."""
        home = self.built.kv._pool
        self._withheld = home.alloc(home.num_free - count)

    def moved(self, *crossing):
        """Bytes counted since the rig was made."""
        key, nothing = Crossing(*crossing), LinkBytes(0, 0)
        now, before = self.built.ledger.totals().get(key, nothing), self._before.get(key, nothing)
        return LinkBytes(now.moved - before.moved, now.useful - before.useful)

    def finish(self):
        """Checks that all pages moved as counted and are given back."""
        self.engine.check_integrity()
        self._check_home()
        for phase in ("decode", "prefill"):
            self._check_step(phase)
        assert self.kv.num_held_pages == 0
        assert self.device.num_free == self.device.num_usable
        self.built.kv._pool.free(self._withheld)

    def _check_home(self):
        page, counted = self.built.memory.page_bytes, self.counted
        assert self.moved("kv", "home", "to_pool", "load").moved == counted.saved * page
        assert self.moved("kv", "home", "to_device", "load").moved == counted.restored * page
        assert self.kv.restores == counted.restored

    def _check_step(self, phase):
        model, counted, page = self.built.model, self.counted, self.built.memory.page_bytes
        streams = self.attention == "local"
        streamed = self.moved("kv", "local", "to_device", phase)
        assert streamed.useful == streams * counted.missing[phase] * page
        assert streamed.moved == streams * counted.rounds[phase] * SCRATCH_PAGES * page
        rows = (not streams) * counted.queries[phase] * model.num_layers * model.num_heads
        assert self.moved("activation", "distributed", "to_pool", phase).useful == rows * model.head_dim * 4
        assert self.moved("activation", "distributed", "to_device", phase).useful == rows * (model.head_dim + 2) * 4


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def built(request):
    model, kv_cache_dtype = request.param
    # Pages of int8 are smaller, and adapters take more of them.
    more = 3 if kv_cache_dtype == "int8" else 1
    return deploy_pages(
        model,
        pool=more * 4 * ROOMY,
        adapters=more * 60,
        kv=ROOMY,
        page_tokens=PAGE_TOKENS,
        max_model_len=LONGEST,
        kv_cache_dtype=kv_cache_dtype,
    )


def greedy(count):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def words(count, seed):
    return np.random.default_rng(seed).integers(3, 256, count).tolist()


def converse(rig):
    """Three turns, each with all that was said before; the last fills the context."""
    said, answers = [], []
    for turn, (asked, answered) in enumerate([(60, 20), (60, 20), (56, 40)]):
        said += words(asked, seed=turn)
        (answer,) = rig.generate([said], greedy(answered))
        said += answer
        answers.append(answer)
    assert len(said) == LONGEST
    return answers


@pytest.mark.parametrize("attention", ATTENTION)
def test_conversation_of_four_times_the_device_equals_an_unlimited_run(built, attention):
    unlimited = Rig(built, device=ROOMY)
    wanted = converse(unlimited)
    assert not unlimited.counted.missing, "the unlimited run must find everything on the device"
    unlimited.finish()
    rig = Rig(built, device=LONGEST // PAGE_TOKENS // 4, attention=attention)
    assert converse(rig) == wanted
    assert rig.counted.missing["decode"]
    assert rig.counted.missing["prefill"]
    # The last token of a turn is drawn but not computed, so its page is not full.
    assert rig.counted.saved == sum((tokens - 1) // PAGE_TOKENS for tokens in (80, 160, 256))
    assert rig.counted.restored == 0
    rig.finish()


@pytest.mark.parametrize("attention", ATTENTION)
def test_prompts_longer_than_the_device_equal_an_unlimited_run(built, attention):
    prompts = [words(count, seed=count) for count in (200, 150, 97)]
    wanted = Rig(built, device=ROOMY).generate(prompts, greedy(20))
    assert len(set(wanted)) == len(wanted), "the prompts must be answered differently"
    rig = Rig(built, device=8, attention=attention)
    assert rig.generate(prompts, greedy(20)) == wanted
    assert rig.engine.stats().preemptions == 0
    rig.finish()


ADAPTER_RANKS = {"small": 4, "middle": 8, "large": 16}
NAMES = (None, *ADAPTER_RANKS)


def load_adapters(rig):
    for seed, (name, rank) in enumerate(ADAPTER_RANKS.items()):
        rig.engine.add_adapter(make_adapter(name, seed=seed, rank=rank, config=rig.built.model, std=0.3))


def unload_adapters(rig):
    for name in ADAPTER_RANKS:
        rig.engine.unload_adapter(name)
    assert rig.built.adapters.pool_bytes == 0


def rising_priority(rig, prompts):
    """The requests' tokens; each four are submitted while the ones before run, and go before them."""
    generations = []
    for index, prompt in enumerate(prompts):
        name = NAMES[index % len(NAMES)]
        generations.append(rig.engine.submit(prompt, greedy(24), adapter=name, priority=-(index // 4)))
        if index % 4 == 3:
            for _ in range(5):
                rig.engine.step()
                rig.engine.check_integrity()
    return [generation.collect()[0].token_ids for generation in generations]


@pytest.mark.parametrize("attention", ATTENTION)
def test_requests_that_suspend_each_other_equal_a_run_without_offload(built, attention):
    prompts = [words(5 + 7 * index % 40, seed=index) for index in range(32)]
    unlimited = Rig(built, device=ROOMY)
    load_adapters(unlimited)
    wanted = unlimited.generate(prompts, greedy(24), [NAMES[i % len(NAMES)] for i in range(len(prompts))])
    unload_adapters(unlimited)
    assert len(set(wanted)) == len(wanted), "the requests must say different things"
    unlimited.finish()
    rig = Rig(built, device=8, attention=attention)
    load_adapters(rig)
    assert rising_priority(rig, prompts) == wanted
    unload_adapters(rig)
    stats = rig.engine.stats()
    assert stats.suspensions == stats.preemptions > 8
    assert stats.restores > 8
    rig.finish()


@pytest.mark.parametrize("attention", ATTENTION)
def test_requests_that_preempt_each_other_for_pool_pages_equal_an_unlimited_run(built, attention):
    prompts = [words(28 + index, seed=index) for index in range(8)]
    names = [NAMES[i % len(NAMES)] for i in range(len(prompts))]
    unlimited = Rig(built, device=ROOMY)
    load_adapters(unlimited)
    wanted = unlimited.generate(prompts, greedy(60), names)
    unload_adapters(unlimited)
    unlimited.finish()
    rig = Rig(built, device=16, attention=attention)
    load_adapters(rig)
    rig.leave_pool_pages(LONGEST // PAGE_TOKENS)
    assert rig.generate(prompts, greedy(60), names) == wanted
    unload_adapters(rig)
    stats = rig.engine.stats()
    assert stats.preemptions > stats.suspensions
    rig.finish()
