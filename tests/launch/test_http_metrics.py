"""Metrics under vLLM's names and ours."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from tests.launch.http_rig import http_rig
from tests.launch.test_http_adapters import make_adapter


def scrape(client) -> dict[str, list[tuple[dict[str, str], float]]]:
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def test_metrics_count_requests_tokens_and_latencies():
    with http_rig() as rig:
        client = rig.client()
        client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
        client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 50})
        rig.wait_idle()
        got = scrape(client)
    values = {name: value for name, ((_, value), *_) in got.items()}
    assert values["vllm:prompt_tokens_total"] == 6
    assert values["vllm:generation_tokens_total"] == 4 + 20
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:kv_cache_usage_perc"] == 0
    assert values["vllm:num_preemptions_total"] == 0
    finished = {labels["finished_reason"]: value for labels, value in got["vllm:request_success_total"]}
    assert finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert values[f"vllm:{name}_count"] == 2
    assert values["vllm:inter_token_latency_seconds_count"] == 3 + 19
    assert values["vllm:request_prompt_tokens_sum"] == 6
    assert values["vllm:request_generation_tokens_sum"] == 24
    info = got["vllm:cache_config_info"][0][0]
    assert (info["block_size"], info["cache_dtype"]) == ("4", "auto")
    assert values["plora:compilations_total"] == 7
    assert values["plora:near_data_failures_total"] == 2
    assert values["plora:planner_seconds_count"] == 0
    assert all(labels["model_name"] == "base" for samples in got.values() for labels, _ in samples)


def test_metrics_of_pages_under_pressure_are_those_of_the_engine(monkeypatch):
    with http_rig() as rig:
        stats = rig.engine.stats()._replace(kv_usage=0.75, preemptions=3, suspensions=2, restores=5, overflowed=4)
        stats = stats._replace(steps=7, steps_ahead=6)
        monkeypatch.setattr(rig.engine, "stats", lambda: stats)
        got = {name: samples[0][1] for name, samples in scrape(rig.client()).items()}
    assert got["vllm:kv_cache_usage_perc"] == 0.75
    assert got["vllm:num_preemptions_total"] == 3
    assert got["plora:suspensions_total"] == 2
    assert got["plora:restores_total"] == 5
    assert got["plora:nonfinite_logits_total"] == 4
    assert (got["plora:steps_total"], got["plora:steps_ahead_total"]) == (7, 6)


def test_metrics_without_a_source_are_left_out():
    with http_rig() as rig:
        got = scrape(rig.client())
    assert not [name for name in got if name.startswith(("plora:link", "plora:pool", "vllm:prefix_cache"))]


def test_lora_info_shows_now_only(tmp_path):
    make_adapter(tmp_path / "a")
    with http_rig(adapter_root=str(tmp_path)) as rig:
        client = rig.client()
        client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "a"})
        seen: list[tuple[dict[str, str], float]] = []
        rig.executor.before_step = lambda plan: seen.extend(scrape(client)["vllm:lora_requests_info"])
        client.post("/v1/completions", json={"model": "x", "prompt": "p", "max_tokens": 1})
        rig.executor.before_step = lambda plan: None
        labels, value = seen[0]
        assert (labels["running_lora_adapters"], labels["waiting_lora_adapters"]) == ("x", "")
        assert abs(value - time.time()) < 60
        rig.wait_idle()
        ((labels, _),) = scrape(client)["vllm:lora_requests_info"]
        assert (labels["running_lora_adapters"], labels["max_lora"]) == ("", "8")
        ((labels, value),) = scrape(client)["plora:adapter_loaded"]
        assert (labels["adapter_name"], labels["level"], labels["pinned"], value) == ("x", "pool", "false", 1)
        assert scrape(client)["plora:adapter_strategy"] == [({"model_name": "base", "strategy": "resident"}, 1)]
        client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
        assert "plora:adapter_loaded" not in scrape(client)
