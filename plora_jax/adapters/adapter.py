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


class ModuleId(NamedTuple):
    """A linear layer that an adapter changes: decoder layer and PEFT leaf name ("q_proj")."""

    layer: int
    projection: str


@dataclasses.dataclass(frozen=True)
class LoraMatrices:
    """The change of one linear layer: y += scale * (x @ a.T) @ b.T.

    Attributes:
        a: [R, I], PEFT's lora_A.weight.
        b: [O, R], PEFT's lora_B.weight.
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
        modules: matrices by linear layer; a layer that is not here is left as the base has it.
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
