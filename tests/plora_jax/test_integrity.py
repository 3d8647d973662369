"""The real engine under random traffic with too little of everything: nothing leaks, nothing is miscounted, no token
changes.

Pool, device pages for adapters, device pages for KV, rows and queue are so small that loads are refused, adapters are
evicted, wait or fall back, and sequences are suspended and preempted, all in the same run.
"""

import dataclasses
import os

import pytest

from tests.plora_jax.conformance import deploy, engine_over
from tests.plora_jax.random_traffic import (
    CONTENTS,
    MAX_RANK,
    MOST_TOKENS,
    PATTERNS,
    PROMPTS,
    Free,
    Threads,
    Traffic,
    adapter_of,
    greedy,
)
from tests.plora_jax.scarce import deploy_pages, true_pages

pytestmark = pytest.mark.slow
STEPS = 1000


@pytest.fixture(scope="module")
def answers():
    """Tokens of every content on every prompt, from an engine with room for everything."""
    built = deploy("llama")
    for content in CONTENTS:
        built.engine.add_adapter(adapter_of(str(content), content, built.model))
    cases = [(content, i) for content in (None, *CONTENTS) for i in range(len(PROMPTS))]
    names = [None if content is None else str(content) for content, _ in cases]
    done = built.engine.generate([PROMPTS[i] for _, i in cases], greedy(MOST_TOKENS), adapters=names)
    table = {case: completions[0].token_ids for case, completions in zip(cases, done, strict=True)}
    assert len({tokens for (_, i), tokens in table.items() if i == 3}) > len(CONTENTS) // 2
    return table


@pytest.fixture(scope="module")
def built():
    """Pages: an adapter takes 6 to 52, a sequence up to 16; two adapters or so fit the device, five or so the pool."""
    deployment = deploy_pages(
        "llama",
        pool=100,
        adapters=30,
        kv=10,
        page_tokens=4,
        max_model_len=64,
        max_num_batched_tokens=32,
        prefill_chunk_tokens=16,
        max_waiting=8,
        max_lora_rank=MAX_RANK,
    )
    deployment.executor._attention_of = lambda seq: ("local", "distributed")[seq.seq_id % 2]
    return deployment


PREFERRED = [("resident", "near_data"), ("resident",), ("split",), ("fetch",)]


@pytest.mark.parametrize(
    "preferred", PREFERRED if os.environ.get("PLORA_TEST_ALL") else PREFERRED[:2], ids=lambda names: "+".join(names)
)
def test_random_traffic_leaks_nothing_and_changes_no_token(built, answers, preferred):
    traffic = Traffic(built, answers, seed=len(preferred[0]), preferred=preferred)
    before = built.engine.stats()
    traffic.run(STEPS)
    traffic.finish()
    stats, seen = built.engine.stats(), traffic.seen
    rare = {what: seen[what] for what in ("length", "abort", "refused", "loaded", "reloaded", "failed", "overloaded")}
    suspensions = stats.suspensions - before.suspensions
    rare |= {"suspended": suspensions, "lost KV": stats.preemptions - before.preemptions - suspensions}
    if preferred == ("resident",):
        rare["fell back"] = built.adapters.fallbacks - traffic.fallbacks
    assert min(rare.values()) > 2, f"this traffic tests too little: {rare}"


def test_loads_and_unloads_from_other_threads_while_streams_run_leak_nothing(built, answers, monkeypatch):
    engine = engine_over(built, built.executor, chunk=16)
    monkeypatch.setattr(built.adapters, "_preferred", ("resident",))
    free, threads = Free(built), Threads(dataclasses.replace(built, engine=engine), answers)
    names = {f"n{content}": content for content in range(6)}
    engine.start()
    for name, content in names.items():
        threads.start(threads.load_and_unload, name, content, 15)
    for seed in range(4):
        threads.start(threads.stream, names, seed, 40)
    while any(thread.is_alive() for thread in threads.threads):
        engine._loop.run_between_steps(lambda: (free.check_integrity(), engine._scheduler.check_integrity()))
    threads.join()
    engine.shutdown(drain_s=5)
    for status in engine.adapters():
        engine.unload_adapter(status.name)
    assert threads.served > 20
    assert threads.refused > 0
    assert free.now() == free.start


def test_resident_larger_than_the_device_is_served_by_fetch_and_counted(built, answers, monkeypatch):
    monkeypatch.setattr(built.adapters, "_preferred", ("resident",))
    engine, fallbacks, model = engine_over(built, built.executor, chunk=16), built.adapters.fallbacks, built.model
    rank, targets = PATTERNS[3]
    pages = sum(true_pages(rank, targets, built.memory.layout, model))
    assert pages > built.adapters._device.num_usable
    assert engine.add_adapter(adapter_of("large", 3, model)).strategy == "fetch"
    done = engine.generate([PROMPTS[3]] * 2, greedy(MOST_TOKENS), adapters="large")
    assert {completions[0].token_ids for completions in done} == {answers[3, 3]}
    assert built.adapters.fallbacks == fallbacks + 1
    assert built.adapters.device_bytes_used == 0
    engine.unload_adapter("large")


@pytest.mark.parametrize("preferred", ["resident", "split"])
def test_forced_strategy_waits_for_room_and_everyone_finishes(built, answers, monkeypatch, preferred):
    """One adapter is asked for without end; those of others, which find no room beside it, come to their turn."""
    monkeypatch.setattr(built.adapters, "_preferred", (preferred,))
    engine, model, fallbacks = engine_over(built, built.executor, chunk=16), built.model, built.adapters.fallbacks
    contents = {"popular": 1, "patient": 2, "other": 6}
    for name, content in contents.items():
        engine.add_adapter(adapter_of(name, content, model))
    held = built.adapters._device.alloc(built.adapters._device.num_free - {"resident": 17, "split": 8}[preferred])
    popular = [engine.submit(PROMPTS[1], greedy(3), adapter="popular") for _ in range(8)]
    waiting = {name: engine.submit(PROMPTS[2], greedy(MOST_TOKENS), adapter=name) for name in ("patient", "other")}
    steps = 0
    while not all(generation.finished for generation in waiting.values()):
        engine.step()
        engine.check_integrity()
        popular = [generation for generation in popular if not generation.finished]
        popular += [engine.submit(PROMPTS[1], greedy(3), adapter="popular") for _ in range(10 - len(popular))]
        steps += 1
        assert steps < 600, "an adapter waits forever"
    assert steps > 20, "the others must have waited"
    for name, generation in waiting.items():
        assert generation.collect()[0].token_ids == answers[contents[name], 2]
    for generation in popular:
        assert generation.collect()[0].token_ids == answers[1, 1][:3]
    assert built.adapters.fallbacks == fallbacks
    built.adapters._device.free(held)
    for name in contents:
        engine.unload_adapter(name)
