"""What a step has to do at least, part by part: bytes that must be read or written once, and operations.

From the plan and the model alone, without any padding: each base weight once a step, the keys and values of each
sequence once, A and B of each adapter in their true ranks once, activations in and out of every part as if they came
from memory.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from launch.benchmarks.step_parts import ATTENTION, adapters_of
from memory_pool.adapter_streams import AdapterFacts
from plora_jax.config import ModelConfig
from plora_jax.engine.plan import Row, StepPlan
from plora_jax.engine.traffic import LAYER_GROUPS
from plora_jax.model import scopes
from plora_jax.model.decoder import PACKED_HEAD


class Work(NamedTuple):
    """Least work of a part.

    Attributes:
        num_bytes: read or written.
        flops: a multiplication and an addition count as two.
    """

    num_bytes: float = 0.0
    flops: float = 0.0


class StepModel(NamedTuple):
    """What the work of a step depends on besides the plan.

    Attributes:
        config: of the base model.
        weight_bytes: as they are kept, by name (`JaxExecutor.weight_bytes`).
        item: bytes of a number of activations.
        adapter_item: bytes of a number of A and B.
        kv_item: bytes of a number of keys and values as it is kept.
    """

    config: ModelConfig
    weight_bytes: Mapping[str, int]
    item: int
    adapter_item: int
    kv_item: float


class PlannedStep(NamedTuple):
    """A step that was carried out.

    Attributes:
        plan: its rows.
        facts: of the adapters in it, by identity.
    """

    plan: StepPlan
    facts: Mapping[int, AdapterFacts]


def planned_step(plan: StepPlan, facts_of: Callable[[int], AdapterFacts]) -> PlannedStep:
    """Takes down what is known of a step only while it is carried out.

    Args:
        plan: of the step.
        facts_of: facts of an adapter in use, by its identity.
    """
    used = {row.sequence.adapter_id for row in plan.rows} - {0}
    return PlannedStep(plan, {adapter: facts_of(adapter) for adapter in used})


def work_of(step: PlannedStep, model: StepModel) -> dict[str, Work]:
    """Least work of a step by part."""
    rows, c, item = step.plan.rows, model.config, model.item
    tokens, sampled = sum(row.count for row in rows), sum(row.decode or row.samples for row in rows)
    heads, layers, norms = c.num_heads + c.num_kv_heads, c.num_layers, 5 if c.post_norms else 3
    found = dict(_products(tokens, model))
    if c.num_experts:
        found[scopes.EXPERTS] = _experts(tokens, model)
    else:
        found[scopes.ACTIVATION] = Work(3.0 * tokens * c.intermediate_size * layers * item)
    found[scopes.EMBED] = Work(2.0 * tokens * c.hidden_size * item)
    found[scopes.NORM] = Work((norms * layers + 1.0) * tokens * c.hidden_size * item)
    found[scopes.ROTARY] = Work(2.0 * tokens * heads * c.head_dim * layers * item)
    found[scopes.KV_WRITE] = Work(1.0 * tokens * _kv_bytes(model))
    head_bytes = next((model.weight_bytes[n] for n in (PACKED_HEAD, "head") if n in model.weight_bytes), None)
    head_bytes = model.weight_bytes["embedding"] if head_bytes is None else head_bytes
    found[scopes.HEAD] = Work(head_bytes + 4.0 * sampled * c.vocab_size, 2.0 * sampled * c.vocab_size * c.hidden_size)
    found[scopes.SAMPLE] = Work(4.0 * sampled * c.vocab_size)
    for phase in ATTENTION:
        of_phase = [row for row in rows if row.decode == (phase == "decode")]
        found[ATTENTION[phase]] = _attention(of_phase, model)
        found[adapters_of(phase)] = _adapters(of_phase, step, model)
    return found


def mean_work(steps: Sequence[PlannedStep], model: StepModel) -> dict[str, Work]:
    """Least work of one of several steps, by part."""
    totals: collections.defaultdict[str, Work] = collections.defaultdict(Work)
    for step in steps:
        for part, work in work_of(step, model).items():
            so_far = totals[part]
            totals[part] = Work(so_far.num_bytes + work.num_bytes, so_far.flops + work.flops)
    return {part: Work(work.num_bytes / len(steps), work.flops / len(steps)) for part, work in totals.items()}


def _products(tokens: int, model: StepModel) -> Iterator[tuple[str, Work]]:
    c = model.config
    for group in LAYER_GROUPS:
        shapes = [c.projections[name] for name in group if name in c.projections]
        if not shapes:
            continue
        width = shapes[0][1] + sum(out for out, _ in shapes)
        weights = sum(model.weight_bytes[name] for name in group)
        numbers = sum(out * width_in for out, width_in in shapes)
        activations = 1.0 * tokens * width * c.num_layers * model.item
        yield scopes.PRODUCTS[group[0]], Work(weights + activations, 2.0 * tokens * numbers * c.num_layers)


def _experts(tokens: int, model: StepModel) -> Work:
    """Experts that the tokens may use, each read once."""
    c = model.config
    numbers = 3 * c.hidden_size * c.intermediate_size * c.num_layers
    weights = sum(model.weight_bytes[name] for name in ("expert_gate", "expert_up", "expert_down"))
    used = min(tokens * c.experts_per_token, c.num_experts) / c.num_experts
    return Work(used * weights, 2.0 * tokens * c.experts_per_token * numbers)


def _attention(rows: Sequence[Row], model: StepModel) -> Work:
    """Keys and values of each sequence once, and every query with all that it sees."""
    c = model.config
    # Query i of a chunk sees all tokens before the chunk, those of it before itself, and itself.
    pairs = sum(row.count * row.start + row.count * (row.count + 1) // 2 for row in rows)
    contexts = sum(row.start + row.count for row in rows)
    return Work(1.0 * contexts * _kv_bytes(model), 4.0 * pairs * c.num_heads * c.head_dim * c.num_layers)


def _kv_bytes(model: StepModel) -> float:
    """Keys and values of one token in all layers."""
    c = model.config
    return 2 * c.num_kv_heads * c.head_dim * c.num_layers * model.kv_item


def _adapters(rows: Sequence[Row], step: PlannedStep, model: StepModel) -> Work:
    """A and B of each adapter once; each token with those of its own."""
    tokens: collections.Counter[int] = collections.Counter()
    for row in rows:
        if row.sequence.adapter_id:
            tokens[row.sequence.adapter_id] += row.count
    numbers = {adapter: step.facts[adapter].a_numbers + step.facts[adapter].b_numbers for adapter in tokens}
    return Work(
        1.0 * sum(numbers.values()) * model.adapter_item,
        2.0 * sum(tokens[adapter] * numbers[adapter] for adapter in tokens),
    )
