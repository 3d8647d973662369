"""Measures the default adapters against the base model on their held-out questions.

For each adapter: the share of generated answers that show its behaviour (launch/default/behaviour.py says what counts),
and the loss per token of the held-out answers, each with the adapter and with the base model alone.

  python -m launch.default.measure
      the three adapters that are shipped

  python -m launch.default.measure --adapters_dir /tmp/mine --only pirate --show 5
      /tmp/mine/pirate instead, and its first five answers
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from launch import flags
from launch.console import StageLog
from launch.default.behaviour import MEASURES
from launch.flags import StartError
from plora_jax.adapters import Adapter, ModuleId, load_adapter
from plora_jax.checkpoints import DEFAULT_MODEL, LoadedModel, load_model
from plora_jax.engine import Engine, SamplingParams
from plora_jax.engine.build import EngineConfig, build_engine
from plora_jax.training import BatchPlan, LoraParams, ModelChat, TrainConfig, Trainer, read_records, tokenize

HOME = pathlib.Path(__file__).parent
MAX_LENGTH = 128
MAX_TOKENS = 80
_BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """What to measure.

    Attributes:
        adapters_dir: directory with one adapter directory for each behaviour.
        only: a behaviour to measure; repeatable; all by default.
        dtype: "float32" or "bfloat16".
        show: answers to print for each model.
    """

    adapters_dir: str = str(HOME / "adapters")
    only: tuple[str, ...] = ()
    dtype: str = "float32"
    show: int = 0


class Figures(NamedTuple):
    """What one model did on the held-out examples of one behaviour.

    Attributes:
        share: of the answers that show the behaviour, 0 to 1.
        loss: per token of the written answers, nats.
        answers: as generated.
    """

    share: float
    loss: float
    answers: list[str]


class Bench:
    """Measures behaviours on one base model.

    Args:
        model: with weights, for the losses.
        engine: of the same model, for the answers.
    """

    def __init__(self, model: LoadedModel, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self._chat = ModelChat(engine.tokenizer, model.config)

    def measure(self, behaviour: str, adapter: Adapter | None) -> Figures:
        """One behaviour, greedily generated.

        Args:
            behaviour: a name in `MEASURES`, and of a folder in data/.
            adapter: one that the engine serves; None for the base model alone.
        """
        records = read_records(HOME / "data" / behaviour / "heldout.jsonl")
        prompts = [
            self._chat.encode(self._chat.render(record["messages"][:-1], add_generation_prompt=True), start=False)
            for record in records
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        completions = self._engine.generate(prompts, sampling, adapters=adapter.name if adapter else None)
        answers = [completion.text.strip() for (completion,) in completions]
        passed = [MEASURES[behaviour](answer) for answer in answers]
        return Figures(sum(passed) / len(passed), self._loss(records, adapter), answers)

    def _loss(self, records: Sequence[dict[str, Any]], adapter: Adapter | None) -> float:
        examples = tokenize(records, self._chat, max_length=MAX_LENGTH).examples
        batches = BatchPlan(examples, _BATCH_SIZE, max_length=MAX_LENGTH, seed=0).all_batches()
        if adapter is None:
            config = TrainConfig()
            trainer = Trainer(self._model.config, config, total_steps=1)
            return trainer.evaluate(self._model.params, trainer.init().lora, batches)
        config, lora = stacked(adapter, self._model.config.num_layers)
        return Trainer(self._model.config, config, total_steps=1).evaluate(self._model.params, lora, batches)


def stacked(adapter: Adapter, num_layers: int) -> tuple[TrainConfig, LoraParams]:
    """An adapter of one rank and scale, on the same projections of every layer, as the trainer holds it."""
    first = next(iter(adapter.modules.values()))
    targets = tuple(sorted({module.projection for module in adapter.modules}))
    lora: LoraParams = {"a": {}, "b": {}}
    for projection in targets:
        layers = [adapter.modules[ModuleId(layer, projection)] for layer in range(num_layers)]
        lora["a"][projection] = jnp.asarray(np.stack([matrices.a for matrices in layers]), jnp.float32)
        lora["b"][projection] = jnp.asarray(np.stack([matrices.b for matrices in layers]), jnp.float32)
    return TrainConfig(rank=first.rank, alpha=first.scale * first.rank, targets=targets), lora


def main() -> int:
    """Prints one row for each behaviour."""
    config = flags.read(MeasureConfig)
    names = config.only or tuple(MEASURES)
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        raise StartError(f"--only must be one of {', '.join(MEASURES)}, got {unknown[0]!r}")
    console = Console(stderr=True)
    log = StageLog(console)
    try:
        model = load_model(DEFAULT_MODEL, dtype=config.dtype)
        adapters = {
            name: load_adapter(pathlib.Path(config.adapters_dir) / name, name=name, config=model.config)
            for name in names
        }
        engine_config = EngineConfig(dtype=config.dtype, max_num_seqs=_BATCH_SIZE, max_model_len=512, device_kv_mb=256)
        engine = build_engine(engine_config, progress=log).engine
    except (ValueError, OSError) as error:
        raise StartError(str(error)) from error
    finally:
        log.end()
    bench, table = Bench(model, engine), _table()
    for name, adapter in adapters.items():
        engine.add_adapter(adapter)
        base, trained = bench.measure(name, None), bench.measure(name, adapter)
        shares = (f"{100 * figures.share:.0f} %" for figures in (base, trained))
        table.add_row(name, *shares, f"{base.loss:.3f}", f"{trained.loss:.3f}")
        for kind, figures in (("base", base), (name, trained)):
            for answer in figures.answers[: config.show]:
                console.print(f"{kind}: {answer}", markup=False, highlight=False)
    Console().print(table)
    return 0


def _table() -> Table:
    table = Table()
    for column in ("behaviour", "share, base", "share, adapter", "loss, base", "loss, adapter"):
        table.add_column(column, justify="left" if column == "behaviour" else "right")
    return table


def cli() -> None:
    flags.define(MeasureConfig)
    flags.run(main)


if __name__ == "__main__":
    cli()
