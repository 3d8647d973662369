"""From named tensors in files to the parameter tree: what every reader shares.

A reader lists its tensors as `Tensor` values, each with its places in the tree. `assemble` checks the whole list
before it reads anything, then fills one stacked host buffer at a time and hands it to the devices, so that the peak is
the parameters once and one parameter more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from plora_jax.checkpoints.names import Part
from plora_jax.config import ConfigError, ModelConfig
from strategies.block_weights import BLOCK_BYTES, BLOCK_INPUTS

Params = dict[str, Any]
ShardingOf = Callable[[str, tuple[int, ...]], Sharding]
Progress = Callable[[int, int], None]
"""Called with bytes of the finished parameters done so far, and in total."""

KeepBlocks = Callable[[str, tuple[int, ...]], bool]
"""From the path and shape [L, O, I] of a parameter that a file has in 4-bit blocks to whether it stays in them: uint8
[L, O, I / 32, 20], as `strategies.block_weights` takes them."""

_DTYPES: Mapping[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
_LISTED = 8


class WeightsError(ValueError):
    """A checkpoint whose tensors do not fit its model; the message lists names and shapes."""


class Tensor(NamedTuple):
    """One piece of a parameter in a file.

    Attributes:
        name: in the file.
        shape: of this piece, as the file has it.
        part: where it belongs.
        read: loads it, in any float dtype or as blocks.
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    read: Callable[[], np.ndarray]


def resolve_dtype(dtype: str, config: ModelConfig) -> str:
    """ "float32" or "bfloat16"; "auto" is the published dtype, bfloat16 for models published in float16.

    Raises:
        ConfigError: another dtype.
    """
    if dtype == "auto":
        return "float32" if config.dtype == "float32" else "bfloat16"
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; choose auto, float32 or bfloat16")
    return dtype


def numpy_dtype(dtype: str) -> Any:
    """The numpy dtype of a resolved name."""
    return np.dtype(_DTYPES[dtype])


def one_device_sharding(path: str, shape: tuple[int, ...]) -> Sharding:
    """Everything on the first device. A NamedSharding, because others lose the memory space of an array."""
    del path, shape
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("device",)), PartitionSpec())


def nest(flat: Mapping[str, Any]) -> Params:
    """{"layers.q_proj": x} to {"layers": {"q_proj": x}}."""
    tree: Params = {}
    for path, value in flat.items():
        *folders, leaf = path.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = value
    return tree


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `nest`."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{path}": leaf for path, leaf in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def assemble(
    config: ModelConfig,
    tensors: Iterable[Tensor],
    *,
    dtype: str,
    source: str,
    extra: Iterable[str] = (),
    names: Mapping[Part, str] | None = None,
    blocks: Container[str] = (),
    sharding_of: ShardingOf | None = None,
    progress: Progress | None = None,
) -> Params:
    """The parameter tree of a model.

    Args:
        config: of the model.
        tensors: every piece that the files hold.
        dtype: "float32" or "bfloat16".
        source: file or directory, for messages.
        extra: names of tensors in the files that belong nowhere.
        names: what the files call each part, for messages about missing ones.
        blocks: paths of the parameters that stay in 4-bit blocks.
        sharding_of: sharding of a parameter from its path and shape; one device by default.
        progress: told after every parameter.

    Returns:
        `ModelConfig.param_shapes` as a nested dict of arrays.

    Raises:
        WeightsError: missing, extra or misshaped tensors, all in one message.
    """
    shapes = config.param_shapes()
    by_path: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_path[tensor.part.path].append(tensor)
    _check(config, by_path, source=source, extra=list(extra), names=names or {})
    kept = {path: _kept_as(shape, numpy_dtype(dtype), blocks=path in blocks) for path, shape in shapes.items()}
    total, done = sum(math.prod(shape) * own.itemsize for shape, own in kept.values()), 0
    flat: dict[str, jax.Array] = {}
    for path, (shape, own) in kept.items():
        buffer = np.empty(shape, own)
        for tensor in by_path[path]:
            buffer[tensor.part.at] = tensor.read()
        sharding = (sharding_of or one_device_sharding)(path, shape)
        flat[path] = jax.make_array_from_callback(shape, sharding, buffer.__getitem__)
        done += buffer.nbytes
        if progress is not None:
            progress(done, total)
    return nest(flat)


def _kept_as(shape: tuple[int, ...], dtype: np.dtype, *, blocks: bool) -> tuple[tuple[int, ...], np.dtype]:
    if not blocks:
        return shape, dtype
    return (*shape[:-1], shape[-1] // BLOCK_INPUTS, BLOCK_BYTES), np.dtype(np.uint8)


def check_tree(config: ModelConfig, found: Mapping[str, tuple[int, ...]], *, source: str) -> None:
    """Compares whole parameters with those of a model.

    Args:
        config: of the model.
        found: shape by dotted path.
        source: file or directory, for the message.

    Raises:
        WeightsError: missing, extra or misshaped parameters.
    """
    wanted = config.param_shapes()
    _report(
        config,
        source=source,
        missing=[f"{path} {list(shape)}" for path, shape in wanted.items() if path not in found],
        extra=[f"{path} {list(shape)}" for path, shape in found.items() if path not in wanted],
        bad=[
            f"{path}: got {list(shape)}, wanted {list(wanted[path])}"
            for path, shape in found.items()
            if path in wanted and shape != wanted[path]
        ],
    )


def _check(
    config: ModelConfig,
    by_path: Mapping[str, list[Tensor]],
    *,
    source: str,
    extra: list[str],
    names: Mapping[Part, str],
) -> None:
    shapes = config.param_shapes()
    found: dict[Part, str] = {}
    bad, missing = [], []
    for path, tensors in by_path.items():
        for tensor in tensors:
            if tensor.part in found:
                bad.append(f"{tensor.name} holds the same weights as {found[tensor.part]}")
            found[tensor.part] = tensor.name
            wanted = shapes[path][len(tensor.part.at) :]
            if tensor.shape != wanted:
                bad.append(f"{tensor.name}: got {list(tensor.shape)}, wanted {list(wanted)}")
    for path, shape in shapes.items():
        depth = max((len(t.part.at) for t in by_path[path]), default=min(1, path.count(".")))
        for index in np.ndindex(shape[:depth]):
            part = Part(path, index)
            if part not in found:
                missing.append(f"{names.get(part) or _describe(part)} {list(shape[depth:])}")
    _report(config, source=source, missing=missing, extra=extra, bad=bad)


def _report(config: ModelConfig, *, source: str, missing: list[str], extra: list[str], bad: list[str]) -> None:
    problems = [
        f"{len(items)} {kind}: {_some(items)}"
        for kind, items in (("missing", missing), ("not expected", sorted(extra)), ("misshaped", bad))
        if items
    ]
    if problems:
        raise WeightsError(f"{source} does not fit a {config.architecture} model: {'; '.join(problems)}")


def _describe(part: Part) -> str:
    return part.path + "".join(f"[{i}]" for i in part.at)


def _some(items: list[str]) -> str:
    more = len(items) - _LISTED
    return ", ".join(items[:_LISTED]) + (f" and {more} more" if more > 0 else "")
