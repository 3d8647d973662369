"""python -m launch.bench memory: what one more adapter costs, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from rich.console import Console

from launch.benchmarks.machine import resident_bytes
from launch.benchmarks.memory import MemoryCase, run_memory
from launch.console import StageLog
from launch.flags import StartError
from plora_jax.checkpoints import load_config
from tests.launch.small_engine import LLAMA, small_config

CASE = MemoryCase(adapters="0,2,12", adapter_ranks="4,8", requests=4, prompt_tokens=12, new_tokens=8, runs=1)


def quiet() -> StageLog:
    return StageLog(Console(quiet=True))


def test_one_more_adapter_costs_the_pages_of_its_true_rank():
    report = run_memory(CASE, small_config(), command="python -m launch.bench memory --x", log=quiet())
    got = json.loads(json.dumps(report.as_json()))
    assert [p["adapters"] for p in got["points"]] == [0, 2, 12]
    shapes = load_config(LLAMA).projections.values()
    numbers = load_config(LLAMA).num_layers * sum(out + width for out, width in shapes)
    # float32, ranks 4 and 8 in turn.
    assert [p["true_bytes"] for p in got["points"]] == [0, 4 * 12 * numbers, 4 * 72 * numbers]
    assert got["one_more_adapter"]["true_bytes"] == 4 * 6 * numbers
    first, _, last = got["points"]
    assert first["pool_bytes"] == 0
    assert last["true_bytes"] <= last["pool_bytes"]
    assert (first["used"], first["used_step_s"], last["used"]) == (0, None, 4)
    assert all(p["base_step_s"] > 0 and p["resident_bytes"] > 10**7 for p in got["points"])
    text = report.as_text()
    for pattern in (
        r"^ +adapters +true +pool +device +resident +base step +used +their step$",
        r"^ +0 +0 B +0 B +0 B +[\d.]+ [MG]B +[\d.]+ +0 +-$",
        r"^ +12 .* +4 +[\d.]+$",
        r"^one more adapter +.* true, .* pool, .* device, .* resident; pool over true \d\.\d\d$",
        r"^command +python -m launch\.bench memory --x$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern} is not in\n{text}"


def test_true_bytes_of_int8_adapters_are_one_a_number():
    case = dataclasses.replace(CASE, adapters="0,2", requests=2)
    report = run_memory(case, small_config(lora_dtype="int8"), command="", log=quiet())
    config = load_config(LLAMA)
    numbers = config.num_layers * sum(out + width for out, width in config.projections.values())
    last = report.points[-1]
    assert last.true_bytes == 12 * numbers
    assert last.true_bytes <= last.pool_bytes < 2 * last.true_bytes


def test_pool_that_is_too_small_is_refused_with_what_to_change():
    with pytest.raises(StartError, match=r"does not fit: .* raise --pool_memory_gb"):
        run_memory(
            MemoryCase(adapters="40", adapter_ranks="64", runs=1),
            small_config(pool_memory_gb=0.001),
            command="",
            log=quiet(),
        )


def test_resident_bytes_are_not_known_everywhere(tmp_path):
    assert resident_bytes() > 10**6
    assert resident_bytes(tmp_path / "nothing") == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"adapters": "10,2"}, "--adapters '10,2' must be whole numbers in rising order, such as 0,10,100"),
        ({"adapters": "x"}, "--adapters 'x' must be whole numbers in rising order"),
        ({"new_tokens": 1, "runs": 0}, "--new_tokens must be at least 8, got 1; --runs must be at least 1, got 0"),
        ({"output_json": "/nowhere/x.json"}, "--output_json '/nowhere/x.json' is in a directory that does not exist"),
        ({"adapter_ranks": "a"}, "--adapter_ranks 'a' must be whole numbers above 0"),
        ({"adapter_targets": "x_proj"}, "--adapter_targets 'x_proj' names no projection of this model"),
    ],
)
def test_case_that_cannot_be_measured_is_refused(options, says):
    with pytest.raises(StartError) as caught:
        run_memory(MemoryCase(**options), small_config(), command="", log=quiet())
    assert says in str(caught.value)
