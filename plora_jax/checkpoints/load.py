"""One entry for every format: what lies at a path decides which reader loads it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from plora_jax.checkpoints.gguf import default_model_path, load_gguf, load_gguf_config
from plora_jax.checkpoints.hf import load_hf, load_hf_config
from plora_jax.checkpoints.orbax import is_orbax, load_orbax, load_orbax_config
from plora_jax.checkpoints.weights import KeepBlocks, Params, Progress, ShardingOf, WeightsError
from plora_jax.config import ModelConfig

DEFAULT_MODEL = "default"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A base model in memory.

    Attributes:
        config: its numbers.
        params: nested parameter tree of `ModelConfig.param_shapes`; in blocks what was to be kept so.
        source: directory or GGUF file it was read from; its tokenizer lies there too.
        dtype: of the parameters, "float32" or "bfloat16".
    """

    config: ModelConfig
    params: Params
    source: Path
    dtype: str


def find_model(path_or_name: str | Path) -> Path:
    """The directory or file that a name stands for.

    Args:
        path_or_name: "default"; a GGUF file, or a directory with exactly one; a Hugging Face directory; an Orbax
            checkpoint directory.

    Raises:
        FileNotFoundError: nothing that can be read is there; says what was looked for.
    """
    if str(path_or_name) == DEFAULT_MODEL:
        return default_model_path()
    path = Path(path_or_name).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist, and nothing is downloaded; give a local Hugging Face directory, a .gguf file, an "
            f"Orbax checkpoint directory, or {DEFAULT_MODEL!r} for the default model"
        )
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise FileNotFoundError(f"{path} is not a .gguf file; give the directory for other formats")
    if is_orbax(path) or (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = f"{len(files)} .gguf files ({', '.join(f.name for f in files)}; name one)" if files else "no .gguf file"
    raise FileNotFoundError(
        f"{path} holds no model: looked for config.json (Hugging Face), model_config.json (Orbax) and one .gguf file, "
        f"found {found}"
    )


def load_config(path_or_name: str | Path) -> ModelConfig:
    """The configuration of a base model in any format, without its weights; arguments and errors as `load_model`."""
    source = find_model(path_or_name)
    if source.is_file():
        return load_gguf_config(source)
    return load_orbax_config(source) if is_orbax(source) else load_hf_config(source)


def load_model(
    path_or_name: str | Path,
    *,
    dtype: str = "auto",
    progress: Progress | None = None,
    sharding_of: ShardingOf | None = None,
    keep_blocks: KeepBlocks | None = None,
) -> LoadedModel:
    """Loads a base model from any format.

    Args:
        path_or_name: as `find_model` takes it.
        dtype: "float32", "bfloat16" or "auto": the published dtype, and bfloat16 for float16 and quantised files.
        progress: told bytes done and in total; Orbax restores in one go and calls it once.
        sharding_of: sharding of a parameter from its path and shape; one device by default.
        keep_blocks: which parameters stay in the 4-bit blocks of a GGUF file; none by default.

    Raises:
        FileNotFoundError: nothing that can be read is there.
        ConfigError: a model that cannot be served exactly.
        WeightsError: unreadable files; missing, extra or misshaped tensors; no blocks to keep.
    """
    source = find_model(path_or_name)
    if keep_blocks is not None and not source.is_file():
        raise WeightsError(
            f"--quantization gguf keeps the 4-bit blocks of a GGUF file, and {source} is none: use --quantization int8"
        )
    if source.is_file():
        config, params = load_gguf(
            source, dtype=dtype, progress=progress, sharding_of=sharding_of, keep_blocks=keep_blocks
        )
    elif is_orbax(source):
        config, params = load_orbax(source, dtype=dtype, sharding_of=sharding_of)
        _report_all(params, progress)
    else:
        config, params = load_hf(source, dtype=dtype, progress=progress, sharding_of=sharding_of)
    return LoadedModel(config, params, source, str(params["embedding"].dtype))


def _report_all(params: Any, progress: Progress | None) -> None:
    if progress is None:
        return
    layers = params["layers"].values()
    total = sum(a.nbytes for a in [*layers, *(a for name, a in params.items() if name != "layers")])
    progress(total, total)
