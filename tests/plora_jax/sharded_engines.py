"""Run by test_engine_sharded.py in a process with eight devices: engines over shards, judged there.

Every case is one deployment. Its adapters and the base model are served together, round after round by other
strategies, with KV pages that leave the device as soon as they are full. Prints one JSON object: by case its rounds,
what it was refused with, and the link bytes of steps as they were declared and as they were counted.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections import Counter
from typing import NamedTuple

import jax

from memory_pool.auditing import AuditedProgram
from plora_jax.engine import SamplingParams
from plora_jax.engine.build import Deployment
from plora_jax.engine.compile import use_persistent_cache
from plora_jax.engine.engine import Engine
from plora_jax.engine.plan import RowResult, StepPlan
from plora_jax.engine.step import make_step
from strategies.strategy_table import ATTENTION, LORA
from tests.plora_jax.conformance import PACK, adapters_of, deploy, engine_over, golden
from tests.plora_jax.test_step import Auditor, prefer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
STRIPED = {"pool_devices": 2, "pool_placement": "striped"}
AUDITED = ("all_linear", "rank48", "embed_head_lora", "plain_qv", "gemma2_all")
ROUNDS = [("resident", "local"), ("fetch", "distributed"), ("near_data", "local"), ("split", "distributed")]
OTHERS = [("resident", "distributed"), ("fetch", "local"), ("near_data", "distributed"), ("split", "local")]


class Case(NamedTuple):
    """One deployment.

    Attributes:
        model: of the pack.
        shards: tensor_parallel_size.
        options: of its `EngineConfig`.
        rounds: LoRA and attention strategies that are forced, one after the other.
        audited: whether every step of a round of mixed strategies is audited.
    """

    model: str
    shards: int
    options: dict
    rounds: list[tuple[str, str]] = ROUNDS
    audited: bool = False


CASES = {
    "llama 8": Case("llama", 8, {}, ROUNDS + OTHERS, audited=True),
    "gemma2 8 striped": Case("gemma2", 8, STRIPED, audited=True),
    "mixtral 4": Case("mixtral", 4, {"pool_devices": 3}),
    "mistral_window 4": Case("mistral_window", 4, {}),
    "qwen2_bias 2": Case("qwen2_bias", 2, {}),
    "qwen3 2": Case("qwen3", 2, {}),
    "llama31_rope 4": Case("llama31_rope", 4, {}),
}


class Watcher:
    """An executor that notes by which strategies the adapters of its steps are served."""

    def __init__(self, inner) -> None:
        self.inner, self.strategies = inner, set()

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def execute(self, plan: StepPlan) -> list[RowResult]:
        owners = {row.sequence.adapter_id for row in plan.rows} - {0}
        self.strategies |= {self.inner._placed(adapter_id).strategy for adapter_id in owners}
        return self.inner.execute(plan)


def run(case: Case) -> dict:
    """Builds a case and serves its rounds."""
    first, _ = case.rounds[0]
    sizes = {"page_tokens": 4, "max_num_batched_tokens": 16, "tensor_parallel_size": case.shards}
    built = deploy(case.model, lora_strategy=first, **sizes, **case.options)
    adapters = built.adapters
    assert adapters is not None
    built.kv._most_copies = 0
    names = copies(case.model)
    watcher = Watcher(built.executor)
    engine = engine_over(built, watcher, chunk=16)
    for name in names:
        engine.load_adapter(name, folder_of(name))
    found: dict = {"devices": len(built.memory.pool.sharding.device_set), "kv_heads": built.memory.layout.kv_heads}
    rounds = {}
    for lora, attention in case.rounds:
        adapters._preferred = (lora,)
        built.executor._attention_of = lambda _, attention=attention: attention
        rounds[f"{lora} {attention}"] = serve(built, engine, watcher, names, prompt=2)
    mix(built, engine, names, turn=0)
    rounds["mixed mixed"] = serve(built, engine, watcher, names, prompt=3)
    found |= {"rounds": rounds, "fallbacks": adapters.fallbacks, "ahead": serve_ahead(built)}
    if case.audited:
        found["audit"] = audit(built, names)
        found["control"] = control_bytes(built)
    adapters.check_integrity()
    return found


def copies(model: str) -> list[str]:
    """Names for the adapters of a model, and for further loads of them, at least one for every strategy."""
    packed = adapters_of(model)
    return [f"{name}#{i}" for i in range(-(-len(LORA) // len(packed))) for name in packed]


def folder_of(name: str) -> str:
    return str(PACK / "adapters" / name.split("#")[0])


def serve(built: Deployment, engine: Engine, watcher: Watcher, loaded: list[str], *, prompt: int) -> dict:
    """One prompt for every adapter and the base model: wrong tokens, and the strategies that were at work."""
    model = built.config.model.rpartition("/")[2]
    names = [None, *loaded]
    watcher.strategies, before = set(), attention_bytes(built)
    goldens = [golden(name and name.split("#")[0], model) for name in names]
    outputs = engine.generate([g[f"prompt_{prompt}"].tolist() for g in goldens], GREEDY, adapters=names)
    pairs = zip(names, goldens, outputs, strict=True)
    wrong = [name or "base" for name, g, (c,) in pairs if list(c.token_ids) != g[f"greedy_{prompt}"].tolist()]
    moved = attention_bytes(built) - before
    return {"wrong": wrong, "lora": sorted(watcher.strategies), "attention": sorted(moved)}


def serve_ahead(built: Deployment) -> dict:
    """The base model's prompts, with steps begun ahead: wrong tokens, and how many steps were begun so."""
    known, engine = golden(None, built.config.model.rpartition("/")[2]), engine_over(built, built.executor, chunk=16)
    engine._loop._may_run_ahead = lambda: True
    begin, begun = built.executor.begin, []
    built.executor.begin = lambda plan: begun.append(plan) or begin(plan)
    asked = [engine.submit(known[f"prompt_{prompt}"].tolist(), GREEDY) for prompt in (2, 3)]
    found = {prompt: list(generation.collect()[0].token_ids) for prompt, generation in zip((2, 3), asked, strict=True)}
    del built.executor.begin
    wrong = [prompt for prompt, tokens in found.items() if tokens != known[f"greedy_{prompt}"].tolist()]
    return {"wrong": wrong, "begun": len(begun)}


def attention_bytes(built: Deployment) -> Counter:
    """Bytes that attention moved within steps, by strategy."""
    totals = Counter()
    for crossing, size in built.ledger.totals().items():
        if crossing.strategy in ATTENTION and crossing.phase in ("decode", "prefill"):
            totals[crossing.strategy] += size.moved
    return totals


def mix(built: Deployment, engine: Engine, names: list[str], *, turn: int) -> None:
    """Serves neighbours in a batch by different strategies from now on."""
    kinds = list(LORA)
    prefer(built, engine, {name: kinds[(i + turn) % len(kinds)] for i, name in enumerate(names)})
    built.executor._attention_of = lambda sequence: list(ATTENTION)[(sequence.seq_id + turn) % 2]


def audit(built: Deployment, names: list[str]) -> dict:
    """Steps of mixed traffic, each counted from its program and compared with what is declared (`Auditor`)."""
    auditor = Auditor(built)
    engine = engine_over(built, auditor, chunk=8)
    audited = [name for name in names if name.split("#")[0] in AUDITED]
    for name in audited:
        engine.load_adapter(name, folder_of(name))
    prompts = [[*range(5, 15), i] for i in range(len(audited) + 1)]
    for turn in range(len(LORA)):
        mix(built, engine, audited, turn=turn)
        engine.generate(prompts, SCORED, adapters=[None, *audited])
    steps = [counted for _, counted in auditor.checked]
    return {
        "steps": len(steps),
        "to_device": sum(step.to_device for step in steps),
        "to_pool": sum(step.to_pool for step in steps),
        "seen": sorted({f"{strategy} {phase}" for _, strategy, phase in auditor.seen}),
    }


def control_bytes(built: Deployment) -> list[tuple[int, int]]:
    """For each bucket the bytes of an empty step's tables: those that the executor told the ledger, and the audit's."""
    executor, pairs = built.executor, []
    for bucket, program in executor.programs.items():
        empty = program.builder.build(StepPlan(()), placed=executor._placed)
        executor._sent.clear()
        before = told_control(built)
        executor.send(bucket, empty)
        step = make_step(
            executor.decoder,
            executor._dtype,
            built.memory.mesh,
            setting=executor.setting,
            packing=program.packing,
            param_specs=executor.param_specs,
        )
        args = executor.abstract_args(empty, program.packing)
        counted = AuditedProgram(step, *args, control_args=[5]).count(program.traffic.loop_counts(empty.use))
        pairs.append((told_control(built) - before, counted.to_pool))
    return pairs


def told_control(built: Deployment) -> int:
    totals = built.ledger.totals().items()
    return sum(size.moved for crossing, size in totals if (crossing.object, crossing.phase) == ("control", "step"))


def refusals() -> dict[str, str]:
    """What builds say that cannot be."""
    found = {}
    for model, shards in (("llama", 3), ("qwen3_moe", 5), ("llama", 16)):
        try:
            deploy(model, tensor_parallel_size=shards)
        except ValueError as error:
            found[f"{model} {shards}"] = str(error)
    return found


def main(wanted: list[str]) -> None:
    if cache := jax.config.values["jax_compilation_cache_dir"]:
        use_persistent_cache(cache)
    found: dict = {"refused": refusals()}
    for name in wanted or CASES:
        try:
            found[name] = run(CASES[name])
        except Exception:
            found[name] = {"error": traceback.format_exc()[-3000:]}
        # An engine is a cycle of objects with a large pool, and traced programs slow down every later collection.
        jax.clear_caches()
        gc.collect()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
