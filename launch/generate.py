"""Generates text with a base model and its LoRA adapters, in this process: one answer, or a chat in the terminal.

  python -m launch.generate
      chat with the default model; /help shows what can be done, such as /adapter NAME

  python -m launch.generate --prompt "What is the capital of France?" --temperature 0
      one answer, then the end; --prompt_file FILE or a pipe do the same

  python -m launch.generate --model /models/llama --adapter /adapters/sql --prompt "List all users"
      with an adapter, by path or by a name from --lora_modules

  python -m launch.generate --raw --prompt "Once upon a time"
      continues the text as it stands, without a chat template

Ctrl-C stops the answer that runs, not the chat. Answers go to standard output, everything else to standard error.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Collection

from absl import flags as absl_flags
from rich.console import Console

from launch import flags
from launch.chat_terminal import ChatTerminal, Speaker
from launch.console import StageLog
from launch.flags import StartError
from launch.startup import (
    AdapterFlags,
    check_template,
    parse_lora_modules,
    read_template,
    shipped_adapters,
    start_engine,
)
from plora_jax.adapters import check_adapter_files
from plora_jax.engine.build import EngineConfig
from plora_jax.engine.params import RequestError, SamplingParams

_SAMPLING_FLAGS = (
    *("temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "ignore_eos", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to generate.

    Attributes:
        prompt: answer this and end.
        prompt_file: answer what this file holds and end; "-" reads standard input.
        adapter: name of an adapter, or its directory.
        system: system message of the chat.
        raw: continue the prompt as it stands, without a chat template.
        chat_template: file with a Jinja chat template, or the template itself, instead of the model's own.
    """

    prompt: str | None = None
    prompt_file: str | None = None
    adapter: str | None = None
    system: str | None = None
    raw: bool = False
    chat_template: str | None = None


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """One flag for each field of the dataclasses that this program is made of."""
    # One person waits here, so a small step compiles faster; --seed also makes the answer repeatable.
    flags.define(EngineConfig, leave_out=("max_waiting", "seed"), flag_values=flag_values)
    flags.define(SamplingParams, only=(*_SAMPLING_FLAGS, "seed"), flag_values=flag_values)
    flags.define(AdapterFlags, flag_values=flag_values)
    flags.define(GenerateConfig, flag_values=flag_values)
    # As long as it takes, not the API's 16 tokens.
    flag_values.set_default("max_tokens", None)
    flag_values.set_default("max_num_seqs", 1)


def main() -> int:
    """Answers once, or chats until the user ends it."""
    config, sampling = flags.read(GenerateConfig), flags.read(SamplingParams)
    try:
        # No flag names a token, so the size of the vocabulary does not matter.
        sampling.validate(vocab_size=0)
    except RequestError as error:
        raise StartError(f"--{error}") from error
    prompt = read_prompt(config, piped=None if sys.stdin.isatty() else sys.stdin.read)
    if prompt is None and config.raw:
        raise StartError("--raw needs a text to continue: give --prompt, --prompt_file or a pipe")
    adapters = parse_lora_modules(flags.read(AdapterFlags).lora_modules)
    template = read_template(config.chat_template)
    engine_config = flags.read(EngineConfig, seed=sampling.seed or 0)
    shipped = shipped_adapters(engine_config)
    adapter, adapters = choose_adapter(config.adapter, adapters, shipped=shipped)
    log = StageLog(Console(stderr=True))
    deployment = start_engine(engine_config, adapters, log=log, shipped=shipped)
    engine = deployment.engine
    check_template(engine.tokenizer, template)
    if template is None and not engine.tokenizer.chat_templates and not config.raw:
        raise StartError(
            "the model has no chat template: give one with --chat_template, or continue a text with --raw --prompt TEXT"
        )
    try:
        speaker = Speaker(engine, sampling, adapter=adapter, template=template)
        if prompt is None:
            return ChatTerminal(speaker, system=config.system).run()
        return speaker.answer_once(prompt, raw=config.raw, system=config.system)
    finally:
        engine.shutdown()


def read_prompt(config: GenerateConfig, *, piped: Callable[[], str] | None) -> str | None:
    """The prompt from wherever it is given; None for a chat.

    Args:
        config: names the place.
        piped: reads standard input, None where that is a terminal.

    Raises:
        StartError: two places, an unreadable file, or an empty prompt.
    """
    if config.prompt is not None and config.prompt_file is not None:
        raise StartError("--prompt and --prompt_file are both given: leave one out")
    if config.prompt is not None:
        prompt = config.prompt
    elif config.prompt_file is not None and config.prompt_file != "-":
        try:
            prompt = pathlib.Path(config.prompt_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"--prompt_file {config.prompt_file!r} cannot be read: {error}") from error
    elif piped is not None:
        prompt = piped()
    elif config.prompt_file == "-":
        prompt = sys.stdin.read()
    else:
        return None
    if not prompt.strip():
        raise StartError("the prompt is empty: give --prompt TEXT, or run in a terminal for a chat")
    return prompt


def choose_adapter(
    wanted: str | None, adapters: dict[str, str], *, shipped: Collection[str] = ()
) -> tuple[str | None, dict[str, str]]:
    """The name of the adapter to start with, and all adapters to load, that one included.

    Args:
        wanted: a name or a directory.
        adapters: paths by name.
        shipped: names of those that come with the model.

    Raises:
        StartError: it is neither, or a directory without an adapter.
    """
    if wanted is None or wanted in adapters or wanted in shipped:
        return wanted, adapters
    if not os.path.isdir(wanted):
        names = ", ".join(sorted({*adapters, *shipped})) or "none"
        raise StartError(
            f"--adapter {wanted!r} is no directory and names no adapter ({names}); for a name of your own give "
            "--lora_modules NAME=PATH as well"
        )
    name = os.path.basename(os.path.abspath(wanted))
    try:
        check_adapter_files(wanted, name=name)
    except (ValueError, OSError) as error:
        raise StartError(f"--adapter {wanted!r}: {error}") from error
    return name, {**adapters, name: wanted}


def cli() -> None:
    define_flags()
    flags.run(main)


if __name__ == "__main__":
    cli()
