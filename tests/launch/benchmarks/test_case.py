"""Cases of the throughput benchmark: presets, flags that cannot be, and the jobs that they stand for."""

from __future__ import annotations

import collections
import itertools
import pathlib
import random

import pytest
from absl import flags as absl_flags

from launch.benchmarks import throughput
from launch.benchmarks.case import PRESETS, ThroughputCase, jobs_of_runs, prompt_ids_range
from launch.flags import StartError
from plora_jax.engine.build import EngineConfig


def parse(*arguments: str) -> absl_flags.FlagValues:
    values = absl_flags.FlagValues()
    throughput.define_flags(values)
    values(["bench", *arguments])
    return values


def test_peers_jobs_are_those_of_the_peers_measurement():
    case, _ = throughput.read_flags(parse("--case=peers-32"))
    runs = jobs_of_runs(case, [f"a{i:04d}" for i in range(case.adapters)], ids_range=prompt_ids_range(case, 49152))
    rng = random.Random(0)
    for _ in range(2):
        jobs = next(runs)
        assert [job.model for job in jobs] == [f"a{i:04d}" for i in range(32)]
        for job in jobs:
            assert job.prompt_ids == [rng.randrange(1000, 40000) for _ in range(128)]
            assert job.new_tokens == 64


def test_adapters_are_drawn_by_a_power_law_that_the_seed_gives():
    case, _ = throughput.read_flags(parse("--adapters=100", "--requests=2000", "--adapter_skew=1"))
    names = [f"a{i:04d}" for i in range(100)]
    first, second = itertools.islice(jobs_of_runs(case, names, ids_range=(0, 9)), 2)
    again = next(jobs_of_runs(case, names, ids_range=(0, 9)))
    counts = collections.Counter(job.model for job in first)
    # The first of 100 has 1 / (1 + 1/2 + ... + 1/100) = 0.193 of the requests, the second half as many.
    assert counts["a0000"] == pytest.approx(0.193 * 2000, rel=0.15)
    assert counts["a0001"] == pytest.approx(0.096 * 2000, rel=0.2)
    assert [job.model for job in first] == [job.model for job in again]
    assert [job.model for job in first] != [job.model for job in second]


@pytest.mark.parametrize(("vocab", "wanted"), [(None, (1000, 40000)), (49152, (1000, 40000)), (256, (0, 256))])
def test_prompt_ids_stay_in_the_vocabulary(vocab, wanted):
    assert prompt_ids_range(ThroughputCase(), vocab) == wanted


def test_preset_gives_way_to_flags():
    case, engine = throughput.read_flags(parse("--case=peers-1", "--requests=8", "--new_tokens=32", "--dtype=float32"))
    assert (case.adapters, case.requests, case.new_tokens, case.prompt_tokens) == (1, 8, 32, 128)
    assert engine == EngineConfig(dtype="float32")
    case, _ = throughput.read_flags(parse("--case=peers-32", "--adapter_dirs=/a"))
    assert (case.adapters, case.directories) == (0, [pathlib.Path("/a")])


def test_every_preset_is_a_valid_case():
    assert {name: PRESETS[name]["adapters"] for name in PRESETS} == {"peers-base": 0, "peers-1": 1, "peers-32": 32}
    for name in PRESETS:
        throughput.read_flags(parse(f"--case={name}"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--case=huge"], "--case 'huge' is unknown; choose peers-base, peers-1, peers-32"),
        (["--requests=0"], "--requests must be at least 1, got 0"),
        (["--adapter_skew=0"], "--adapter_skew must be above 0, got 0.0"),
        (["--runs=0", "--concurrency=0"], "--concurrency must be at least 1, got 0; --runs must be at least 1, got 0"),
        (["--adapters=-1"], "--adapters must be at least 0, got -1"),
        (["--adapter_ranks=8,x"], "--adapter_ranks '8,x' must be whole numbers above 0 with commas"),
        (["--adapter_ranks=0"], "--adapter_ranks '0' must be"),
        (["--adapter_ranks="], "--adapter_ranks '' must be"),
        (["--prompt_id_low=5", "--prompt_id_high=5"], "--prompt_id_low 5 must be below --prompt_id_high 5"),
        (["--adapters=2", "--adapter_dirs=/a"], "--adapter_dirs and --adapters 2 cannot both be"),
        (["--adapters=2", "--noenable_lora"], "--noenable_lora cannot be in a case with adapters"),
        (["--served_model=a"], "--served_model needs --url"),
        (["--output_json=/nowhere/x.json"], "--output_json '/nowhere/x.json' is in a directory that does not exist"),
        (["--url=localhost:8000"], "--url 'localhost:8000' must begin with http:// or https://"),
        (["--url=http://x", "--dtype=float32"], "--dtype has no use with --url"),
        (["--url=http://x", "--adapter_dirs=/a"], "--adapter_dirs has no use with --url"),
        (["--url=http://x", "--case=peers-32"], "the case has 32 adapters and --served_model names 0 models"),
        (["--dtype=int3"], "--dtype must be auto, bfloat16 or float32, got 'int3'"),
    ],
)
def test_flags_that_cannot_be_are_refused_by_name(arguments, says):
    with pytest.raises(StartError) as caught:
        throughput.read_flags(parse(*arguments))
    assert says in str(caught.value)
