"""PEFT directories: adapter_config.json and adapter_model.safetensors become one Adapter.

What is applied is what the tensors hold: target_modules and its relatives say what was trained, not what is there.
Nothing is dropped in silence: a tensor or a field that cannot be served exactly refuses the adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plora_jax.adapters.adapter import EMBEDDING, HEAD, Adapter, AdapterError, LoraMatrices, ModuleId
from plora_jax.adapters.features import listed, refuse_unserved
from plora_jax.adapters.files import CONFIG_FILE, TENSORS_FILE, check_directory, open_tensors, read_json_object
from plora_jax.adapters.keys import LinearId, Pair, base_copies, pair_tensors
from plora_jax.adapters.matrices import as_matrix, check_rank, check_shapes, cut_rows, leaf_size
from plora_jax.adapters.outer import BaseWeights, check_base_copies, check_weight_tying
from plora_jax.adapters.rules import LoraRules, module_rule, read_rules
from plora_jax.config import ModelConfig

_FLOATS = ("F64", "F32", "F16", "BF16")


def load_peft_adapter(
    path: str | Path,
    *,
    name: str,
    config: ModelConfig,
    max_lora_rank: int | None = None,
    dtype: Any = None,
    base_weights: BaseWeights | None = None,
) -> Adapter:
    """An adapter from a PEFT directory.

    Args:
        path: directory with adapter_config.json and adapter_model.safetensors; other files are ignored.
        name: what clients will call it.
        config: of the base model.
        max_lora_rank: largest rank of any module; None for no limit.
        dtype: numpy or ml_dtypes dtype that the matrices are cast to; None keeps the file's.
        base_weights: gives the parameters of the base model, to compare copies of its embedding and head with; None
            takes them for what they should be.

    Returns:
        The adapter, in host memory: its files are not needed any more.

    Raises:
        FileNotFoundError: no directory, or no weights in it.
        AdapterError: files that cannot be read, or an adapter that cannot be served exactly on this base model.
    """
    directory = Path(path)
    check_directory(directory, name=name)
    fields = read_json_object(directory / CONFIG_FILE, name=name)
    _check_type(fields, name)
    with open_tensors(directory / TENSORS_FILE, name=name) as file:
        names = list(file.keys())
        pairs, others = pair_tensors(names, config, name=name)
        copies, others = base_copies(others, pairs)
        unknown = refuse_unserved(name, fields, others)
        rules = read_rules(fields, name=name)
        _check_matched(pairs, unknown, config, name=name)
        # All shapes before any values: a wrong file of many GB is refused at once.
        for linear, pair in pairs.items():
            _check_linear(file, linear, pair, config=config, rules=rules, max_lora_rank=max_lora_rank, name=name)
        check_base_copies(file, copies, base_weights, config=config, name=name)
        modules: dict[ModuleId, LoraMatrices] = {}
        for linear, pair in pairs.items():
            whole = LoraMatrices(
                as_matrix(file.get_tensor(pair.a), dtype, tensor=pair.a, name=name),
                as_matrix(file.get_tensor(pair.b), dtype, tensor=pair.b, name=name),
                module_rule(rules, linear.module).scale,
            )
            modules |= cut_rows(linear.layer, linear.leaf, whole, config=config)
    check_weight_tying(fields, modules, config, name=name)
    return Adapter(name=name, modules=modules, config=fields, path=str(directory))


def _check_type(fields: Mapping[str, Any], name: str) -> None:
    kind = fields.get("peft_type")
    if kind is None:
        mlx = " It looks like one of MLX: convert it to PEFT's form." if "lora_parameters" in fields else ""
        has = listed(sorted(fields))
        raise AdapterError(f"adapter {name!r}: {CONFIG_FILE} is not PEFT's, it has no peft_type (fields: {has}).{mlx}")
    if kind != "LORA":
        raise AdapterError(f"adapter {name!r} has peft_type {kind!r}; this server serves 'LORA' only")


def _check_matched(pairs: Mapping[LinearId, Pair], unknown: list[str], config: ModelConfig, *, name: str) -> None:
    has = (
        f"the base model ({config.architecture}) has model.layers.0 to {config.num_layers - 1}, "
        f"each with {', '.join(config.projections)}; {EMBEDDING} and {HEAD}"
    )
    if unknown:
        raise AdapterError(
            f"adapter {name!r} has {len(unknown)} tensors that match no module: {listed(unknown)}; {has}. "
            "Was it trained for another model?"
        )
    if not pairs:
        raise AdapterError(f"adapter {name!r} has no LoRA tensors: {TENSORS_FILE} is without A and B; save it again")


def _check_linear(
    file: Any,
    linear: LinearId,
    pair: Pair,
    *,
    config: ModelConfig,
    rules: LoraRules,
    max_lora_rank: int | None,
    name: str,
) -> None:
    slices = [file.get_slice(tensor) for tensor in pair]
    for tensor, piece in zip(pair, slices, strict=True):
        if piece.get_dtype() not in _FLOATS:
            raise AdapterError(
                f"adapter {name!r}: tensor {tensor} has dtype {piece.get_dtype()}; supported: {', '.join(_FLOATS)}"
            )
    where = ModuleId(linear.layer, linear.leaf).path
    size = leaf_size(linear.leaf, config)
    shapes = _shapes(slices)
    rank = check_shapes(*shapes, where=where, size=size, tensors=pair, name=name)
    rule = module_rule(rules, linear.module)
    if rank != rule.rank:
        raise AdapterError(
            f"adapter {name!r}: {CONFIG_FILE} gives rank {rule.rank} at {where} ({rule.rank_source}), but tensor "
            f"{pair.a} has rank {rank} (shape {shapes[0]}): the two files do not belong together"
        )
    check_rank(rank, where=where, max_lora_rank=max_lora_rank, name=name)


def _shapes(slices: Iterable[Any]) -> tuple[list[int], list[int]]:
    a, b = (list(piece.get_shape()) for piece in slices)
    return a, b
