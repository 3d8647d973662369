"""Prometheus metrics: vLLM's names, so that dashboards and gateways work, and ours for what vLLM does not have.

Counters and gauges are read from the engine when somebody asks; only latencies are kept here, in histograms. A metric
whose source this server does not have is left out rather than shown as 0.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from memory_pool.ledger import Crossing, LinkBytes

if TYPE_CHECKING:
    from plora_jax.engine.engine import Engine

# Buckets of vLLM (vllm/v1/metrics/loggers.py).
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_PLANNER_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

# Field of the engine's Observations: (name, help, buckets).
_HISTOGRAMS = {
    "time_to_first_token_s": ("vllm:time_to_first_token_seconds", "From arrival to the first token, s.", _TTFT_S),
    "inter_token_s": ("vllm:inter_token_latency_seconds", "Between two tokens of a completion, s.", _ITL_S),
    "e2e_s": ("vllm:e2e_request_latency_seconds", "From arrival to the end of a request, s.", _REQUEST_S),
    "queue_s": ("vllm:request_queue_time_seconds", "From arrival to a request's first step, s.", _REQUEST_S),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    "generation_tokens": ("vllm:request_generation_tokens", "Tokens generated for a completion.", _TOKENS),
    "planner_s": ("plora:planner_seconds", "To make a plan, beside the steps, s.", _PLANNER_S),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricSources:
    """What is counted outside the engine's stats; None where this server has no such thing.

    Attributes:
        compilations: backend compilations of this process so far.
        link_totals: bytes that crossed the link.
        pool_bytes: bytes taken in the pool, by object.
        device_cache_bytes: bytes of the device set aside for adapter and KV pages, by object.
        num_kv_pages: KV pages that sequences can take.
        kv_cache_dtype: as the operator set it.
        fallbacks: how often an adapter was served by fetch because the preferred strategy can never fit.
        near_data_failures: how often the compute near the data was reported to have failed.
    """

    compilations: Callable[[], int] | None = None
    link_totals: Callable[[], Mapping[Crossing, LinkBytes]] | None = None
    pool_bytes: Callable[[], Mapping[str, int]] | None = None
    device_cache_bytes: Callable[[], Mapping[str, int]] | None = None
    num_kv_pages: int | None = None
    kv_cache_dtype: str = "auto"
    fallbacks: Callable[[], int] | None = None
    near_data_failures: Callable[[], int] | None = None


class Metrics(Collector):
    """The metrics of one server, in a registry of their own.

    Args:
        engine: asked at every scrape.
        model_name: label of all metrics.
        sources: what else is counted.
    """

    def __init__(self, engine: Engine, model_name: str, sources: MetricSources | None = None) -> None:
        self._engine, self._model = engine, model_name
        self._sources = sources or MetricSources()
        self._registry = CollectorRegistry()
        self._histograms = {
            field: Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry).labels(model_name)
            for field, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._registry.register(self)

    def render(self) -> bytes:
        """Everything in the Prometheus text format."""
        for field, values in self._engine.take_observations()._asdict().items():
            for value in values:
                self._histograms[field].observe(value)
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: the registry would else collect at registration, before the engine runs."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._engine_metrics()
        yield from self._adapter_metrics()
        yield from self._memory_metrics()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._gauges(name, text, (), {(): value})

    def _gauges(self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name", *labels))
        for key, value in values.items():
            family.add_metric((self._model, *key), value)
        return family

    def _counters(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name", *labels))
        for key, value in values.items():
            family.add_metric((self._model, *key), value)
        return family

    def _engine_metrics(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield self._gauge("vllm:num_requests_running", "Sequences that run.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait.", stats.waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the pool's KV pages that are taken, 0 to 1.", stats.kv_usage
        )
        counts = {
            "vllm:prompt_tokens": ("Prompt tokens processed.", stats.prompt_tokens),
            "vllm:generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "vllm:num_preemptions": ("Sequences sent back to wait because KV pages ran out.", stats.preemptions),
            "plora:nonfinite_logits": (
                "Completions that ended with an error because their logits were not finite.",
                stats.overflowed,
            ),
            "plora:steps": ("Steps of the engine.", stats.steps),
            "plora:steps_ahead": ("Steps that were begun while the one before was under way.", stats.steps_ahead),
            "plora:suspensions": ("Preemptions that kept keys and values in the pool.", stats.suspensions),
            "plora:restores": ("KV pages brought back from the pool to be filled on.", stats.restores),
        }
        for name, (text, value) in counts.items():
            yield self._counters(name, text, (), {(): value})
        finished = {(reason,): stats.finished.get(reason, 0) for reason in ("stop", "length", "abort", "error")}
        yield self._counters("vllm:request_success", "Completions that ended.", ("finished_reason",), finished)
        limits = self._engine.scheduler_config
        page_tokens, pages = str(limits.page_tokens), self._sources.num_kv_pages
        info = {(page_tokens, self._sources.kv_cache_dtype, "" if pages is None else str(pages)): 1}
        labels = ("block_size", "cache_dtype", "num_gpu_blocks")
        yield self._gauges("vllm:cache_config_info", "The KV cache: tokens of a page, dtype, pages.", labels, info)
        # As many adapters can run as sequences can: the device memory is shared by bytes, there are no slots.
        running, waiting = ",".join(stats.running_adapters), ",".join(stats.waiting_adapters)
        lora = {(str(limits.max_num_seqs), running, waiting): time.time()}
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        yield self._gauges("vllm:lora_requests_info", "Adapters in use; the value is the unix time.", labels, lora)

    def _adapter_metrics(self) -> Iterator[Metric]:
        adapters = self._engine.adapters()
        loaded = {(a.name, a.tier, str(a.pinned).lower()): 1 for a in adapters}
        labels = ("adapter_name", "level", "pinned")
        yield self._gauges("plora:adapter_loaded", "1 for each adapter, with where it is.", labels, loaded)
        strategies = collections.Counter((a.strategy,) for a in adapters)
        yield self._gauges("plora:adapter_strategy", "Adapters by LoRA strategy, now.", ("strategy",), strategies)
        if self._sources.fallbacks is not None:
            text = "Times an adapter was served by fetch because the preferred strategy can never fit the budget."
            yield self._counters("plora:strategy_fallbacks", text, (), {(): self._sources.fallbacks()})
        if self._sources.near_data_failures is not None:
            text = "Failures of the compute near the data; after the first, adapters and KV are served without it."
            yield self._counters("plora:near_data_failures", text, (), {(): self._sources.near_data_failures()})

    def _memory_metrics(self) -> Iterator[Metric]:
        sources = self._sources
        if sources.compilations is not None:
            compilations = {(): sources.compilations()}
            yield self._counters("plora:compilations", "Programs compiled since the start.", (), compilations)
        if sources.link_totals is not None:
            moved: collections.Counter[tuple[str, ...]] = collections.Counter()
            for crossing, total in sources.link_totals().items():
                moved[crossing.object, crossing.strategy, crossing.direction] += total.moved
            labels = ("object", "strategy", "direction")
            yield self._counters("plora:link_bytes", "Bytes that crossed the link.", labels, moved)
        for name, text, source in (
            ("plora:pool_bytes", "Bytes taken in the pool.", sources.pool_bytes),
            ("plora:device_cache_bytes", "Device bytes set aside.", sources.device_cache_bytes),
        ):
            if source is not None:
                by_object = {(name,): float(size) for name, size in source().items()}
                yield self._gauges(name, text, ("object",), by_object)
