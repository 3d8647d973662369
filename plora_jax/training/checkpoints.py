"""Checkpoints of a run: trained values, optimiser state and the place in the data, through Orbax."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import orbax.checkpoint as ocp

from plora_jax.training.config import TrainConfig, TrainingError
from plora_jax.training.step import TrainState

# These change when a run is watched and saved, not what it computes.
_FREE_FIELDS = ("eval_every", "save_every", "keep")


class RunCheckpoints:
    """The newest checkpoints of one run in one directory; a context manager.

    Args:
        directory: made where it does not exist.
        config: of the run.
        model: what the base model is called in the records.
        data: fingerprint of the training batches.
        total_steps: optimiser steps of the whole run.
    """

    def __init__(
        self, directory: str | os.PathLike[str], config: TrainConfig, *, model: str, data: str, total_steps: int
    ) -> None:
        self.directory = os.path.abspath(directory)
        fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in _FREE_FIELDS}
        self._record = {
            **fields,
            "targets": list(config.targets),
            "model": model,
            "data": data,
            "total_steps": total_steps,
        }
        options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        self._manager.close()

    def latest_step(self) -> int | None:
        """Optimiser steps done at the newest checkpoint; None where there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint and removes those beyond the number to keep."""
        step = int(state.step)
        if step != self.latest_step():
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(self._record))
            self._manager.save(step, args=args)

    def restore(self, template: TrainState) -> TrainState:
        """The newest checkpoint's state.

        Args:
            template: a state of this run, for shapes, dtypes and shardings.

        Raises:
            TrainingError: no checkpoint, or one of another run; every option that differs is named.
        """
        step = self.latest_step()
        if step is None:
            raise TrainingError(f"there is no checkpoint in {self.directory}: start the run without --resume.")
        run = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        self._compare(run)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), template)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        return self._manager.restore(step, args=args)["state"]

    def _compare(self, run: dict[str, Any]) -> None:
        names = {"data": "the training examples (or their order)"}
        differing = [
            f"{names.get(name, name)}: was {run.get(name)!r}, is {value!r}"
            for name, value in self._record.items()
            if run.get(name) != value
        ]
        if differing:
            raise TrainingError(
                f"the checkpoint in {self.directory} belongs to another run ({'; '.join(differing)}): give the same "
                "options and data, or another output directory."
            )
