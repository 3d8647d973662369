"""Many small arrays as one: a step takes some hundred tables, and handing over each costs more than its bytes.

The arrays are laid end to end as 32-bit words in one buffer, which the program cuts up again with static slices. So a
step has one transfer for the device and one for the pool, whatever the number of lanes.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import numpy as np
from jax import lax


class PackedArrays:
    """Packs pytrees of one structure and one set of shapes.

    Args:
        template: pytree of numpy arrays or scalars of int32, uint32, float32 or bool.
    """

    def __init__(self, template: Any) -> None:
        leaves, self._structure = jax.tree.flatten(template)
        self._shapes = [np.shape(leaf) for leaf in leaves]
        self._dtypes = [np.asarray(leaf).dtype for leaf in leaves]
        for dtype in self._dtypes:
            assert dtype == np.bool_ or dtype.itemsize == 4, dtype
        ends = list(itertools.accumulate(map(math.prod, self._shapes)))
        self.num_words = ends[-1] if ends else 0
        self._parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def pack(self, tree: Any) -> np.ndarray:
        """[num_words] int32 of a pytree of numpy arrays with the template's structure and shapes."""
        leaves, structure = jax.tree.flatten(tree)
        assert structure == self._structure
        out = np.empty(max(self.num_words, 1), np.int32)
        for leaf, part, shape, dtype in zip(leaves, self._parts, self._shapes, self._dtypes, strict=True):
            assert leaf.shape == shape, (leaf.shape, shape)
            assert leaf.dtype == dtype, (leaf.dtype, dtype)
            flat = leaf.reshape(-1)
            out[part] = flat if dtype == np.bool_ else flat.view(np.int32)
        return out

    def unpack(self, words: jax.Array) -> Any:
        """The pytree again, inside a traced function. Works near the data as well: it slices and reinterprets only."""
        leaves, start = [], 0
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            size = math.prod(shape)
            part = lax.slice_in_dim(words, start, start + size).reshape(shape)
            if dtype == np.bool_:
                leaves.append(part != part * 0)
            else:
                leaves.append(part if dtype == np.int32 else lax.bitcast_convert_type(part, dtype))
            start += size
        return jax.tree.unflatten(self._structure, leaves)
