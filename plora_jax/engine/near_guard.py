"""What the engine does without the compute near the data: it goes on with strategies that only read the pool.

Strategies are data of a step, so what is in flight is served on by others from the next step on, with the same tokens.
A step that fails while it computes near the data is taken for a failure of that, and is made once more without.
"""

from __future__ import annotations

import logging

from memory_pool.adapter_pool import AdapterPool
from memory_pool.near_unit import NearDataUnit
from memory_pool.probe import ProbeReport
from plora_jax.engine.batch import StepUse
from plora_jax.engine.engine_config import EngineConfig
from plora_jax.engine.plan import Sequence
from strategies.strategy_table import ATTENTION, LORA

logger = logging.getLogger(__name__)

COMPUTED_NEAR = tuple(name for name, strategy in LORA.items() if strategy.computes_near)
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
            "on the device from here on; restart the server once that is mended",
            self._unit.failure,
            " and ".join(COMPUTED_NEAR),
        )
        if self._adapters is not None:
            self._adapters.lose(COMPUTED_NEAR, instead="fetch")
        self._attention.lose_distributed()

    def blame(self, use: StepUse, error: Exception) -> bool:
        """Takes the failure of a step for one of the unit, if the step computed there; the engine's thread.

        Args:
            use: what the step did.
            error: that it failed with.

        Returns:
            Whether nothing computes near the data any more and the step is worth another try: one that is packed from
            here on computes nothing there, and is not blamed on it.
        """
        if not _computes_near(use):
            return False
        if self._unit.failure is None:
            self._unit.fail(f"a step that used it failed: {type(error).__name__}: {error}")
        self.check()
        return True


def backend_problems(config: EngineConfig, report: ProbeReport) -> list[str]:
    """What a configuration asks for that the backend cannot do, and what to do about each.

    Args:
        config: of the engine.
        report: of the probe.
    """
    if report.near_data:
        return []
    if not report.reads_pool:
        return [
            f"this machine's accelerator cannot read the pool ({report.as_text()}): set PLORA_POOL=device to keep the "
            "pool in device memory, or use JAX_PLATFORMS=cpu"
        ]
    problems = []
    for flag, value, table in (
        ("lora_strategy", config.lora_strategy, LORA),
        ("attention_strategy", config.attention_strategy, ATTENTION),
    ):
        if value in table and table[value].computes_near:
            others = ", ".join(("auto", *(name for name, strategy in table.items() if not strategy.computes_near)))
            problems.append(
                f"--{flag} {value} computes near the data, which does not work on this {report.platform} "
                f"({report.problem}): choose one of {others}"
            )
    return problems


def _computes_near(use: StepUse) -> bool:
    lora = any(name in COMPUTED_NEAR for lanes in use.lora.values() for name in lanes)
    return lora or any(use.decode.near_queries) or any(use.prefill.near_queries)
