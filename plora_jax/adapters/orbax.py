"""Orbax checkpoints of adapters: the matrices in Orbax's own format, what else an adapter is as JSON beside them.

plora_adapter.json    format, the adapter's configuration, rank and scale by module
matrices/             {"layers.0.q_proj": {"a": [R, I], "b": [O, R]}, "lm_head": ..., ...}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from plora_jax.adapters.adapter import EMBEDDING, HEAD, OUTSIDE, Adapter, AdapterError, LoraMatrices, ModuleId
from plora_jax.adapters.features import listed, refuse_unserved
from plora_jax.adapters.files import new_directory, read_json_object, write_json
from plora_jax.adapters.matrices import as_matrix, check_rank, check_shapes, module_size
from plora_jax.adapters.outer import check_weight_tying
from plora_jax.adapters.rules import ModuleRule, is_finite_float32
from plora_jax.config import ModelConfig

ADAPTER_FILE = "plora_adapter.json"
MATRICES_FOLDER = "matrices"
_FORMAT = 1
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_LINEAR = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(\w+)")


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
    modules = {module.path: matrices for module, matrices in adapter.modules.items()}
    content = {
        "format": _FORMAT,
        "config": json.loads(json.dumps(dict(adapter.config))),
        "modules": {name: {"rank": m.rank, "scale": m.scale} for name, m in modules.items()},
    }
    arrays = {name: {"a": np.ascontiguousarray(m.a), "b": np.ascontiguousarray(m.b)} for name, m in modules.items()}
    with new_directory(path, overwrite=overwrite) as directory:
        write_json(directory / ADAPTER_FILE, content)
        with _checkpointer() as checkpointer:
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
    fields, rules = _read_content(content, config, source=directory / ADAPTER_FILE, name=name)
    refuse_unserved(name, fields, ())
    with _checkpointer() as checkpointer:
        stored = _stored_arrays(checkpointer, directory / MATRICES_FOLDER, name)
        _check_arrays(stored, rules, config=config, max_lora_rank=max_lora_rank, name=name)
        arrays = _restore(checkpointer, directory / MATRICES_FOLDER, stored, name)
    modules = {}
    for module, rule in rules.items():
        tensors = [f"{module.path}.{part}" for part in "ab"]
        a, b = (as_matrix(arrays[tensor], dtype, tensor=tensor, name=name) for tensor in tensors)
        modules[module] = LoraMatrices(a, b, rule.scale)
    check_weight_tying(fields, modules, config, name=name)
    return Adapter(name=name, modules=modules, config=fields, path=str(directory))


def is_adapter_checkpoint(path: Path) -> bool:
    """Whether a directory looks like a checkpoint of `save_adapter_orbax`."""
    return (path / ADAPTER_FILE).is_file()


def _checkpointer() -> Any:
    """Orbax is imported when it is used: it brings JAX, which the policy code above adapters must not need."""
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer()


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{path}": leaf for path, leaf in _flatten(value).items()}
        else:
            flat[name] = value
    return flat


def _module(path: str, config: ModelConfig) -> ModuleId | None:
    """The module that `ModuleId.path` calls so; None where the base model has none."""
    if path in (EMBEDDING, HEAD):
        return ModuleId(OUTSIDE, path)
    match = _LINEAR.fullmatch(path)
    if match is None or int(match[1]) >= config.num_layers or match[2] not in config.projections:
        return None
    return ModuleId(int(match[1]), match[2])


def _read_content(
    content: Mapping[str, Any], config: ModelConfig, *, source: Path, name: str
) -> tuple[dict[str, Any], dict[ModuleId, ModuleRule]]:
    if content.get("format") != _FORMAT:
        raise AdapterError(
            f"adapter {name!r}: {source} has format {content.get('format')!r}; this version reads {_FORMAT}"
        )
    fields, entries = content.get("config"), content.get("modules")
    if not isinstance(fields, dict) or not isinstance(entries, dict) or not entries:
        raise AdapterError(f"adapter {name!r}: {source} must hold the objects 'config' and 'modules'")
    rules, unknown = {}, []
    for text, entry in entries.items():
        module = _module(text, config)
        if module is None:
            unknown.append(text)
            continue
        values: dict[str, Any] = entry if isinstance(entry, dict) else {}
        scale = values.get("scale")
        if not is_finite_float32(scale):
            raise AdapterError(
                f"adapter {name!r}: {source} gives {text} the scale {scale!r}; it must be a finite number of float32"
            )
        rules[module] = ModuleRule(values.get("rank", 0), float(scale), ADAPTER_FILE)
    if unknown:
        raise AdapterError(
            f"adapter {name!r} has {len(unknown)} modules that the base model ({config.architecture}, {EMBEDDING}, "
            f"{HEAD}, {config.num_layers} layers of {', '.join(config.projections)}) has not: {listed(unknown)}"
        )
    return fields, rules


def _stored_arrays(checkpointer: Any, folder: Path, name: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise AdapterError(f"adapter {name!r}: {folder.parent} has no folder {MATRICES_FOLDER}; save it again")
    try:
        metadata = checkpointer.metadata(folder).item_metadata
    except Exception as error:  # Orbax raises many kinds; all mean that the folder is not a whole checkpoint.
        raise _broken(folder, name, error) from error
    if metadata is None:
        raise _broken(folder, name, "it has no metadata")
    return _flatten(metadata.tree)


def _restore(checkpointer: Any, folder: Path, stored: Mapping[str, Any], name: str) -> dict[str, Any]:
    # numpy targets keep Orbax from placing anything on a device.
    target: dict[str, dict[str, np.ndarray]] = {}
    for path, array in stored.items():
        module, _, part = path.rpartition(".")
        target.setdefault(module, {})[part] = np.empty(array.shape, array.dtype)
    try:
        return _flatten(checkpointer.restore(folder, target))
    except Exception as error:  # As above.
        raise _broken(folder, name, error) from error


def _broken(folder: Path, name: str, error: Exception | str) -> AdapterError:
    reason = str(error).strip().splitlines()
    return AdapterError(
        f"adapter {name!r}: {folder} is not a complete Orbax checkpoint: {reason[0] if reason else repr(error)}; "
        "save it again"
    )


def _check_arrays(
    stored: Mapping[str, Any],
    rules: Mapping[ModuleId, ModuleRule],
    *,
    config: ModelConfig,
    max_lora_rank: int | None,
    name: str,
) -> None:
    wanted = {f"{module.path}.{part}" for module in rules for part in "ab"}
    problems = [f"missing {listed(sorted(wanted - stored.keys()))}"] if wanted - stored.keys() else []
    problems += [f"extra {listed(sorted(stored.keys() - wanted))}"] if stored.keys() - wanted else []
    problems += [
        f"{path} of dtype {stored[path].dtype}" for path in sorted(stored) if str(stored[path].dtype) not in _FLOATS
    ]
    if problems:
        raise AdapterError(f"adapter {name!r}: the arrays do not fit {ADAPTER_FILE}: {'; '.join(problems)}")
    for module, rule in rules.items():
        where = module.path
        tensors = (f"{where}.a", f"{where}.b")
        shapes, size = [stored[tensor].shape for tensor in tensors], module_size(module.projection, config)
        rank = check_shapes(*shapes, where=where, size=size, tensors=tensors, name=name)
        if rank != rule.rank:
            raise AdapterError(
                f"adapter {name!r}: {ADAPTER_FILE} gives rank {rule.rank!r} at {where}, but {tensors[0]} has "
                f"rank {rank}: the files do not belong together"
            )
        check_rank(rank, where=where, max_lora_rank=max_lora_rank, name=name)
