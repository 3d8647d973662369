"""The whole decoder: embedding, layers under one scan, final norm, head.

The modules are built once around abstract weights and split; what remains is a static graph and pure functions over a
plain parameter tree, as `ModelConfig.param_shapes` lists it. Layers are stacked, so a call passes a handful of arrays.

With tensor parallelism the functions run inside a shard_map over the mesh axis `tensor`, on one shard's parameters; the
residual stream and the logits are whole on every shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from memory_pool import from_raw, to_raw
from plora_jax.config import ModelConfig
from plora_jax.model import scopes
from plora_jax.model.layers import Context, DecoderLayer, LayerConstants, matmul
from plora_jax.model.rope import Rotation, inverse_frequencies, rotation_of
from plora_jax.parallel import TensorParallel
from strategies.paged_attention import NO_WINDOW
from strategies.products import is_packed, products
from strategies.rowwise import add_rms_norm

Params = Mapping[str, Any]

PACKED_HEAD = "packed_head"
"""Key of the head's weights in the order of a kernel or as int8, [1, V, D] (`plora_jax.model.packed`)."""


def stack_as_raw(params: Params) -> Params:
    """The same tree with 16-bit layer weights kept as raw bits, which `Decoder.layers` takes as well.

    XLA on the CPU converts a stacked bfloat16 array to float32 as a whole before it takes a layer's slice of it in a
    loop: 180 ms instead of 40 a step of the default model. Raw bits are sliced as they are.
    """

    def raw(weight: Any) -> Any:
        if is_packed(weight) or weight.dtype.itemsize != 2 or _is_raw(weight):
            return weight
        return to_raw(weight)

    return {**params, "layers": {name: raw(weight) for name, weight in params["layers"].items()}}


def _is_raw(weight: Any) -> bool:
    return jnp.issubdtype(weight.dtype, jnp.unsignedinteger)


class Decoder:
    """Pure functions of a model; holds no weights.

    Args:
        config: of the whole model.
        num_shards: shards of the mesh axis `tensor`; 1 needs no mesh.

    Raises:
        ValueError: the model's heads or widths do not allow that number of shards.
    """

    def __init__(self, config: ModelConfig, *, num_shards: int = 1) -> None:
        self.config = config
        self.parallel = parallel = TensorParallel(config, num_shards)
        names = [path.removeprefix("layers.") for path in config.param_shapes() if path.startswith("layers.")]
        layer = nnx.eval_shape(lambda: DecoderLayer(parallel, {name: jnp.zeros(()) for name in names}))
        self._graph, state = nnx.split(layer)
        leaves, self._treedef = jax.tree.flatten_with_path(state)
        self._names = [path[0].key for path, _ in leaves]
        local = config.rope_local or config.rope
        ropes = [config.rope if window is None else local for window in config.layer_windows]
        self._ropes = list(dict.fromkeys(ropes))
        self._rope_of_layer = np.array([self._ropes.index(rope) for rope in ropes], np.int32)
        self._windows = np.array([NO_WINDOW if w is None else w for w in config.layer_windows], np.int32)

    def embed(self, params: Params, tokens: jax.Array, dtype: Any, *, context: Context | None = None) -> jax.Array:
        """Token ids to the residual stream.

        Args:
            params: parameter tree.
            tokens: [...] int32.
            dtype: compute dtype.
            context: adapters of the embedding; none by default.

        Returns:
            [..., D] of `dtype`.
        """
        table = params["embedding"]

        def rows(index: jax.Array) -> jax.Array:
            return from_raw(to_raw(table).at[index].get(mode="promise_in_bounds"), table.dtype)

        x = self.parallel.look_up(rows, tokens).astype(dtype)
        delta = None if context is None else context.embed_delta(tokens)
        if delta is not None:
            x = (x.astype(jnp.float32) + delta).astype(dtype)
        if self.config.embed_scale != 1.0:
            x = x * jnp.asarray(self.config.embed_scale, dtype)
        return x

    def layers(self, params: Params, x: jax.Array, cache: Any, context: Context) -> tuple[jax.Array, Any]:
        """All layers.

        Args:
            params: parameter tree.
            x: [..., D] residual stream.
            cache: carried through the layers and updated in place, e.g. KV pages.
            context: adapters and attention.

        Returns:
            [..., D] after the final norm, and the cache.
        """

        # Packed weights stay whole and are told the layer; the module has none of its own then.
        packed = {name: w for name, w in params["layers"].items() if is_packed(w)}
        sliced = {name: w for name, w in params["layers"].items() if name not in packed}

        with jax.named_scope(scopes.ROTARY):
            rotations = self._rotations(context.positions())
        used = context.used()

        def body(
            carry: tuple[jax.Array, jax.Array, Any], layer: tuple[Any, ...]
        ) -> tuple[tuple[jax.Array, jax.Array, Any], None]:
            weights, index, rope, window = layer
            weights = {name: from_raw(w, x.dtype) if _is_raw(w) else w for name, w in weights.items()}
            leaves = [weights[name] if name in weights else jnp.zeros((), x.dtype) for name in self._names]
            module = cast(DecoderLayer, nnx.merge(self._graph, jax.tree.unflatten(self._treedef, leaves)))
            rotation = jax.tree.map(lambda part: part[rope], rotations)
            return module(*carry, context, LayerConstants(index, rotation, window, packed, used)), None

        index = np.arange(self.config.num_layers, dtype=np.int32)
        layers = (sliced, *map(jnp.asarray, (index, self._rope_of_layer, self._windows)))
        (x, out, cache), _ = lax.scan(body, (x, jnp.zeros(x.shape, jnp.float32), cache), layers)
        with jax.named_scope(scopes.NORM):
            c = self.config
            return add_rms_norm(x, out, params["final_norm"], c.norm_eps, c.norm_offset, used)[1], cache

    def _rotations(self, positions: jax.Array) -> Rotation:
        """[kinds, ..., H / 2]: the rotations that layers have in common, computed once."""
        freqs = [jnp.asarray(inverse_frequencies(rope, self.config.head_dim)) for rope in self._ropes]
        kinds = [rotation_of(positions, of_kind) for of_kind in freqs]
        return Rotation(*map(jnp.stack, zip(*kinds, strict=True)))

    def logits(
        self, params: Params, hidden: jax.Array, *, adapt: Callable[[jax.Array], jax.Array] | None = None
    ) -> jax.Array:
        """Hidden states to logits.

        Args:
            params: parameter tree.
            hidden: [..., D] after the final norm.
            adapt: adds what adapters add to the head, before the soft cap, to logits float32 [..., V / n], this shard's
                part of the vocabulary, where that is sharded over n, else [..., V].

        Returns:
            [..., V] float32, whole on every shard.
        """
        if PACKED_HEAD in params:
            (logits,) = products(hidden, [params[PACKED_HEAD]], jnp.int32(0))
        else:
            head = params["embedding"] if self.config.tie_word_embeddings else params["head"]
            logits = matmul(hidden, head.astype(hidden.dtype))
        logits = logits if adapt is None else adapt(logits)
        cap = self.config.final_soft_cap
        return self.parallel.gather_vocabulary(logits if cap is None else cap * jnp.tanh(logits / cap))
