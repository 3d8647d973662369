"""Every LoRA and attention strategy, forced, behind the routes: the golden tokens, and what they say of it.

The engines differ in flags alone. Strategies are data, so all of them run the same compiled programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from starlette.testclient import TestClient

from launch.console import StageLog
from launch.http import HttpConfig, create_app
from launch.serve import make_state
from launch.startup import start_engine
from plora_jax.engine.build import Deployment
from tests.launch.small_engine import PACK, small_config

ADAPTERS = ("plain_qv", "all_linear")
# The pages of these tokens are more than --device_kv_mb=1 holds.
LONG = {"prompt": [7 + i % 200 for i in range(400)], "n": 8, "max_tokens": 110, "temperature": 0, "ignore_eos": True}
PAIRS = [("resident", "local"), ("fetch", "distributed"), ("near_data", "local"), ("split", "distributed")]


class Forced(NamedTuple):
    lora: str
    attention: str
    client: TestClient
    deployment: Deployment

    def metrics(self, name: str) -> dict[tuple[str, ...], float]:
        """Samples by the values of their labels, in the order of the labels' names, that of the model left out."""
        found = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name:
                    labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
                    found[tuple(labels[k] for k in sorted(labels))] = sample.value
        return found

    def link(self) -> dict[tuple[str, ...], float]:
        """Bytes by (direction, object, strategy)."""
        return self.metrics("plora:link_bytes_total")

    def complete(self, **body: object) -> dict:
        answer = self.client.post("/v1/completions", json={"skip_special_tokens": False, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def forced(request: pytest.FixtureRequest) -> Iterator[Forced]:
    lora, attention = request.param
    config = small_config(lora_strategy=lora, attention_strategy=attention)
    paths = {name: str(PACK / "adapters" / name) for name in ADAPTERS}
    deployment = start_engine(config, paths, log=StageLog(Console(quiet=True)))
    state = make_state(deployment, HttpConfig(adapter_root=str(PACK / "adapters")), template=None)
    try:
        with TestClient(create_app(state)) as client:
            yield Forced(lora, attention, client, deployment)
    finally:
        deployment.engine.shutdown()


def golden(name: str) -> tuple[list[int], str]:
    with np.load(PACK / "adapters" / name / "golden.npz") as arrays:
        return arrays["prompt_1"].tolist(), "".join(chr(0x4E00 + t) for t in arrays["greedy_1"])


def test_forced_strategy_serves_the_golden_tokens_and_shows_at_the_routes(forced):
    for name in ADAPTERS:
        prompt, text = golden(name)
        got = forced.complete(model=name, prompt=prompt, max_tokens=12, temperature=0, ignore_eos=True)
        assert got["choices"][0]["text"] == text
    cards = forced.client.get("/v1/adapters").json()["data"]
    tier = "device" if forced.lora in ("resident", "split") else "pool"
    assert {card["name"]: (card["strategy"], card["tier"]) for card in cards} == dict.fromkeys(
        ADAPTERS, (forced.lora, tier)
    )
    assert all((card["device_bytes"] > 0) == (tier == "device") for card in cards)
    assert all(0 <= card["device_bytes"] <= card["bytes"] for card in cards)
    assert forced.metrics("plora:adapter_strategy") == {(forced.lora,): 2}
    assert forced.metrics("plora:adapter_loaded") == {(name, tier, "false"): 1 for name in ADAPTERS}
    assert forced.metrics("plora:strategy_fallbacks_total") == {(): 0}


def test_forced_strategy_moves_what_its_row_of_the_table_says(forced):
    before = forced.link()
    forced.complete(model="all_linear", prompt=[9] * 20, max_tokens=4, temperature=0)
    moved = {key[:2] for key, size in forced.link().items() if key[2] == forced.lora and size > before.get(key, 0)}
    moved -= {("to_pool", "control")}
    both = {("to_pool", "activation"), ("to_device", "activation")}
    assert (
        moved
        == {
            # What it reads of an adapter is on the device already.
            "resident": set(),
            "fetch": {("to_device", "adapter")},
            "near_data": both,
            "split": both,
        }[forced.lora]
    )
    others = {key[2] for key, size in forced.link().items() if key[1] in ("adapter", "activation") and size}
    assert others <= {forced.lora, forced.attention}


def test_forced_attention_reads_keys_and_values_beyond_the_device_budget(forced):
    before = forced.link()
    answer = forced.complete(model="llama", **LONG)
    assert len({choice["text"] for choice in answer["choices"]}) == 1
    after = {key: size - before.get(key, 0) for key, size in forced.link().items()}
    streamed = after.get(("to_device", "kv", "local"), 0)
    partials = after.get(("to_device", "activation", "distributed"), 0)
    assert (streamed > 0, partials > 0) == (forced.attention == "local", forced.attention == "distributed")
    # Full pages go home whatever the strategy.
    assert after["to_pool", "kv", "home"] > 0


def test_memory_metrics_agree_with_the_engine(forced):
    memory, adapters = forced.deployment.memory, forced.deployment.adapters
    assert adapters is not None
    assert forced.metrics("plora:pool_bytes") == {("adapter",): adapters.pool_bytes, ("kv",): 0}
    budgets = {("adapter",): memory.adapters.nbytes, ("kv",): memory.kv.nbytes}
    assert forced.metrics("plora:device_cache_bytes") == budgets
    assert all(size <= 2**20 for size in budgets.values())
    assert forced.metrics("vllm:kv_cache_usage_perc") == {(): 0}
    forced.deployment.engine.check_integrity()


def test_usage_is_the_share_of_the_pool_pages_that_running_sequences_hold(forced, monkeypatch):
    executor, kv, seen = forced.deployment.executor, forced.deployment.kv, []
    execute = executor.execute

    def watched(plan):
        share = kv.num_held_pages / (kv.num_held_pages + kv.num_free_pages)
        held = kv.num_held_pages * forced.deployment.memory.page_bytes
        seen.append((forced.metrics("vllm:kv_cache_usage_perc")[()], share))
        seen.append((forced.metrics("plora:pool_bytes")["kv",], held))
        return execute(plan)

    monkeypatch.setattr(executor, "execute", watched)
    forced.complete(model="llama", prompt=[5] * 40, max_tokens=2, temperature=0)
    assert seen
    assert all(got == wanted > 0 for got, wanted in seen)
