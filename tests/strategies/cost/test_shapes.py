"""Shapes of base models: weights to the last matrix, experts, windows, shards."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.cost import transformer
from strategies.cost.shapes import count_windows, distinct
from tests.strategies.cost.models import dims, model


@pytest.mark.parametrize("name", dims())
def test_weights_of_a_shape_are_the_published_parameters(name):
    """All but norms and biases: 0.03 % at most, of the smallest."""
    row, shape = dims()[name], model(name)
    embedding = 0 if row["tie"] else row["vocab"] * row["hidden"]
    assert shape.base_numbers + embedding == pytest.approx(row["params"], rel=3e-4)
    active = sum(p.layers * (p.base_numbers + p.chosen * p.expert_numbers) for p in shape.phases)
    assert active + embedding == pytest.approx(row["active_params"], rel=3e-4)


def test_projections_are_narrow_for_grouped_keys_and_wide_for_the_mlp():
    shape = model("Llama-3-8B")
    widths = {m.name: (m.inputs, m.outputs) for m in shape.matrices}
    assert widths["q_proj"] == (4096, 4096)
    assert widths["k_proj"] == widths["v_proj"] == (4096, 1024)
    assert widths["down_proj"] == (14336, 4096)
    assert [p.name for p in shape.phases] == ["qkv", "attention", "o", "gate_up", "down", "head"]
    assert shape.attention.kv_numbers == 2 * 8 * 128


def test_experts_have_adapters_only_where_they_are_asked_for():
    assert "expert_down" not in model("Mixtral-8x7B").names
    assert model("Mixtral-8x7B", expert_adapters=True).names[-3:] == ("expert_gate", "expert_up", "expert_down")


def test_latent_attention_keeps_one_vector_for_all_heads():
    attention = model("DeepSeek-V3 671B").attention
    assert (attention.kv_numbers, attention.score_dim, attention.value_dim) == (576, 576, 512)


def test_distinct_experts_are_those_that_chance_hits():
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(5) for e in rng.choice(16, 2, replace=False)}) for _ in range(4000)]
    assert distinct(np.array(5.0), 16, 2) == pytest.approx(np.mean(drawn), rel=0.01)
    assert distinct(np.array([0.0, 0.25, 1.0, 1e6]), 16, 2) == pytest.approx([0, 0.5, 2, 16])
    assert distinct(np.array([0.0, 0.25, 1.0, 7.0]), 1, 1) == pytest.approx([0, 0.25, 1, 1])


def test_base_of_experts_reads_those_that_are_hit_and_computes_those_that_are_chosen():
    shape = model("Mixtral-8x7B")
    phase = next(p for p in shape.phases if p.name == "expert_down")
    expert = 4096 * 14336
    assert phase.base_read(1) == pytest.approx(32 * 2 * expert)
    assert phase.base_read(1e6) == pytest.approx(32 * 8 * expert)
    assert phase.base_flops(3) == pytest.approx(2 * 3 * 32 * 2 * expert)


def test_windows_are_counted_by_layers():
    assert count_windows([8, None, 8], 3) == ((2, 8), (1, None))
    assert model("Gemma-2-2b").attention.windows == ((13, 4096), (13, None))
    with pytest.raises(ValueError, match="windows has 2 entries, the model 3 layers: give one for each layer"):
        count_windows([8, None], 3)


def test_shards_divide_matrices_on_their_own_side_and_repeat_kv_heads():
    shape = model("Llama-3-8B").shard(16)
    widths = {m.name: (m.inputs, m.outputs) for m in shape.matrices}
    assert widths["q_proj"] == (4096, 256)
    assert widths["o_proj"] == (256, 4096)
    assert widths["down_proj"] == (896, 4096)
    assert (shape.attention.heads, shape.attention.kv_numbers) == (2, 2 * 128)
    assert shape.base_numbers == pytest.approx(model("Llama-3-8B").base_numbers / 16)
    with pytest.raises(ValueError, match="3 shards do not divide the 32 query heads of Llama-3-8B"):
        model("Llama-3-8B").shard(3)


def test_nominal_size_scales_every_phase():
    shape = model("Llama-2-7b")
    nominal = shape.scaled_to(7e9)
    assert nominal.base_numbers == pytest.approx(7e9)
    ratios = [
        n.base_numbers / p.base_numbers for n, p in zip(nominal.phases, shape.phases, strict=True) if p.base_numbers
    ]
    assert ratios == pytest.approx([ratios[0]] * 5)


def test_transformer_takes_windows_by_layer():
    sizes = {"hidden": 8, "intermediate": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 4, "vocab": 10}
    assert transformer("tiny", windows=[3, None], **sizes).attention.windows == ((1, 3), (1, None))
