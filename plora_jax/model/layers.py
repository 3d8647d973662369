"""The layers of a decoder as Flax NNX modules.

A module holds base weights only. What changes from request to request comes through a `Context`: a projection asks it
for the adapters' part, attention asks it to attend. So the same modules serve, train and check. With tensor parallelism
a module is one shard: weights and heads are its own, row-parallel projections add up over the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from plora_jax.model import scopes
from plora_jax.model.moe import routed_experts
from plora_jax.model.rope import rotate
from plora_jax.parallel import ROW_PARALLEL, TensorParallel
from strategies.products import Weights, products
from strategies.quantized import QuantizedWeights, largest_magnitude
from strategies.rowwise import add_rms_norm, gated, rms_norm


class LayerConstants(NamedTuple):
    """What differs between layers besides weights.

    Attributes:
        index: [] int32.
        rotation: rotary embedding of the tokens.
        window: [] int32, tokens a query sees.
        packed: weights of all layers that are kept in the order of a kernel or quantised, by projection.
        used: as `Context.used`.
    """

    index: Any
    rotation: Any
    window: Any
    packed: Mapping[str, Weights] = {}
    used: Any = None


class Context(Protocol):
    """The strategies as the model sees them. With tensor parallelism heads and widths are those of one shard."""

    def positions(self) -> jax.Array:
        """[...] int32, position of each token in its sequence."""
        ...

    def used(self) -> jax.Array | None:
        """[] int32, how many of the tokens there are: nobody reads what comes of the others; None for all."""
        ...

    def embed_delta(self, tokens: jax.Array) -> jax.Array | None:
        """What the adapters add to the embeddings of tokens [...]: [..., D] float32, whole on every shard, or None."""
        ...

    def adapt(self, sums: dict[str, jax.Array], x: jax.Array, layer: LayerConstants) -> dict[str, jax.Array]:
        """Adds what the adapters give to projections that share the input x [..., I].

        Args:
            sums: [..., O] float32 by projection: this shard's rows of column-parallel ones, its partial sum of
                row-parallel ones.
            x: the input.
            layer: which.

        Returns:
            The sums by the same names.
        """
        ...

    def attend(
        self, cache: Any, q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerConstants
    ) -> tuple[Any, jax.Array]:
        """Attention of q [..., N, H] over what the cache holds and the new k, v [..., K, H].

        Values are float32, to be rounded to the dtype of q and k.

        Returns:
            The cache with k and v, and the output [..., N, H].
        """
        ...


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., I] times weight [O, I], summed in float32 and left there: base products that are not packed."""
    return jnp.einsum("...I,OI->...O", x, weight, preferred_element_type=jnp.float32)


class DecoderLayer(nnx.Module):
    """Attention and MLP (or routed experts) of one layer, or of all layers when its parameters carry a leading axis L.

    Args:
        parallel: the model and its shards, of which this is one.
        params: its weights by the names of `ModelConfig.param_shapes`, without the "layers." prefix.
    """

    def __init__(self, parallel: TensorParallel, params: dict[str, Any]) -> None:
        self.parallel, self.config = parallel, parallel.shard_config
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))

    def __call__(
        self, x: jax.Array, out: jax.Array, cache: Any, context: Context, layer: LayerConstants
    ) -> tuple[jax.Array, jax.Array, Any]:
        """One layer.

        Args:
            x: [..., D] residual stream.
            out: [..., D] float32, what is still to be added to it: the norm that reads the sum adds in the same pass.
            cache: whatever the context attends over.
            context: adapters and attention.
            layer: constants of this layer.

        Returns:
            The residual stream, what is to be added to it, and the cache.
        """
        x, hidden = self._add("input_norm", x, out, layer)
        out, cache = self._attention(hidden, cache, context, layer)
        out = self._norm("post_attention_norm", out, x.dtype, layer) if self.config.post_norms else out
        x, hidden = self._add("pre_mlp_norm", x, out, layer)
        out = self._experts(hidden) if self.config.num_experts else self._mlp(hidden, context, layer)
        out = self._norm("post_mlp_norm", out, x.dtype, layer) if self.config.post_norms else out
        return x, out.astype(jnp.float32), cache

    def _add(self, name: str, x: jax.Array, out: jax.Array, layer: LayerConstants) -> tuple[jax.Array, jax.Array]:
        """The residual stream with `out` added, and the norm of that."""
        with jax.named_scope(scopes.NORM):
            c = self.config
            return add_rms_norm(x, out, self._weight(name), c.norm_eps, c.norm_offset, layer.used)

    def _norm(self, name: str, x: jax.Array, dtype: Any, layer: LayerConstants) -> jax.Array:
        with jax.named_scope(scopes.NORM):
            c = self.config
            return rms_norm(x, self._weight(name), c.norm_eps, c.norm_offset, dtype, layer.used)

    def _weight(self, name: str) -> jax.Array:
        return getattr(self, name)[...]

    def _project(
        self, x: jax.Array, names: Sequence[str], context: Context, layer: LayerConstants
    ) -> tuple[jax.Array, ...]:
        """Projections that share an input, with the adapters' part and the bias.

        Returns:
            Sums in float32: whatever reads one rounds it, since rounding alone is a pass of its own.
        """
        with jax.named_scope(scopes.PRODUCTS[names[0]]):
            sums = self._products(x, names, layer)
            for name in names:
                # Only column-parallel projections have a bias, which is then this shard's: it is added once.
                if hasattr(self, f"{name}_bias"):
                    sums[name] = sums[name] + self._weight(f"{name}_bias").astype(jnp.float32)
            sums = context.adapt(sums, x, layer)
            return tuple(self.parallel.add_up(sums[name]) if name in ROW_PARALLEL else sums[name] for name in names)

    def _products(self, x: jax.Array, names: Sequence[str], layer: LayerConstants) -> dict[str, jax.Array]:
        """x times the base weights of projections that share it, float32."""
        packed = [name for name in names if name in layer.packed]
        weights, largest = [layer.packed[name] for name in packed], None
        if names[0] in ROW_PARALLEL and any(isinstance(w, QuantizedWeights) for w in weights):
            # Every shard has a part of a row and rounds it as if it had the whole row.
            largest = self.parallel.largest(largest_magnitude(x)) if self.parallel.num_shards > 1 else None
        found = dict(zip(packed, products(x, weights, layer.index, largest=largest, used=layer.used), strict=True))
        return {name: found[name] if name in found else matmul(x, self._weight(name)) for name in names}

    def _attention(self, x: jax.Array, cache: Any, context: Context, layer: LayerConstants) -> tuple[jax.Array, Any]:
        c = self.config
        q, k, v = self._project(x, ("q_proj", "k_proj", "v_proj"), context, layer)
        q = q.reshape(*q.shape[:-1], c.num_heads, c.head_dim)
        k, v = (y.reshape(*y.shape[:-1], c.num_kv_heads, c.head_dim) for y in (k, v))
        if c.qk_norm:
            q, k = self._norm("q_norm", q, x.dtype, layer), self._norm("k_norm", k, x.dtype, layer)
        with jax.named_scope(scopes.ROTARY):
            q, k = (rotate(y, layer.rotation, x.dtype, layer.used) for y in (q, k))
        cache, out = context.attend(cache, q, k, v, layer)
        (out,) = self._project(out.reshape(*out.shape[:-2], -1), ("o_proj",), context, layer)
        return out, cache

    def _mlp(self, x: jax.Array, context: Context, layer: LayerConstants) -> jax.Array:
        gate, up = self._project(x, ("gate_proj", "up_proj"), context, layer)
        with jax.named_scope(scopes.ACTIVATION):
            active = gated(gate, up, self.config.activation, x.dtype, layer.used)
        (out,) = self._project(active, ("down_proj",), context, layer)
        return out

    def _experts(self, x: jax.Array) -> jax.Array:
        with jax.named_scope(scopes.EXPERTS):
            mixed = routed_experts(
                x,
                router=self._weight("router"),
                gate=self._weight("expert_gate"),
                up=self._weight("expert_up"),
                down=self._weight("expert_down"),
                config=self.config,
            )
            return self.parallel.add_up(mixed).astype(x.dtype)
