"""Tensors of 4 bits as GGUF files have them, brought to one form: blocks of 32 inputs with a scale and a least value.

That form is Q4_1's own (`strategies.block_weights`). Layouts: ggml's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gguf
import numpy as np

from plora_jax.gguf_file import GgufTensor
from strategies.block_weights import BLOCK_BYTES, BLOCK_INPUTS

_HALVES = BLOCK_INPUTS // 2
_SUPER_INPUTS = 256


def to_blocks(tensor: GgufTensor) -> np.ndarray:
    """[O, I / 32, 20] uint8 of a matrix [O, I] whose type is of BLOCKS_OF.

    Q4_0 and Q4_1 keep their values to the bit. The scales of Q4_K, products of two numbers, are rounded to float16.
    """
    out, inputs = tensor.shape
    return BLOCKS_OF[tensor.kind.name](np.asarray(tensor.data)).reshape(out, inputs // BLOCK_INPUTS, BLOCK_BYTES)


def _of_q4_1(data: np.ndarray) -> np.ndarray:
    return data


def _of_q4_0(data: np.ndarray) -> np.ndarray:
    """A weight is scale * (w - 8)."""
    blocks = data.reshape(-1, 2 + _HALVES)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16)
    return _joined(scales, scales * np.float16(-8), blocks[:, 2:])


def _of_q4_k(data: np.ndarray) -> np.ndarray:
    """Eight blocks share two numbers, which theirs of 6 bits multiply: scale * (scale * w) - least * least."""
    count, halves = data.size // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q4_K][1], _SUPER_INPUTS // 2
    blocks = data.reshape(count, -1)
    shared = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    scales, least = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:-halves])
    # 32 bytes have a block in their low halves and the next in the high ones.
    pairs = blocks[:, -halves:].reshape(count, 4, 1, BLOCK_INPUTS)
    values = (pairs >> np.array([0, 4], np.uint8)[:, None] & 15).reshape(-1, 2, _HALVES)
    return _joined(
        (shared[:, :1] * scales).astype(np.float16).reshape(-1, 1),
        (-shared[:, 1:] * least).astype(np.float16).reshape(-1, 1),
        values[:, 0] | values[:, 1] << 4,
    )


def _joined(scales: np.ndarray, least: np.ndarray, halves: np.ndarray) -> np.ndarray:
    """[N, 20] uint8 of float16 [N, 1] twice and uint8 [N, 16]."""
    return np.concatenate([scales.view(np.uint8), least.view(np.uint8), halves], axis=1)


BLOCKS_OF: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {"Q4_0": _of_q4_0, "Q4_1": _of_q4_1, "Q4_K": _of_q4_k}
"""The types that `to_blocks` takes, and how."""
