"""What the engine does without the compute near the data: it goes on with strategies that only read the pool.

Strategies are data of a step, so what is in flight is served on by others from the next step on, with the same tokens.
"""

from __future__ import annotations

import logging

from memory_pool.adapter_pool import AdapterPool
from memory_pool.near_unit import NearDataUnit
from plora_jax.engine.plan import Sequence

logger = logging.getLogger(__name__)

COMPUTED_NEAR = ("near_data", "split")
"""LoRA strategies that compute near the data; the others only have pages read there."""


class AttentionChoice:
    """Who attends to KV pages that are not on the device: a value that each step reads when it is packed.

    Args:
        strategy: "local" or "distributed".
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._only_local = False

    @property
    def strategy(self) -> str:
        return self._strategy

    def __call__(self, sequence: Sequence) -> str:
        """The strategy for the pages of a sequence."""
        return self._strategy

    def choose(self, strategy: str) -> None:
        """Takes another strategy from the next step on; `distributed` is not taken where nothing computes there."""
        self._strategy = "local" if self._only_local else strategy

    def lose_distributed(self) -> None:
        """Nothing computes near the data any more."""
        self._only_local, self._strategy = True, "local"


class NearDataGuard:
    """Looks at the near-data unit before each step, and has everything served without it once it has failed.

    Args:
        unit: near the data.
        adapters: where adapters are; None without LoRA.
        attention: the choice that steps read.
    """

    def __init__(self, unit: NearDataUnit, adapters: AdapterPool | None, attention: AttentionChoice) -> None:
        self._unit, self._adapters, self._attention = unit, adapters, attention
        self._degraded = False

    def check(self) -> None:
        """Degrades where the unit has failed since the last step; the engine's thread, before a step is packed."""
        if self._degraded or self._unit.failure is None:
            return
        self._degraded = True
        logger.warning(
            "near-data compute has failed (%s): adapters served by %s are fetched and KV in the pool is attended to "
            "on the device from here on; restart the server to use it again",
            self._unit.failure,
            " and ".join(COMPUTED_NEAR),
        )
        if self._adapters is not None:
            self._adapters.lose(COMPUTED_NEAR, instead="fetch")
        self._attention.lose_distributed()
