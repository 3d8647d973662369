"""Converts a base model, or an adapter, from one format to another.

  python -m launch.convert --input default --output smollm2 --to hf
  python -m launch.convert --input Qwen3-0.6B --output qwen3.orbax --to orbax --dtype bfloat16
  python -m launch.convert --input Qwen3-0.6B --adapter my_lora --output my_lora.orbax --to orbax

Reads Hugging Face directories (safetensors), GGUF files and Orbax checkpoints of this project, and adapters in the PEFT
form or as Orbax checkpoints. Writes Hugging Face or PEFT directories, or Orbax checkpoints. GGUF is not written:
convert to hf first and use llama.cpp's convert_hf_to_gguf.py on the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from launch import flags
from launch.flags import StartError
from launch.progress import byte_progress
from plora_jax.adapters import AdapterError, load_adapter, save_adapter, save_adapter_orbax
from plora_jax.checkpoints import WeightsError, find_model, load_config, load_model, save_hf, save_orbax
from plora_jax.config import ConfigError
from plora_jax.tokenizer import TokenizerError, load_tokenizer

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "generation_config.json",
)

_FORMATS = ("hf", "orbax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """What to convert.

    Attributes:
        input: base model to read: Hugging Face directory, .gguf file, Orbax checkpoint, or "default". With --adapter,
            the model that the adapter was made for.
        output: directory to write; it must not exist.
        to: format to write: hf (PEFT for an adapter) or orbax.
        dtype: dtype of the written base model: float32, bfloat16, or auto for that of the input, which means bfloat16
            where that is float16 or quantised. An adapter keeps its own.
        adapter: adapter directory (PEFT or Orbax) to convert instead of the base model.
    """

    input: str
    output: str
    to: str
    dtype: str = "auto"
    adapter: str | None = None

    def validate(self) -> None:
        """Raises StartError where a field cannot be."""
        for name in ("input", "output", "to"):
            if not getattr(self, name):
                raise StartError(f"--{name} is missing; see --help")
        if self.to not in _FORMATS:
            raise StartError(f"--to={self.to} is not supported; choose {' or '.join(_FORMATS)}")


def convert(conversion: Conversion) -> None:
    """Converts; the output appears complete or not at all.

    Raises:
        StartError: a field of the conversion cannot be.
        FileExistsError: the output exists.
        FileNotFoundError, ConfigError, WeightsError, TokenizerError, AdapterError: the input cannot be read exactly.
    """
    conversion.validate()
    with _new_directory(Path(conversion.output)) as directory:
        if conversion.adapter is None:
            _convert_model(conversion, directory)
        else:
            _convert_adapter(conversion, Path(conversion.adapter), directory)


def _convert_model(conversion: Conversion, directory: Path) -> None:
    # Before a bar is drawn.
    find_model(conversion.input)
    with byte_progress(f"Loading {conversion.input}") as progress:
        model = load_model(conversion.input, dtype=conversion.dtype, progress=progress)
    if conversion.to == "hf":
        save_hf(directory, model.config, model.params)
    else:
        save_orbax(directory, model.config, model.params)
    if model.source.is_file():
        load_tokenizer(model.source).save(directory)
        return
    for name in _TOKENIZER_FILES:
        file = model.source / name
        if file.exists():
            (shutil.copytree if file.is_dir() else shutil.copy)(file, directory / name)


def _convert_adapter(conversion: Conversion, path: Path, directory: Path) -> None:
    adapter = load_adapter(
        path,
        name=path.name,
        config=load_config(conversion.input),
        base_weights=lambda: load_model(conversion.input).params,
    )
    (save_adapter if conversion.to == "hf" else save_adapter_orbax)(adapter, directory)


@contextlib.contextmanager
def _new_directory(output: Path) -> Iterator[Path]:
    """A directory that takes its name when the context ends well, and is removed otherwise."""
    if os.path.lexists(output):
        raise FileExistsError(f"--output {output} exists already; choose another path or remove it")
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=".convert-") as scratch:
        directory = Path(scratch) / output.name
        directory.mkdir()
        yield directory
        directory.rename(output)


def main() -> None:
    """Runs the conversion that the flags describe."""
    conversion = flags.read(Conversion)
    try:
        convert(conversion)
    except (OSError, ConfigError, WeightsError, TokenizerError, AdapterError) as error:
        raise StartError(str(error)) from error
    print(f"wrote {conversion.output}")


if __name__ == "__main__":
    flags.define(Conversion)
    # Orbax tells every step of a save at INFO; --verbosity=0 brings that back.
    logging.set_verbosity(logging.WARNING)
    flags.run(main)
