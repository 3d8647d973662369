"""Checks that every way of reading an adapter shares: shapes against the base model, rank, values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plora_jax.adapters.adapter import EMBEDDING, HEAD, AdapterError, LoraMatrices, ModuleId
from plora_jax.adapters.keys import FUSED
from plora_jax.config import ModelConfig


def module_size(projection: str, config: ModelConfig) -> tuple[int, int]:
    """(O, I) of a projection of the base model.

    Args:
        projection: PEFT leaf name, also EMBEDDING, which is (D, V), and HEAD, which is (V, D).
        config: of the base model.
    """
    if projection == EMBEDDING:
        return config.hidden_size, config.vocab_size
    if projection == HEAD:
        return config.vocab_size, config.hidden_size
    return config.projections[projection]


def check_shapes(
    a: Sequence[int], b: Sequence[int], *, where: str, size: tuple[int, int], tensors: tuple[str, str], name: str
) -> int:
    """Holds the shapes of A and B against those of their linear layer.

    Args:
        a: shape of A.
        b: shape of B.
        where: the linear layer, "layers.0.q_proj".
        size: (O, I) of the linear layer.
        tensors: names of A and B.
        name: of the adapter.

    Returns:
        The rank R.

    Raises:
        AdapterError: another shape than A [R, I] and B [O, R] with R >= 1.
    """
    (out_size, in_size), rank = size, int(a[0]) if len(a) else 0
    wanted_a, wanted_b = [rank, in_size], [out_size, rank]
    if rank < 1 or list(a) != wanted_a:
        raise _shape_error(name, tensors[0], a, f"[rank, {in_size}]", where)
    if list(b) != wanted_b:
        raise _shape_error(name, tensors[1], b, f"{wanted_b}", where)
    return rank


def check_rank(rank: int, *, where: str, max_lora_rank: int | None, name: str) -> None:
    """Raises AdapterError for a rank above the limit."""
    if max_lora_rank is not None and rank > max_lora_rank:
        raise AdapterError(
            f"adapter {name!r} has rank {rank} at {where}; this server holds rank <= {max_lora_rank}: "
            "raise --max_lora_rank"
        )


def as_matrix(array: Any, dtype: Any, *, tensor: str, name: str) -> np.ndarray:
    """A copy of a tensor in the dtype that is served.

    Args:
        array: as read.
        dtype: numpy or ml_dtypes dtype; None keeps that of the array.
        tensor: its name.
        name: of the adapter.

    Raises:
        AdapterError: NaN or Inf in it, or a value that dtype cannot hold.
    """
    # Values beyond float16 become Inf in the cast; they are reported below and need no warning.
    with np.errstate(over="ignore"):
        matrix = np.array(array, dtype=array.dtype if dtype is None else dtype, order="C")
    if np.isfinite(matrix).all():
        return matrix
    if np.isfinite(array).all():
        raise AdapterError(f"adapter {name!r}: tensor {tensor} has values beyond {matrix.dtype}: serve another --dtype")
    raise AdapterError(f"adapter {name!r}: tensor {tensor} has NaN or Inf; training has diverged, save an earlier step")


def cut_rows(layer: int, leaf: str, matrices: LoraMatrices, *, config: ModelConfig) -> dict[ModuleId, LoraMatrices]:
    """A fused linear layer as its projections: they share A, and each has its rows of B.

    Args:
        layer: decoder layer, or OUTSIDE.
        leaf: PEFT leaf name; one that is not fused gives itself.
        matrices: of the whole.
        config: of the base model.
    """
    modules, start = {}, 0
    for projection in FUSED.get(leaf, (leaf,)):
        stop = start + module_size(projection, config)[0]
        modules[ModuleId(layer, projection)] = LoraMatrices(matrices.a, matrices.b[start:stop], matrices.scale)
        start = stop
    return modules


def leaf_size(leaf: str, config: ModelConfig) -> tuple[int, int]:
    """(O, I) of a projection as a file has it, fused or not."""
    sizes = [module_size(part, config) for part in FUSED.get(leaf, (leaf,))]
    return sum(out_size for out_size, _ in sizes), sizes[0][1]


def _shape_error(name: str, tensor: str, got: Sequence[int], wanted: str, where: str) -> AdapterError:
    return AdapterError(
        f"adapter {name!r}: tensor {tensor} has shape {list(got)}; {where} of the base model needs {wanted}. "
        "Was it trained for another model?"
    )
