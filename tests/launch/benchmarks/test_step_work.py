"""The least work of a step, against numbers counted by hand for one small model."""

from __future__ import annotations

import dataclasses

import pytest

from launch.benchmarks.machine_rates import MachineRates
from launch.benchmarks.step_work import PlannedStep, StepModel, Work, mean_work, work_of
from memory_pool.adapter_streams import AdapterFacts
from plora_jax.checkpoints import load_config
from plora_jax.engine.params import SamplingParams
from plora_jax.engine.plan import Row, Sequence, StepPlan
from tests.launch.small_engine import LLAMA

CONFIG = dataclasses.replace(load_config(LLAMA), num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=100)
WEIGHTS = {"q_proj": 10, "k_proj": 20, "v_proj": 30, "o_proj": 5, "gate_proj": 7, "up_proj": 8, "down_proj": 9}
MODEL = StepModel(CONFIG, {**WEIGHTS, "embedding": 1000, "packed_head": 700}, item=2, adapter_item=2, kv_item=2)
KV = 2 * 2 * 16 * 2 * 2
"""Bytes of one token: K and V, heads, H, layers, bytes of a number."""


def row(adapter: int, start: int, count: int, *, decode: bool) -> Row:
    sequence = Sequence(1, [1] * 8, SamplingParams(), 0, adapter_id=adapter)
    return Row(sequence, start, count, decode, samples=decode)


FACTS = AdapterFacts(inputs=0, outputs=0, ranks=0, a_numbers=300, b_numbers=200)
STEP = PlannedStep(
    StepPlan((row(5, 10, 1, decode=True), row(5, 20, 1, decode=True), row(0, 4, 3, decode=False))), {5: FACTS}
)


def test_attention_reads_each_sequence_once_and_pairs_each_query_with_what_it_sees():
    work = work_of(STEP, MODEL)
    per_pair = 4 * 4 * 16 * 2
    assert work["decode.attention"] == Work((11 + 21) * KV, (11 + 21) * per_pair)
    # The three tokens see 5, 6 and 7.
    assert work["prefill.attention"] == Work(7 * KV, (5 + 6 + 7) * per_pair)
    assert work["kv_write"] == Work(5 * KV)


def test_adapters_are_read_once_and_multiplied_by_each_of_their_tokens():
    work = work_of(STEP, MODEL)
    assert work["decode adapters"] == Work(500 * 2, 2 * 2 * 500)
    assert work["prefill adapters"] == Work(0, 0)
    assert work_of(STEP, MODEL._replace(adapter_item=1))["decode adapters"] == Work(500, 2 * 2 * 500)


def test_weights_count_as_they_are_kept():
    work, hidden = work_of(STEP, MODEL), CONFIG.hidden_size
    outputs = (4 + 2 + 2) * 16
    activations = 5 * (CONFIG.projections["q_proj"][1] + outputs) * 2 * 2
    assert work["qkv"] == Work(60 + activations, 2 * 5 * outputs * hidden * 2)
    # Two rows are sampled.
    assert work["head"] == Work(700 + 4 * 2 * 100, 2 * 2 * 100 * hidden)
    untied = MODEL._replace(weight_bytes={**WEIGHTS, "embedding": 1000})
    assert work_of(STEP, untied)["head"].num_bytes == 1000 + 800


def test_mean_of_steps_is_part_by_part():
    decode = PlannedStep(StepPlan((row(0, 9, 1, decode=True),)), {})
    mean = mean_work([STEP, decode], MODEL)
    assert mean["kv_write"].num_bytes == (5 + 1) * KV / 2
    assert mean["decode adapters"].num_bytes == 500


def test_limit_is_the_longer_of_memory_and_arithmetic():
    rates = MachineRates(memory_bytes_per_s=100.0, flops_per_s=1000.0)
    assert rates.seconds(50, 100) == (pytest.approx(0.5), "memory")
    assert rates.seconds(50, 900) == (pytest.approx(0.9), "arithmetic")
