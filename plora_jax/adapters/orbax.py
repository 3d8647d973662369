"""Orbax checkpoints of adapters: the matrices in Orbax's own format, what else an adapter is as JSON beside them.

plora_adapter.json    format, the adapter's configuration, rank and scale by module
matrices/             {"layers.0.q_proj": {"a": [R, I], "b": [O, R]}, ...}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from plora_jax.adapters.adapter import Adapter, AdapterError, LoraMatrices, ModuleId
from plora_jax.adapters.features import listed, refuse_unserved
from plora_jax.adapters.files import new_directory, read_json_object, write_json
from plora_jax.adapters.matrices import as_matrix, check_rank, check_shapes
from plora_jax.config import ModelConfig

ADAPTER_FILE = "plora_adapter.json"
MATRICES_FOLDER = "matrices"
_FORMAT = 1
_MODULE = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(\w+)")


def save_adapter_orbax(adapter: Adapter, path: str | Path, *, overwrite: bool = False) -> None:
    """Writes a checkpoint directory, whole or not at all.

    Args:
        adapter: to write; its matrices keep their dtype.
        path: directory; must not exist, or be empty, unless overwrite is set.
        overwrite: replace what is there.

    Raises:
        FileExistsError: something is there.
        AdapterError: the adapter has no modules.
    """
    if not adapter.modules:
        raise AdapterError(f"adapter {adapter.name!r} has no modules: there is nothing to save")
    modules = {_name(module): matrices for module, matrices in adapter.modules.items()}
    content = {
        "format": _FORMAT,
        "config": json.loads(json.dumps(dict(adapter.config))),
        "modules": {name: {"rank": m.rank, "scale": m.scale} for name, m in modules.items()},
    }
    arrays = {name: {"a": np.ascontiguousarray(m.a), "b": np.ascontiguousarray(m.b)} for name, m in modules.items()}
    with new_directory(path, overwrite=overwrite) as directory:
        write_json(directory / ADAPTER_FILE, content)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory / MATRICES_FOLDER, arrays)
            checkpointer.wait_until_finished()


def restore_adapter(
    path: str | Path, *, name: str, config: ModelConfig, max_lora_rank: int | None = None, dtype: Any = None
) -> Adapter:
    """An adapter from a checkpoint of `save_adapter_orbax`.

    Args:
        path: the directory.
        name: what clients will call it.
        config: of the base model.
        max_lora_rank: largest rank of any module; None for no limit.
        dtype: numpy or ml_dtypes dtype that the matrices are cast to; None keeps that of the checkpoint.

    Raises:
        FileNotFoundError: no checkpoint of an adapter there.
        AdapterError: missing or extra arrays, or whatever refuses a PEFT adapter.
    """
    directory = Path(path).absolute()
    if not (directory / ADAPTER_FILE).is_file():
        raise FileNotFoundError(f"adapter {name!r}: {directory} has no {ADAPTER_FILE}")
    content = read_json_object(directory / ADAPTER_FILE, name=name)
    fields, scales = _read_content(content, config, source=directory / ADAPTER_FILE, name=name)
    refuse_unserved(name, fields, ())
    with ocp.StandardCheckpointer() as checkpointer:
        shapes = _stored_shapes(checkpointer, directory / MATRICES_FOLDER, name)
        _check_arrays(shapes, scales, config=config, max_lora_rank=max_lora_rank, name=name)
        arrays = _restore(checkpointer, directory / MATRICES_FOLDER, shapes, name)
    modules = {}
    for module, scale in scales.items():
        a, b = (
            as_matrix(arrays[_name(module)][part], dtype, tensor=f"{_name(module)}.{part}", name=name) for part in "ab"
        )
        modules[module] = LoraMatrices(a, b, scale)
    return Adapter(name=name, modules=modules, config=fields, path=str(directory))


def is_adapter_checkpoint(path: Path) -> bool:
    """Whether a directory looks like a checkpoint of `save_adapter_orbax`."""
    return (path / ADAPTER_FILE).is_file()


def _name(module: ModuleId) -> str:
    return f"layers.{module.layer}.{module.projection}"


def _read_content(
    content: Mapping[str, Any], config: ModelConfig, *, source: Path, name: str
) -> tuple[dict[str, Any], dict[ModuleId, float]]:
    if content.get("format") != _FORMAT:
        raise AdapterError(
            f"adapter {name!r}: {source} has format {content.get('format')!r}; this version reads {_FORMAT}"
        )
    fields, entries = content.get("config"), content.get("modules")
    if not isinstance(fields, dict) or not isinstance(entries, dict) or not entries:
        raise AdapterError(f"adapter {name!r}: {source} must hold the objects 'config' and 'modules'")
    scales, unknown = {}, []
    for text, entry in entries.items():
        match = _MODULE.fullmatch(text)
        if match is None or int(match[1]) >= config.num_layers or match[2] not in config.projections:
            unknown.append(text)
            continue
        scale = entry.get("scale") if isinstance(entry, dict) else None
        if not isinstance(scale, int | float) or not math.isfinite(scale):
            raise AdapterError(
                f"adapter {name!r}: {source} gives {text} the scale {scale!r}; it must be a finite number"
            )
        scales[ModuleId(int(match[1]), match[2])] = float(scale)
    if unknown:
        raise AdapterError(
            f"adapter {name!r} has {len(unknown)} modules that the base model ({config.architecture}, "
            f"{config.num_layers} layers of {', '.join(config.projections)}) has not: {listed(unknown)}"
        )
    return fields, scales


def _stored_shapes(checkpointer: Any, folder: Path, name: str) -> dict[str, dict[str, Any]]:
    try:
        return checkpointer.metadata(folder).item_metadata.tree
    except Exception as error:  # Orbax raises many kinds; all mean that the folder is not a whole checkpoint.
        raise _broken(folder, name, error) from error


def _restore(checkpointer: Any, folder: Path, shapes: Mapping[str, Mapping[str, Any]], name: str) -> Any:
    # numpy targets keep Orbax from placing anything on a device.
    target = {m: {part: np.empty(x.shape, x.dtype) for part, x in parts.items()} for m, parts in shapes.items()}
    try:
        return checkpointer.restore(folder, target)
    except Exception as error:  # As above.
        raise _broken(folder, name, error) from error


def _broken(folder: Path, name: str, error: Exception) -> AdapterError:
    reason = str(error).strip().splitlines()
    return AdapterError(
        f"adapter {name!r}: {folder} is not a complete Orbax checkpoint: {reason[0] if reason else repr(error)}; "
        "save it again"
    )


def _check_arrays(
    shapes: Mapping[str, Mapping[str, Any]],
    scales: Mapping[ModuleId, float],
    *,
    config: ModelConfig,
    max_lora_rank: int | None,
    name: str,
) -> None:
    wanted = {f"{_name(module)}.{part}" for module in scales for part in "ab"}
    found = {f"{module}.{part}" for module, parts in shapes.items() for part in parts}
    problems = [f"missing {listed(sorted(wanted - found))}"] if wanted - found else []
    problems += [f"extra {listed(sorted(found - wanted))}"] if found - wanted else []
    if problems:
        raise AdapterError(f"adapter {name!r}: the arrays do not fit {ADAPTER_FILE}: {'; '.join(problems)}")
    for module in scales:
        where = _name(module)
        a, b = shapes[where]["a"], shapes[where]["b"]
        size, tensors = config.projections[module.projection], (f"{where}.a", f"{where}.b")
        rank = check_shapes(a.shape, b.shape, where=where, size=size, tensors=tensors, name=name)
        check_rank(rank, where=where, max_lora_rank=max_lora_rank, name=name)
