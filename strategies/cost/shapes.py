"""A base model as a cost model sees it: the phases of a step, their matrices, their weights, its attention.

The phases of all layers are taken together: qkv of all layers, attention of all layers, and so on. Matrices of one
phase read the same input. Experts are copies of a phase's matrices of which a token takes some. Numbers are of one
shard.

Projections outside the layers (embedding and head) have base weights here but no adapters.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

Cut = Literal["outputs", "inputs", "whole"]


class Matrix(NamedTuple):
    """A matrix that adapters may change.

    Attributes:
        name: of the projection; unique in a model.
        inputs: I.
        outputs: O.
        cut: which side tensor parallelism divides.
    """

    name: str
    inputs: int
    outputs: int
    cut: Cut = "outputs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseShape:
    """What the layers do between two points where everything waits.

    Attributes:
        name: of the phase.
        layers: how many have it.
        matrices: that adapters may change; they read the same input.
        base_numbers: weights of one layer that all tokens read.
        expert_numbers: weights of one expert.
        experts: copies of the matrices and of `expert_numbers`; 1 where there is no choice.
        chosen: experts of a token.
        input_rows: rows of input of a token: `chosen` where every expert has its own.
    """

    name: str
    layers: int
    matrices: tuple[Matrix, ...] = ()
    base_numbers: float = 0.0
    expert_numbers: float = 0.0
    experts: int = 1
    chosen: int = 1
    input_rows: int = 1

    @property
    def inputs(self) -> int:
        """I of the matrices; 0 without any."""
        return self.matrices[0].inputs if self.matrices else 0

    def base_read(self, tokens: float) -> float:
        """Base weights that a step of so many tokens reads, all layers, as a number of weights."""
        hit = distinct(np.asarray(tokens, float), self.experts, self.chosen)
        return self.layers * (min(tokens, 1.0) * self.base_numbers + float(hit) * self.expert_numbers)

    def base_flops(self, tokens: float) -> float:
        """FLOPs of base weights, all layers."""
        return 2 * tokens * self.layers * (self.base_numbers + self.chosen * self.expert_numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Attention of all layers.

    Attributes:
        heads: N, query heads.
        kv_heads: that tensor parallelism can divide.
        score_dim: numbers of a query head and of a key.
        value_dim: numbers of the output of a head.
        kv_numbers: kept for a token in one layer: 2 K H, or the latent vector that all heads share.
        windows: (layers, tokens that a query sees there, None for all).
        kv_item_bytes: of a number that is kept, its part of a scale included; None for that of the model.
    """

    heads: int
    kv_heads: int
    score_dim: int
    value_dim: int
    kv_numbers: int
    windows: tuple[tuple[int, int | None], ...]
    kv_item_bytes: float | None = None

    @property
    def layers(self) -> int:
        return sum(layers for layers, _ in self.windows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A base model.

    Attributes:
        name: for calibrated steps and reports.
        phases: in the order of a step.
        attention: of the phase named "attention".
        item_bytes: of a number of activations, and of weights, adapters and KV unless the next two or `attention` say
            otherwise.
        weight_bytes: of a number of base weights that are kept in another precision; None for `item_bytes`.
        lora_item_bytes: of a number of A and B that are kept in another precision; None for `item_bytes`.
    """

    name: str
    phases: tuple[PhaseShape, ...]
    attention: AttentionShape
    item_bytes: int = 2
    weight_bytes: float | None = None
    lora_item_bytes: int | None = None

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Projections that adapters may change: the columns J of rank tables."""
        return tuple(matrix.name for phase in self.phases for matrix in phase.matrices)

    @functools.cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """In the order of `names`."""
        return tuple(matrix for phase in self.phases for matrix in phase.matrices)

    @functools.cached_property
    def phase_of(self) -> np.ndarray:
        """[J] index of each projection's phase."""
        return np.array([f for f, phase in enumerate(self.phases) for _ in phase.matrices], int)

    @functools.cached_property
    def attention_phase(self) -> int:
        """Index of attention."""
        return next(f for f, phase in enumerate(self.phases) if phase.name == "attention")

    @property
    def kv_bytes(self) -> float:
        """Kept for a token in one layer."""
        item = self.attention.kv_item_bytes
        return self.attention.kv_numbers * (self.item_bytes if item is None else item)

    @property
    def bytes_of_weight(self) -> float:
        """Bytes of a number of base weights."""
        return self.weight_bytes or self.item_bytes

    @property
    def bytes_of_lora(self) -> int:
        """Bytes of a number of A and B."""
        return self.lora_item_bytes or self.item_bytes

    @property
    def base_numbers(self) -> float:
        """All base weights but the embedding."""
        return sum(p.layers * (p.base_numbers + p.experts * p.expert_numbers) for p in self.phases)

    def scaled_to(self, parameters: float) -> ModelShape:
        """The same shapes with base weights of so many numbers, such as a nominal 7e9."""
        factor = parameters / self.base_numbers
        phases = tuple(
            dataclasses.replace(p, base_numbers=p.base_numbers * factor, expert_numbers=p.expert_numbers * factor)
            for p in self.phases
        )
        return dataclasses.replace(self, phases=phases)

    def shard(self, shards: int) -> ModelShape:
        """What one of several tensor-parallel shards has; what they exchange is not counted.

        Raises:
            ValueError: they do not divide the query heads.
        """
        attention = self.attention
        if shards < 1 or attention.heads % shards:
            raise ValueError(f"{shards} shards do not divide the {attention.heads} query heads of {self.name}")
        kept = math.ceil(attention.kv_heads / shards)
        part = dataclasses.replace(
            attention,
            heads=attention.heads // shards,
            kv_heads=kept,
            kv_numbers=attention.kv_numbers * kept // attention.kv_heads,
        )
        phases = tuple(
            dataclasses.replace(
                phase,
                matrices=tuple(_cut(matrix, shards) for matrix in phase.matrices),
                base_numbers=phase.base_numbers / shards,
                expert_numbers=phase.expert_numbers / shards,
            )
            for phase in self.phases
        )
        return dataclasses.replace(self, phases=phases, attention=part)


def distinct(tokens: np.ndarray, experts: int, chosen: int) -> np.ndarray:
    """Expected experts that tokens hit when each takes `chosen` of them by chance.

    Args:
        tokens: any shape; below 1 it is the chance that there is one.
        experts: how many there are.
        chosen: of a token.
    """
    if experts == 1:
        return np.minimum(tokens, 1.0)
    missed = (1 - chosen / experts) ** np.maximum(tokens, 1.0)
    return np.minimum(tokens, 1.0) * experts * (1 - missed)


def transformer(
    name: str,
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    windows: Sequence[int | None] = (),
    experts: int = 0,
    experts_per_token: int = 0,
    shared_experts: int = 0,
    expert_intermediate: int | None = None,
    dense_layers: int = 0,
    expert_adapters: bool = False,
    item_bytes: int = 2,
    kv_item_bytes: float | None = None,
) -> ModelShape:
    """A decoder with grouped-query attention.

    Args:
        name: of the model.
        hidden: D.
        intermediate: F of a dense MLP.
        layers: L.
        heads: N.
        kv_heads: K.
        head_dim: H.
        vocab: V.
        windows: by layer, tokens that a query sees; empty for all of them everywhere.
        experts: E; 0 for a dense MLP.
        experts_per_token: that a token is routed to.
        shared_experts: that every token takes beside them.
        expert_intermediate: F of an expert; None for `intermediate`.
        dense_layers: the first layers, which have a dense MLP beside models of experts.
        expert_adapters: adapters may change the experts' matrices, each expert's on its own.
        item_bytes: of a number.
        kv_item_bytes: of a number of KV, its part of a scale included; None for `item_bytes`.
    """
    wide, narrow = heads * head_dim, kv_heads * head_dim
    qkv = (Matrix("q_proj", hidden, wide), Matrix("k_proj", hidden, narrow), Matrix("v_proj", hidden, narrow))
    attention = AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        score_dim=head_dim,
        value_dim=head_dim,
        kv_numbers=2 * narrow,
        windows=count_windows(windows, layers),
        kv_item_bytes=kv_item_bytes,
    )
    mlp = mlp_phases(
        hidden,
        intermediate,
        layers,
        experts=experts,
        experts_per_token=experts_per_token,
        shared_experts=shared_experts,
        expert_intermediate=expert_intermediate or intermediate,
        dense_layers=dense_layers,
        expert_adapters=expert_adapters,
    )
    phases = (
        dense_phase("qkv", layers, qkv),
        PhaseShape(name="attention", layers=layers),
        dense_phase("o", layers, (Matrix("o_proj", wide, hidden, "inputs"),)),
        *mlp,
        PhaseShape(name="head", layers=1, base_numbers=float(vocab * hidden)),
    )
    return ModelShape(name=name, phases=phases, attention=attention, item_bytes=item_bytes)


def dense_phase(name: str, layers: int, matrices: tuple[Matrix, ...], *, more: float = 0.0) -> PhaseShape:
    """A phase whose weights are its matrices and `more` numbers a layer."""
    numbers = sum(m.inputs * m.outputs for m in matrices) + more
    return PhaseShape(name=name, layers=layers, matrices=matrices, base_numbers=float(numbers))


def mlp_phases(
    hidden: int,
    intermediate: int,
    layers: int,
    *,
    experts: int,
    experts_per_token: int,
    shared_experts: int,
    expert_intermediate: int,
    dense_layers: int,
    expert_adapters: bool,
) -> tuple[PhaseShape, ...]:
    """gate_up and down of the layers that have a dense MLP, then of those that have experts; see `transformer`."""
    phases: list[PhaseShape] = []
    dense = dense_layers if experts else layers
    if dense:
        up = (Matrix("gate_proj", hidden, intermediate), Matrix("up_proj", hidden, intermediate))
        phases += [
            dense_phase("gate_up", dense, up),
            dense_phase("down", dense, (Matrix("down_proj", intermediate, hidden, "inputs"),)),
        ]
    if experts:
        width = expert_intermediate
        up = (Matrix("expert_gate", hidden, width), Matrix("expert_up", hidden, width))
        down = (Matrix("expert_down", width, hidden, "inputs"),)
        parts = (("expert_gate_up", up, hidden * experts, 1), ("expert_down", down, 0, experts_per_token))
        for name, matrices, router, rows in parts:
            numbers = sum(m.inputs * m.outputs for m in matrices)
            phases.append(
                PhaseShape(
                    name=name,
                    layers=layers - dense,
                    matrices=matrices if expert_adapters else (),
                    base_numbers=float(shared_experts * numbers + router),
                    expert_numbers=float(numbers),
                    experts=experts,
                    chosen=experts_per_token,
                    input_rows=rows,
                )
            )
    return tuple(phases)


def count_windows(windows: Sequence[int | None], layers: int) -> tuple[tuple[int, int | None], ...]:
    """`AttentionShape.windows` from a list by layer.

    Raises:
        ValueError: the list has another length.
    """
    if not windows:
        return ((layers, None),)
    if len(windows) != layers:
        raise ValueError(f"windows has {len(windows)} entries, the model {layers} layers: give one for each layer")
    return tuple((list(windows).count(window), window) for window in dict.fromkeys(windows))


def _cut(matrix: Matrix, shards: int) -> Matrix:
    if matrix.cut == "outputs":
        return matrix._replace(outputs=math.ceil(matrix.outputs / shards))
    return matrix._replace(inputs=math.ceil(matrix.inputs / shards)) if matrix.cut == "inputs" else matrix
