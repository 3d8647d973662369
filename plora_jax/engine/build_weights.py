"""The base weights of a start: how they will lie, for the programs, and what is read beside those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from plora_jax.checkpoints import load_model
from plora_jax.engine.engine_config import EngineConfig
from plora_jax.engine.start import StagesInTurn
from plora_jax.model import keeps_blocks, pack_params, packed_shapes
from plora_jax.parallel import TensorParallel


def read_weights(
    config: EngineConfig, parallel: TensorParallel, mesh: Mesh, stages: StagesInTurn, go_on: Callable[[], None]
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Embedding and head as they were read, by name, and all weights as they serve."""

    def advance(done: int, total: int) -> None:
        go_on()
        stages.advance("weights", done, total)

    loaded = load_model(
        config.model,
        dtype=config.dtype,
        progress=advance,
        sharding_of=parallel.sharding_of(mesh),
        keep_blocks=keeps_blocks(parallel, config.quantization),
    )
    params = parallel.place(loaded.params, mesh)
    # Not the whole tree: the layers' weights are kept in another form and would be held twice.
    outer = {name: params[name] for name in ("embedding", "head") if name in params}
    packed = pack_params(params, parallel, quantization=config.quantization)
    stages.end("weights")
    return outer, packed


def served_shapes(
    config: EngineConfig, parallel: TensorParallel, mesh: Mesh, *, dtype: np.dtype, read: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Shapes of the weights that `read_weights` returns.

    Args:
        config, parallel, mesh: as `read_weights` takes them.
        dtype: of the parameters.
        read: gives the weights; asked where the file decides how they are kept.
    """
    if config.quantization == "gguf":
        return read()
    return packed_shapes(parallel.placed_shapes(mesh, dtype), parallel, quantization=config.quantization)
