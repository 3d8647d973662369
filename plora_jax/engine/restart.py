"""Serves on under another policy as though the engine had just started: for measurements that compare policies.

The adapters stay in the pool, and nothing is compiled again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from plora_jax.engine.build import Deployment, preferred_strategy, strategy_while_all_fit
from plora_jax.engine.placement import PlacementPlanner


def restart(
    deployment: Deployment,
    *,
    lora_strategy: str,
    planner: str = "joint",
    hardware: str | None = None,
    wrap: Callable[[PlacementPlanner | None], PlacementPlanner | None] = lambda planner: planner,
) -> None:
    """Empties the device of adapters and has another planner, which knows nothing. Any thread.

    Args:
        deployment: with LoRA; nothing may be in flight.
        lora_strategy: as in `EngineConfig`.
        planner: as in `EngineConfig`.
        hardware: as in `EngineConfig`; None for that of the deployment.
        wrap: makes what the engine is given of the planner; None where both strategies are forced.

    Raises:
        ValueError: the deployment has no adapters, a request is in flight, or the configuration cannot be.
    """
    pool = deployment.adapters
    if pool is None:
        raise ValueError("this engine has no adapters to plan for: build it with enable_lora")
    if deployment.engine.stats().running or deployment.engine.stats().waiting:
        raise ValueError("requests are in flight: wait for them before the engine starts over")
    config = dataclasses.replace(
        deployment.config,
        lora_strategy=lora_strategy,
        planner=planner,
        hardware=hardware or deployment.config.hardware,
    )
    config.validate()
    deployment.engine.use_planner(None)
    while_all_fit = strategy_while_all_fit(config)
    pool.between_steps(lambda: pool.start_over((preferred_strategy(config),), while_all_fit=while_all_fit))
    deployment.kv.keep(None)
    deployment.engine.use_planner(wrap(deployment.planner_of(config)))
