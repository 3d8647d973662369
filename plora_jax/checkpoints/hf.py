"""Hugging Face directories: config.json and memory-mapped safetensors, in one file or sharded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (gives numpy the bfloat16 that safetensors returns)
import numpy as np
from safetensors import SafetensorError, safe_open

from plora_jax.checkpoints.hf_config import read_hf_config
from plora_jax.checkpoints.names import Part, canonical_name, fused_expert_names, hf_names, is_harmless_extra
from plora_jax.checkpoints.weights import (
    Params,
    Progress,
    ShardingOf,
    Tensor,
    WeightsError,
    assemble,
    resolve_dtype,
)
from plora_jax.config import ConfigError, ModelConfig

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_FLOATS = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def load_hf(
    path: str | Path,
    *,
    dtype: str = "auto",
    progress: Progress | None = None,
    sharding_of: ShardingOf | None = None,
) -> tuple[ModelConfig, Params]:
    """A model from a Hugging Face directory.

    Args:
        path: directory with config.json and *.safetensors.
        dtype: "float32", "bfloat16", or "auto" for the published one (bfloat16 for float16).
        progress: told bytes done and in total after every parameter.
        sharding_of: sharding of a parameter from its path and shape; one device by default.

    Returns:
        The configuration and the nested parameter tree of `ModelConfig.param_shapes`.

    Raises:
        ConfigError: a configuration that cannot be served exactly.
        WeightsError: unreadable files; missing, extra or misshaped tensors.
    """
    directory = Path(path)
    config = load_hf_config(directory)
    with ExitStack() as stack:
        files = [(f, stack.enter_context(_open(f))) for f in _weight_files(directory)]
        tensors, extra = _match(config, files)
        params = assemble(
            config,
            tensors,
            dtype=resolve_dtype(dtype, config),
            source=str(directory),
            extra=extra,
            names={part: name for name, part in hf_names(config).items()},
            sharding_of=sharding_of,
            progress=progress,
        )
    return config, params


def load_hf_config(directory: str | Path) -> ModelConfig:
    """The configuration of a Hugging Face directory; a dtype that config.json lacks is read from the weights.

    Raises:
        ConfigError: no config.json, or one that cannot be served exactly.
    """
    directory = Path(directory)
    fields = _read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    text = fields.get("text_config") or {}
    if not any(f.get(name) for f in (fields, text) for name in ("dtype", "torch_dtype")):
        fields["dtype"] = _stored_dtype(directory)
    return read_hf_config(fields, generation=_read_json(generation) if generation.exists() else None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a Hugging Face model directory needs it") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}; it must hold an object")
    return value


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.exists():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        absent = [name for name in names if not (directory / name).is_file()]
        if absent or not names:
            raise WeightsError(f"{index} lists files that are not there: {', '.join(absent) or 'none listed'}")
        return [directory / name for name in names]
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if any(directory.glob("*.bin")):
        raise WeightsError(
            f"{directory} has pickled *.bin weights only, which can run code when they are read; convert them with "
            "transformers: AutoModelForCausalLM.from_pretrained(PATH).save_pretrained(NEW_PATH)"
        )
    raise WeightsError(f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        with path.open("rb") as file:
            head = file.read(64)
        if head.startswith(b"version https://git-lfs"):
            raise WeightsError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` there") from None
        raise WeightsError(
            f"{path} ({path.stat().st_size} bytes) is not a complete safetensors file: {error}; download it again"
        ) from None


def _stored_dtype(directory: Path) -> str:
    with _open(_weight_files(directory)[0]) as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            return _FLOATS.get(file.get_slice(name).get_dtype(), "float32")
    return "float32"


def _match(config: ModelConfig, files: list[tuple[Path, Any]]) -> tuple[list[Tensor], list[str]]:
    """Tensors with their places, and names that have none."""
    wanted, fused = hf_names(config), fused_expert_names(config)
    tensors: list[Tensor] = []
    extra: list[str] = []
    for path, file in files:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            canonical, piece = canonical_name(name), file.get_slice(name)
            renamed = canonical.replace(".mlp.gate.", ".block_sparse_moe.gate.")
            part = wanted.get(canonical) or wanted.get(renamed)
            if part is None and canonical not in fused:
                extra += [] if is_harmless_extra(canonical, config) else [f"{name} {piece.get_shape()}"]
                continue
            if piece.get_dtype() not in _FLOATS:
                raise WeightsError(
                    f"{path}: tensor {name} has dtype {piece.get_dtype()}; supported: {', '.join(_FLOATS)}"
                )
            shape, read = tuple(piece.get_shape()), _reader(file, name)
            if part is not None:
                tensors.append(Tensor(name, shape, part, read))
            else:
                tensors += _split(name, shape, read, fused[canonical])
    return tensors, extra


def _reader(file: Any, name: str) -> Callable[[], np.ndarray]:
    return lambda: file.get_tensor(name)


def _split(
    name: str, shape: tuple[int, ...], read: Callable[[], np.ndarray], place: tuple[int, tuple[str, ...]]
) -> Iterator[Tensor]:
    """Stacked experts: the leaves share the rows of axis 1 equally."""
    layer, leaves = place
    for i, leaf in enumerate(leaves):
        rows = shape[1] // len(leaves) if len(shape) == 3 else 0
        cut = slice(i * rows, (i + 1) * rows)
        yield Tensor(
            name,
            (shape[0], rows, *shape[2:]) if rows else shape,
            Part(f"layers.{leaf}", (layer,)),
            lambda cut=cut: read()[:, cut],
        )
