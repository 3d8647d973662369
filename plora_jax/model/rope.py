"""Rotary position embedding, the frequencies as the checkpoints' authors scale them.

Source: RoFormer (arXiv 2104.09864); Llama 3.1 scaling as in transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from plora_jax.config import RopeConfig
from strategies.rowwise import rotated


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """[H / 2] float32, radians per position."""
    freqs = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    if rope.kind == "linear":
        return (freqs / rope.factor).astype(np.float32)
    if rope.kind == "llama3":
        return _llama3(freqs, rope).astype(np.float32)
    return freqs.astype(np.float32)


def _llama3(freqs: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / freqs
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * freqs / rope.factor + smooth * freqs
    scaled = np.where(wavelength > low, freqs / rope.factor, freqs)
    return np.where((wavelength <= low) & (wavelength >= high), blended, scaled)


class Rotation(NamedTuple):
    """Cosines and sines of tokens' angles, [..., H / 2] float32 each."""

    cos: Any
    sin: Any


def rotation_of(positions: jax.Array, freqs: jax.Array) -> Rotation:
    """How tokens at positions [...] int32 are rotated, by frequencies [H / 2] float32."""
    angles = positions[..., None].astype(jnp.float32) * freqs
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, rotation: Rotation, dtype: Any, used: jax.Array | None = None) -> jax.Array:
    """Rotates halves: dimension i is paired with i + H / 2.

    Args:
        x: [..., heads, H] of `dtype`, or float32 that is first rounded to it.
        rotation: of the tokens [...].
        dtype: of the result.
        used: as `Context.used`.

    Returns:
        Same shape as x; computed in float32.
    """
    return rotated(x, rotation.cos, rotation.sin, dtype, used)
