"""The step as a program: its link bytes are those declared, whatever the lanes hold, and it has no large constants."""

import jax
import numpy as np
import pytest

from memory_pool.auditing import AuditedProgram
from plora_jax.engine import SamplingParams
from plora_jax.engine.buckets import pick_bucket
from plora_jax.engine.plan import StepPlan
from plora_jax.engine.step import make_step
from tests.plora_jax.conformance import PACK, deploy, engine_over, golden

MODEL = "llama"
ADAPTERS = ("all_linear", "rank48", "embed_head_lora", "plain_qv")
STRATEGIES = ("resident", "near_data", "split", "fetch")


class Auditor:
    """An executor that audits each step before it runs it.

    Attributes:
        checked: link bytes of each step, to_device and to_pool.
    """

    def __init__(self, deployment):
        self.deployment, self.inner = deployment, deployment.executor
        self.checked = []
        self.seen = set()
        self._programs = {}

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def execute(self, plan):
        inner, memory = self.inner, self.deployment.memory
        bucket, built = self.build(plan)
        program = inner.programs[bucket]
        if bucket not in self._programs:
            step = make_step(
                inner.decoder,
                inner._dtype,
                memory.mesh,
                setting=inner.setting,
                packing=program.packing,
                param_specs=inner.param_specs,
            )
            self._programs[bucket] = AuditedProgram(step, *inner.abstract_args(built, program.packing))
        counted = self._programs[bucket].count(program.traffic.loop_counts(built.use))
        declared = {"to_device": 0, "to_pool": 0}
        for crossing, size in program.traffic.of(built.use):
            assert 0 <= size.useful <= size.moved, (crossing, size)
            declared[crossing.direction] += size.moved
            self.seen.add((crossing.object, crossing.strategy, crossing.phase))
        assert (counted.to_device, counted.to_pool) == (declared["to_device"], declared["to_pool"]), built.use
        self.checked.append((bucket, counted))
        return inner.execute(plan)

    def build(self, plan):
        bucket = pick_bucket(self.inner.buckets, plan)
        return bucket, self.inner.programs[bucket].builder.build(plan, placed=self.inner._placed)


@pytest.mark.parametrize("options", [{}, {"pool_devices": 3, "pool_placement": "striped"}], ids=["pinned", "striped"])
def test_ledger_equals_audit_for_every_step_of_mixed_traffic(options):
    built = deploy(MODEL, page_tokens=4, **options)
    auditor = Auditor(built)
    engine = engine_over(built, auditor, chunk=8)
    built.kv._most_copies = 0
    built.executor._attention_of = lambda seq: ("local", "distributed")[seq.seq_id % 2]
    for name in ADAPTERS:
        engine.load_adapter(name, str(PACK / "adapters" / name))
    served = []
    for rotation in range(len(STRATEGIES)):
        order = {name: STRATEGIES[(i + rotation) % len(STRATEGIES)] for i, name in enumerate(ADAPTERS)}
        prefer(built, engine, order)
        prompts = [[*golden(None, MODEL)[f"prompt_{i % 4}"].tolist(), 7] for i in range(5)]
        asked = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
        served.append([c[0].token_ids for c in engine.generate(prompts, asked, adapters=[None, *ADAPTERS])])
    assert all(tokens == served[0] for tokens in served), "a strategy changed the tokens"
    assert {strategy for _, strategy, _ in auditor.seen} >= {"near_data", "split", "fetch", "local", "distributed"}
    assert {phase for *_, phase in auditor.seen} == {"decode", "prefill", "embed", "head", "prompt"}
    assert sum(traffic.to_device for _, traffic in auditor.checked) > 0


def prefer(built, engine, order):
    """Serves adapters by the strategies of `order` from their next use on."""
    pool = built.adapters
    identities = {engine._table.use(name, 0): name for name in order}

    def strategy_now(adapter_id, entry):
        return order[identities[adapter_id]]

    for adapter_id in identities:
        pool._leave_device(adapter_id, pool._entries[adapter_id])
    pool._preferred, pool._strategy_now = STRATEGIES, strategy_now


def test_step_without_adapters_and_with_all_pages_on_the_device_moves_nothing():
    built = deploy(MODEL)
    auditor = Auditor(built)
    engine = engine_over(built, auditor, chunk=None)
    engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(auditor.checked) == 3
    assert all(traffic.to_device == traffic.to_pool == 0 for _, traffic in auditor.checked)


def test_step_closes_over_no_large_constant():
    built = deploy("llama")
    executor = built.executor
    bucket = executor.buckets[-1]
    program = executor.programs[bucket]
    empty = program.builder.build(StepPlan(()), placed=executor._placed)
    step = make_step(
        executor.decoder,
        np.float32,
        built.memory.mesh,
        setting=executor.setting,
        packing=program.packing,
        param_specs=executor.param_specs,
    )
    closed = jax.make_jaxpr(step)(*executor.abstract_args(empty, program.packing))
    assert sum(np.asarray(c).nbytes for c in closed.consts) < 4096
