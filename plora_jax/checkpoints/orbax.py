"""Orbax checkpoints of base models: the parameter tree, the configuration beside it, and tokenizer files.

A checkpoint directory holds `model_config.json`, `params/` (Orbax's own format) and what the tokenizer needs.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from plora_jax.checkpoints.weights import (
    Params,
    ShardingOf,
    WeightsError,
    check_tree,
    flatten,
    nest,
    numpy_dtype,
    one_device_sharding,
    resolve_dtype,
)
from plora_jax.config import ConfigError, ModelConfig, RopeConfig

CONFIG_FILE = "model_config.json"
PARAMS_FOLDER = "params"
_FORMAT = 1


def save_orbax(
    path: str | Path, config: ModelConfig, params: Mapping[str, Any], *, extra_files: Iterable[str | Path] = ()
) -> None:
    """Writes a new checkpoint directory.

    Args:
        path: must not exist, or be empty.
        config: of the model; its dtype becomes that of the parameters.
        params: nested parameter tree, any sharding.
        extra_files: tokenizer files and folders to copy into it.

    Raises:
        FileExistsError: something is there.
        WeightsError: params do not fit config.
    """
    directory = Path(path).absolute()
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; choose another path")
    check_tree(config, {name: tuple(a.shape) for name, a in flatten(params).items()}, source="the parameter tree")
    directory.mkdir(parents=True, exist_ok=True)
    with _checkpointer() as checkpointer:
        checkpointer.save(directory / PARAMS_FOLDER, dict(params))
        checkpointer.wait_until_finished()
    config = dataclasses.replace(config, dtype=str(params["embedding"].dtype))
    content = {"format": _FORMAT, "config": dataclasses.asdict(config)}
    (directory / CONFIG_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for file in map(Path, extra_files):
        (shutil.copytree if file.is_dir() else shutil.copy)(file, directory / file.name)


def load_orbax(
    path: str | Path, *, dtype: str = "auto", sharding_of: ShardingOf | None = None
) -> tuple[ModelConfig, Params]:
    """A model from a checkpoint of `save_orbax`, on any mesh.

    Args:
        path: the directory.
        dtype: "float32", "bfloat16" or "auto" for that of the configuration.
        sharding_of: sharding of a parameter from its path and shape; one device by default.

    Raises:
        ConfigError: model_config.json is absent or unreadable.
        WeightsError: missing, extra or misshaped arrays.
    """
    directory = Path(path).absolute()
    config = load_orbax_config(directory)
    target_dtype = numpy_dtype(resolve_dtype(dtype, config))
    if not (directory / PARAMS_FOLDER).is_dir():
        raise WeightsError(f"{directory} has no folder {PARAMS_FOLDER}; the checkpoint is not complete")
    with _checkpointer() as checkpointer:
        stored = flatten(checkpointer.metadata(directory / PARAMS_FOLDER).item_metadata.tree)
        check_tree(config, {name: tuple(a.shape) for name, a in stored.items()}, source=str(directory))
        # Without a target Orbax would restore to the shardings of the machine that saved it.
        target = {
            name: jax.ShapeDtypeStruct(shape, target_dtype, sharding=(sharding_of or one_device_sharding)(name, shape))
            for name, shape in config.param_shapes().items()
        }
        params = checkpointer.restore(directory / PARAMS_FOLDER, nest(target))
    return config, params


def load_orbax_config(directory: str | Path) -> ModelConfig:
    """The configuration of a checkpoint of `save_orbax`.

    Raises:
        ConfigError: absent or unreadable.
    """
    file = Path(directory) / CONFIG_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ConfigError(f"{file} has format {content['format']}; this version reads {_FORMAT}")
        fields = dict(content["config"])
        for name in ("rope", "rope_local"):
            fields[name] = fields[name] and RopeConfig(**fields[name])
        for name in ("layer_windows", "eos_token_ids"):
            fields[name] = tuple(fields[name])
        return ModelConfig(**fields)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read as the configuration of an Orbax checkpoint: {error!r}") from None


def is_orbax(path: Path) -> bool:
    """Whether a directory looks like a checkpoint of `save_orbax`."""
    return (path / CONFIG_FILE).is_file()


def _checkpointer() -> Any:
    """Orbax is imported when it is used: that takes 0.4 s of a start."""
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer()
