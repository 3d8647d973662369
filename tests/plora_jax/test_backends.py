"""Engines on backends that lack something: near-data compute, or host memory. The tokens are the same."""

import contextlib

import jax
import pytest

from memory_pool import audit_rules
from memory_pool.probe import ProbeReport
from plora_jax.engine import SamplingParams, build
from plora_jax.engine.engine_config import EngineConfig
from plora_jax.engine.near_guard import backend_problems
from plora_jax.engine.plan import StepPlan
from plora_jax.engine.step import make_step
from tests.plora_jax.conformance import PACK, deploy, engine_over, golden
from tests.plora_jax.test_step import ADAPTERS, MODEL, Auditor

LIMITED = {"no compute": ("PLORA_NEAR_DATA", "0"), "no host memory": ("PLORA_POOL", "device")}
AUTO = {"lora_strategy": "auto", "attention_strategy": "auto", "hardware": "cpu", "page_tokens": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
NOTHING_NEAR = ProbeReport(
    platform="gpu", memory_kinds=("device", "pinned_host"), problem="XlaRuntimeError: no host compute", call_s=None
)


@pytest.fixture(scope="module", params=LIMITED)
def limited(request):
    """A deployment on such a backend, and the engine of an executor that audits each of its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*LIMITED[request.param])
        built = deploy(MODEL, **AUTO)
        auditor = Auditor(built)
        engine = engine_over(built, auditor, chunk=8)
        built.kv.keep(0)
        built.adapters._while_all_fit = ()
        for name in ADAPTERS:
            engine.load_adapter(name, str(PACK / "adapters" / name))
        yield request.param, built, engine, auditor


def primitives(program):
    for eqn in audit_rules.bare(program).eqns:
        yield eqn.primitive.name
        for inner in audit_rules.inner_programs(eqn):
            yield from primitives(inner)


def test_limited_backend_gives_the_golden_tokens_and_its_ledger_equals_the_audit(limited):
    lacks, built, engine, auditor = limited
    for name in (None, *ADAPTERS):
        data = golden(name, MODEL)
        prompts = [data[f"prompt_{i}"].tolist() for i in range(4)]
        answers = engine.generate(prompts, GREEDY, adapters=[name] * 4)
        assert [list(a[0].token_ids) for a in answers] == [data[f"greedy_{i}"][:6].tolist() for i in range(4)], name
    strategies = {strategy for _, strategy, _ in auditor.seen}
    assert strategies == ({"fetch", "local"} if lacks == "no compute" else {"near_data", "distributed"})
    assert {phase for *_, phase in auditor.seen} == {"decode", "prefill", "embed", "head", "prompt"}
    assert sum(traffic.to_device for _, traffic in auditor.checked) > 0
    control = sum(size.moved for crossing, size in built.ledger.totals().items() if crossing.object == "control")
    assert bool(control) == (lacks == "no host memory"), "page tables go to the pool where something computes there"


def test_limited_backend_compiles_no_near_data_phase(limited):
    lacks, built, *_ = limited
    executor = built.executor
    for bucket in (executor.buckets[0], executor.buckets[-1]):
        program = executor.programs[bucket]
        empty = program.builder.build(StepPlan(()), placed=executor._placed)
        step = make_step(
            executor.decoder,
            executor._dtype,
            built.memory.mesh,
            setting=executor.setting,
            packing=program.packing,
            param_specs=executor.param_specs,
        )
        names = set(primitives(jax.make_jaxpr(step)(*executor.abstract_args(empty, program.packing))))
        assert "compute_on" not in names
        assert ("device_put" in names) == (lacks == "no compute")


def test_limited_backend_reports_a_unit_that_failed_only_where_nothing_computes(limited):
    lacks, built, engine, _ = limited
    if lacks == "no host memory":
        assert (built.near_data.failure, built.near_data.failures) == (None, 0)
        assert built.memory.pool.sharding.memory_kind == "device"
        return
    reason = "at start: NotImplementedError: switched off by PLORA_NEAR_DATA=0"
    assert (built.near_data.failure, built.near_data.failures) == (reason, 1)
    assert {status.strategy for status in engine.adapters()} <= {"fetch", "resident"}
    assert built.memory.pool.sharding.memory_kind == "pinned_host"


def test_start_without_near_data_compute_warns(monkeypatch, caplog):
    """The warning comes before programs are compiled, of which this test needs none."""

    class Compiled(Exception):
        pass

    def stop(*args, **options):
        raise Compiled

    monkeypatch.setattr(build, "probe", lambda: NOTHING_NEAR)
    monkeypatch.setattr(build, "JaxExecutor", stop)
    with contextlib.suppress(Compiled):
        deploy(MODEL, **AUTO)
    assert (
        "near-data compute has failed (at start: XlaRuntimeError: no host compute): adapters served by near_data and "
        "split are fetched and KV in the pool is attended to on the device from here on"
    ) in caplog.text


@pytest.mark.parametrize("lora", ["near_data", "split"])
def test_forced_strategies_that_compute_near_the_data_are_refused_where_nothing_does(lora, monkeypatch):
    monkeypatch.setattr(build, "probe", lambda: NOTHING_NEAR)
    with pytest.raises(ValueError, match="--lora_strategy") as caught:
        deploy(MODEL, lora_strategy=lora, attention_strategy="distributed")
    assert str(caught.value) == (
        f"--lora_strategy {lora} computes near the data, which does not work on this gpu (XlaRuntimeError: no host "
        "compute): choose one of auto, resident, fetch; --attention_strategy distributed computes near the data, which "
        "does not work on this gpu (XlaRuntimeError: no host compute): choose one of auto, local"
    )


@pytest.mark.parametrize("lora", ["auto", "resident", "fetch"])
@pytest.mark.parametrize("attention", ["auto", "local"])
def test_strategies_that_read_the_pool_are_allowed_where_nothing_computes_there(lora, attention):
    config = EngineConfig(lora_strategy=lora, attention_strategy=attention)
    assert backend_problems(config, NOTHING_NEAR) == []


def test_pool_that_cannot_be_read_at_all_is_refused_with_what_to_do(monkeypatch):
    report = ProbeReport(
        platform="gpu", memory_kinds=("pinned_host",), problem="E: near", call_s=None, no_copies="E: copies"
    )
    monkeypatch.setattr(build, "probe", lambda: report)
    with pytest.raises(ValueError, match="cannot read the pool") as caught:
        deploy(MODEL, **AUTO)
    assert str(caught.value) == (
        "this machine's accelerator cannot read the pool (gpu: memory kinds pinned_host; near-data functions do not "
        "work: E: near; nor can what is in the pool be copied to the device: E: copies; the link is real): set "
        "PLORA_POOL=device to keep the pool in device memory, or use JAX_PLATFORMS=cpu"
    )
