"""What an engine must hold for a case; answers of a real engine are in tests/launch/test_bench.py."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from launch.benchmarks.case import ThroughputCase
from launch.benchmarks.engine_client import CaseAdapters
from launch.flags import StartError
from plora_jax.checkpoints import load_config
from plora_jax.engine.build import EngineConfig

PACK = pathlib.Path(__file__).parents[2] / "data" / "conformance"
MODEL = load_config(PACK / "models" / "llama")
CASE = ThroughputCase(adapters=5, adapter_ranks="60,100", requests=2000)


def fit(case: ThroughputCase, **engine: object) -> EngineConfig:
    return CaseAdapters(case, MODEL).fit(EngineConfig(**engine))


@pytest.mark.parametrize(("dtype", "itemsize"), [("auto", 4), ("float32", 4), ("bfloat16", 2)])
def test_engine_gets_room_for_all_adapters_and_requests_of_the_case(dtype, itemsize):
    config = fit(CASE, dtype=dtype, device_adapter_mb=1, max_lora_rank=64)
    numbers = (3 * 60 + 2 * 100) * MODEL.num_layers * sum(map(sum, MODEL.projections.values()))
    page = MODEL.num_layers * 2 * MODEL.num_kv_heads * EngineConfig.page_tokens * MODEL.head_dim
    least, most = numbers * itemsize, (numbers + (2 * 5 + 1) * page) * itemsize
    assert least < config.device_adapter_mb * 2**20 < most + 2**20
    assert (config.enable_lora, config.max_lora_rank, config.max_waiting) == (True, 100, 2000)


def test_engine_keeps_its_own_memory_where_that_is_more_and_the_case_where_it_says_so():
    assert fit(CASE).device_adapter_mb == 256
    assert fit(dataclasses.replace(CASE, device_adapter_mb=3)).device_adapter_mb == 3


@pytest.mark.parametrize(("asked", "wanted"), [(None, False), (True, True), (False, False)])
def test_engine_without_adapters_has_lora_only_where_asked(asked, wanted):
    assert fit(ThroughputCase(enable_lora=asked)).enable_lora is wanted


def test_real_adapters_turn_lora_on_and_their_ranks_count():
    directory = str(PACK / "adapters" / "plain_qv")
    assert fit(ThroughputCase(adapter_dirs=(directory,)), max_lora_rank=1).max_lora_rank > 1
    assert fit(ThroughputCase(adapter_dirs=(directory,))).enable_lora is True


def test_real_adapters_get_room_for_the_projections_they_change():
    directory = str(PACK / "adapters" / "plain_qv")
    case = ThroughputCase(adapter_dirs=(directory,))
    assert fit(case, device_adapter_mb=1).device_adapter_mb == 1
    wide = fit(dataclasses.replace(CASE, adapters=200, adapter_targets="q_proj,v_proj"), device_adapter_mb=1)
    assert wide.device_adapter_mb < fit(dataclasses.replace(CASE, adapters=200), device_adapter_mb=1).device_adapter_mb


def test_two_directories_of_one_name_are_refused():
    path = str(PACK / "adapters" / "plain_qv")
    case = ThroughputCase(adapter_dirs=(path, path))
    with pytest.raises(StartError, match="--adapter_dirs names 'plain_qv' twice"):
        CaseAdapters(case, MODEL)
