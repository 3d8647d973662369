"""One LoRA adapter as a value: matrices by (layer, projection), and where they came from."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_identities = itertools.count(1)


class AdapterError(ValueError):
    """An adapter that cannot be served exactly; the message names the tensor or field, the value and the mend."""


OUTSIDE = -1
"""Layer of the projections that are outside the decoder layers."""

EMBEDDING, HEAD = "embed_tokens", "lm_head"
"""PEFT leaf names of the projections outside the layers."""


class ModuleId(NamedTuple):
    """A projection that an adapter changes.

    Attributes:
        layer: decoder layer, or OUTSIDE for the embedding and the head.
        projection: PEFT leaf name ("q_proj", EMBEDDING, HEAD).
    """

    layer: int
    projection: str

    @property
    def path(self) -> str:
        """What messages and checkpoints call it: "layers.0.q_proj", "lm_head"."""
        return self.projection if self.layer == OUTSIDE else f"layers.{self.layer}.{self.projection}"


@dataclasses.dataclass(frozen=True)
class LoraMatrices:
    """The change of one projection: y += scale * (x @ a.T) @ b.T.

    For the embedding x is one-hot over the vocabulary: token t adds scale * a[:, t] @ b.T to its row, before the row is
    scaled (Gemma). The change of the head adds to the logits, before their soft cap. Where the base ties the two, each
    still changes its own place only, as in PEFT.

    Attributes:
        a: [R, I], PEFT's lora_A.weight; of the embedding lora_embedding_A [R, V].
        b: [O, R], PEFT's lora_B.weight; of the embedding lora_embedding_B [D, R].
        scale: alpha / r, or alpha / sqrt(r) with rsLoRA.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A loaded adapter.

    Attributes:
        name: what clients call it.
        modules: matrices by projection; one that is not here is left as the base has it.
        config: adapter_config.json as it was read.
        path: directory it was read from, or None when it was made in memory.
        identity: number of this load, never used again in this process: what caches are keyed by.
    """

    name: str
    modules: Mapping[ModuleId, LoraMatrices]
    config: Mapping[str, Any]
    path: str | None = None
    identity: int = dataclasses.field(default_factory=lambda: next(_identities))

    @property
    def max_rank(self) -> int:
        return max((m.rank for m in self.modules.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices as they are held here."""
        return sum(m.a.nbytes + m.b.nbytes for m in self.modules.values())
