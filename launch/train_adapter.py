"""Trains a LoRA adapter of a base model on a JSONL file of chats or texts.

Each line of the file is one example: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant",
"content": "..."}]}, of which the assistant's turns are learned, or {"text": "..."}, of which everything is learned.

Example:
  python -m launch.train_adapter --train_data=launch/default/data/pirate/train.jsonl \\
    --eval_data=launch/default/data/pirate/heldout.jsonl --output_dir=/tmp/pirate --max_length=128

That writes /tmp/pirate/peft (a PEFT directory in bfloat16: `python -m launch.serve --lora_modules
pirate=/tmp/pirate/peft` serves it), /tmp/pirate/orbax (float32) and /tmp/pirate/checkpoints. Ctrl-C saves a checkpoint
and stops; the same command with --resume goes on and ends with the same adapter as a run that was never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from absl import flags as absl_flags
from absl import logging
from rich.console import Console

from launch import flags
from launch.flags import StartError
from launch.progress import byte_progress
from launch.startup import read_template
from launch.train_progress import training_progress
from plora_jax.adapters import save_adapter, save_adapter_orbax
from plora_jax.checkpoints import DEFAULT_MODEL, LoadedModel, load_model
from plora_jax.tokenizer import load_tokenizer
from plora_jax.training import (
    Batch,
    BatchPlan,
    Examples,
    ModelChat,
    Progress,
    Result,
    RunCheckpoints,
    TrainConfig,
    Trainer,
    read_records,
    run,
    split,
    to_adapter,
    tokenize,
    total_steps,
)

_INTERRUPTED = 130


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to train on what, and where the result goes.

    Attributes:
        model: base model: "default", a Hugging Face directory, a GGUF file or an Orbax checkpoint directory.
        dtype: "auto", "float32" or "bfloat16", of the base weights; the adapter is trained in float32.
        train_data: JSONL file of training examples; required.
        eval_data: JSONL file of held-out examples.
        eval_fraction: without eval_data: share of the training file to hold out, from 0 up to 1.
        chat_template: file with a Jinja chat template, or the template itself, instead of the model's own.
        output_dir: directory for the adapter (peft/, orbax/), report.json and checkpoints/; required.
        name: of the adapter; that of output_dir by default.
        base_name: what the adapter's record calls the base model, such as its Hugging Face id; as `model` by default.
        resume: go on from the newest checkpoint in output_dir.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "float32"
    train_data: str | None = None
    eval_data: str | None = None
    eval_fraction: float = 0.0
    chat_template: str | None = None
    output_dir: str | None = None
    name: str | None = None
    base_name: str | None = None
    resume: bool = False

    @property
    def output(self) -> pathlib.Path:
        return pathlib.Path(self.output_dir or "").expanduser().absolute()

    def validate(self) -> None:
        """Raises StartError naming every flag that cannot be."""
        problems = [f"--{name} is missing" for name in ("train_data", "output_dir") if not getattr(self, name)]
        if self.dtype not in ("auto", "float32", "bfloat16"):
            problems.append(f"--dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        if self.eval_data is not None and self.eval_fraction:
            problems.append("give either --eval_data or --eval_fraction, not both")
        if problems:
            raise StartError("; ".join(problems))


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each field of the two dataclasses that a run is made of."""
    for config_class in (RunConfig, TrainConfig):
        flags.define(config_class, flag_values=flag_values)


def main(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Trains as the flags say; returns the exit status.

    Raises:
        StartError: a flag, a file or the model is at fault.
    """
    options = flags.read(RunConfig, flag_values=flag_values)
    config = flags.read(TrainConfig, flag_values=flag_values)
    options.validate()
    try:
        return _train(options, config, Console(stderr=True))
    except (ValueError, OSError) as error:
        raise StartError(str(error)) from error


def _train(options: RunConfig, config: TrainConfig, console: Console) -> int:
    # First what needs no weights: a bad line or directory should not wait for them.
    train_records, held_out_records = _records(options, config)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"--output_dir {options.output_dir!r} cannot be made: {error}") from error
    with byte_progress("weights") as progress:
        model = load_model(options.model, dtype=options.dtype, progress=progress)
    config.validate(tuple(model.config.projections))
    chat = ModelChat(load_tokenizer(model.source), model.config, template=read_template(options.chat_template))
    plan = _plan(tokenize(train_records, chat, max_length=config.max_length), config, "training", console)
    held_out: list[Batch] = []
    if held_out_records:
        examples = tokenize(held_out_records, chat, max_length=config.max_length)
        held_out = _plan(examples, config, "held-out", console).all_batches()
    trainer = Trainer(model.config, config, total_steps=total_steps(config, len(plan)))
    base_loss = trainer.evaluate(model.params, trainer.init().lora, held_out) if held_out else None
    if base_loss is not None:
        console.print(f"base model: eval loss {base_loss:.4f}", highlight=False)
    result, last = _run(options, config, trainer, model, plan=plan, held_out=held_out, console=console)
    if not result.finished:
        return _say_how_to_resume(options, result, total_steps(config, len(plan)), console)
    eval_loss = None
    if held_out:
        eval_loss = last.eval_loss if last else trainer.evaluate(model.params, result.lora, held_out)
    losses = {"base_eval_loss": base_loss, "eval_loss": eval_loss}
    _write(options, config, result, losses=losses, console=console)
    return 0


def _records(options: RunConfig, config: TrainConfig) -> tuple[list[Any], list[Any]]:
    records = read_records(options.train_data or "")
    if options.eval_data is not None:
        return records, read_records(options.eval_data)
    return split(records, options.eval_fraction, seed=config.seed)


def _plan(examples: Examples, config: TrainConfig, kind: str, console: Console) -> BatchPlan:
    if not examples.examples:
        raise StartError(
            f"no {kind} example has a learned token within --max_length={config.max_length} tokens: raise it"
        )
    line = f"{len(examples.examples)} {kind} examples"
    if examples.truncated:
        line += f", {examples.truncated} cut at --max_length={config.max_length} tokens"
    if examples.dropped:
        line += f", {examples.dropped} left out (nothing learned within it)"
    console.print(line, highlight=False)
    return BatchPlan(examples.examples, config.batch_size, max_length=config.max_length, seed=config.seed)


def _run(
    options: RunConfig,
    config: TrainConfig,
    trainer: Trainer,
    model: LoadedModel,
    *,
    plan: BatchPlan,
    held_out: list[Batch],
    console: Console,
) -> tuple[Result, Progress | None]:
    """The run, and what its last step gave; None where a finished run was resumed."""
    last: Progress | None = None
    total = total_steps(config, len(plan))
    checkpoints = RunCheckpoints(
        options.output / "checkpoints", config, model=options.model, data=plan.fingerprint(), total_steps=total
    )
    with checkpoints, _stop_on_interrupt(console) as should_stop, training_progress(total, console) as show:

        def observe(progress: Progress) -> None:
            nonlocal last
            last = progress
            show(progress)

        result = run(
            trainer,
            model.params,
            config,
            plan=plan,
            held_out=held_out,
            checkpoints=checkpoints,
            resume=options.resume,
            observe=observe,
            should_stop=should_stop,
        )
    return result, last


@contextlib.contextmanager
def _stop_on_interrupt(console: Console) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks the run to stop after its step; a second one ends the process at once."""
    asked: list[bool] = []
    previous = signal.getsignal(signal.SIGINT)

    def handle(signum: int, frame: object) -> None:
        asked.append(True)
        signal.signal(signal.SIGINT, previous)
        console.print("stopping after this step; Ctrl-C again ends at once and loses it", highlight=False)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, previous)


def _say_how_to_resume(options: RunConfig, result: Result, total: int, console: Console) -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--resume"]
    command = shlex.join(["python", "-m", "launch.train_adapter", *arguments, "--resume"])
    where = options.output / "checkpoints"
    console.print(f"stopped after step {result.step} of {total}; the checkpoint is in {where}", soft_wrap=True)
    console.print(f"go on with: {command}", markup=False, highlight=False, soft_wrap=True)
    return _INTERRUPTED


def _write(
    options: RunConfig,
    config: TrainConfig,
    result: Result,
    *,
    losses: dict[str, float | None],
    console: Console,
) -> None:
    output = options.output
    name, base_name = options.name or output.name, options.base_name or options.model
    for folder, save, dtype in (("peft", save_adapter, ml_dtypes.bfloat16), ("orbax", save_adapter_orbax, np.float32)):
        adapter = to_adapter(result.lora, config, name=name, base=base_name, dtype=dtype)
        save(adapter, output / folder, overwrite=True)
    report = {"steps": result.step, **losses, "config": dataclasses.asdict(config)}
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    base, trained = losses["base_eval_loss"], losses["eval_loss"]
    if base is not None and trained is not None:
        change = f"{100 * (1 - trained / base):.0f} % lower" if trained < base else "NOT lower"
        console.print(f"eval loss: base {base:.4f}, adapter {trained:.4f} ({change})", highlight=False)
    console.print(f"adapter: {output / 'peft'} (PEFT, bfloat16), {output / 'orbax'} (float32)", soft_wrap=True)


def _command() -> int:
    if not absl_flags.FLAGS["verbosity"].present:
        # Orbax logs its options at INFO, which would drown the progress.
        logging.set_verbosity(logging.WARNING)
    return main()


def cli() -> None:
    define_flags()
    flags.run(_command)


if __name__ == "__main__":
    cli()
