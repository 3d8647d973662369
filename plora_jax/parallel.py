"""Tensor parallelism: what each shard of the mesh axis `tensor` holds of a model, and how shards add up.

Every shard runs the same code on its own sizes (`shard_config`). A column-parallel projection (q, k, v, gate, up) has
the rows of its output on the shard: nothing is exchanged. A row-parallel one (o, down, the experts' down) has the
columns of its input and gives a partial sum, which `add_up` completes: base and adapters together, one reduction each.
KV heads are repeated where there are more shards than heads. Embedding and head are sharded by vocabulary where it
divides, else whole on every shard.

Source: Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memory_pool.layout import Cut
from memory_pool.link import TENSOR_AXIS, device_sharding
from plora_jax.config import ModelConfig

ROW_PARALLEL = ("o_proj", "down_proj")
EMBEDDING, HEAD = "embed_tokens", "lm_head"
"""PEFT leaf names of the embedding and the head as LoRA projections, (O, I) = (D, V) and (V, D)."""

_KV = ("k_proj", "v_proj")
_SHARDED_AXIS = {
    "q_proj": 1,
    "k_proj": 1,
    "v_proj": 1,
    "o_proj": 2,
    "gate_proj": 1,
    "up_proj": 1,
    "down_proj": 2,
    "q_proj_bias": 1,
    "k_proj_bias": 1,
    "v_proj_bias": 1,
    "expert_gate": 2,
    "expert_up": 2,
    "expert_down": 3,
}
"""Axis of the stacked layer parameters [L, ...] that is sharded; those that are not here are whole on every shard."""


def working_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Numbers of shards that a model's heads and widths allow."""
    return tuple(n for n in range(1, config.num_heads + 1) if not _obstacles(config, n))


def _obstacles(config: ModelConfig, shards: int) -> list[str]:
    heads, width, kv = config.num_heads, config.intermediate_size, config.num_kv_heads
    layer = "expert" if config.num_experts else "FFN"
    found = [f"does not divide the {heads} query heads"] if heads % shards else []
    found += [f"does not divide the {layer} width {width}"] if width % shards else []
    if kv % shards and shards % kv:
        found.append(f"neither divides the {kv} KV heads nor is a multiple of them")
    return found


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """One model over a number of shards.

    Attributes:
        config: of the whole model.
        num_shards: size of the mesh axis `tensor`.

    Raises:
        ValueError: the model's heads or widths do not allow that number; lists those that work.
    """

    config: ModelConfig
    num_shards: int = 1

    def __post_init__(self) -> None:
        n = self.num_shards
        if n < 1:
            raise ValueError(f"--tensor_parallel_size must be at least 1, got {n}")
        if obstacles := _obstacles(self.config, n):
            choices = _listed(map(str, working_sizes(self.config)), "or")
            raise ValueError(f"--tensor_parallel_size {n} {_listed(obstacles, 'and')}: choose {choices}")

    @functools.cached_property
    def shard_config(self) -> ModelConfig:
        """The numbers of one shard: heads and FFN (or expert) width; the vocabulary stays that of the model."""
        c, n = self.config, self.num_shards
        if n == 1:
            return c
        return dataclasses.replace(
            c,
            num_heads=c.num_heads // n,
            num_kv_heads=max(c.num_kv_heads // n, 1),
            intermediate_size=c.intermediate_size // n,
        )

    @property
    def kv_repeated(self) -> bool:
        """Whether several shards hold the same KV head."""
        return self.config.num_kv_heads < self.num_shards

    @property
    def vocabulary_sharded(self) -> bool:
        """Whether embedding and head are sharded by rows; else every shard holds them whole."""
        return self.num_shards > 1 and self.config.vocab_size % self.num_shards == 0

    @functools.cached_property
    def cuts(self) -> Mapping[str, Cut]:
        """What each shard holds of the LoRA matrices of every projection, embedding and head last."""
        c, n = self.config, self.num_shards
        cuts = {}
        for name, (out, inputs) in c.projections.items():
            if name in ROW_PARALLEL:
                cuts[name] = Cut(_all_of(out, n), _shares(inputs, n))
            else:
                cuts[name] = Cut(self._kv_shares() if name in _KV else _shares(out, n), _all_of(inputs, n))
        rows = _shares(c.vocab_size, n) if self.vocabulary_sharded else _all_of(c.vocab_size, n)
        cuts[EMBEDDING] = Cut(_all_of(c.hidden_size, n), _all_of(c.vocab_size, n), spread=True)
        cuts[HEAD] = Cut(rows, _all_of(c.hidden_size, n), spread=True)
        return cuts

    def _kv_shares(self) -> tuple[tuple[int, int], ...]:
        c, n = self.config, self.num_shards
        if not self.kv_repeated:
            return _shares(c.num_kv_heads * c.head_dim, n)
        heads = (shard * c.num_kv_heads // n for shard in range(n))
        return tuple((head * c.head_dim, (head + 1) * c.head_dim) for head in heads)

    def spec(self, path: str) -> PartitionSpec:
        """How a parameter of `ModelConfig.param_shapes` that `place` has placed lies over the mesh.

        Args:
            path: dotted path in the parameter tree.
        """
        if path in ("embedding", "head"):
            return PartitionSpec(TENSOR_AXIS) if self.vocabulary_sharded else PartitionSpec()
        axis = _SHARDED_AXIS.get(path.removeprefix("layers."))
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, TENSOR_AXIS)

    def param_specs(self) -> dict[str, Any]:
        """`spec` of every parameter, nested as the parameter tree is: in_specs of a shard_map."""
        tree: dict[str, Any] = {"layers": {}}
        for path in self.config.param_shapes():
            folder, _, leaf = path.rpartition(".")
            (tree[folder] if folder else tree)[leaf] = self.spec(path)
        return tree

    def sharding_of(self, mesh: Mesh) -> Callable[[str, tuple[int, ...]], NamedSharding]:
        """Where `load_model` reads a parameter to, so that `place` finds every shard's part on its device.

        Args:
            mesh: with the one axis `tensor` of `num_shards` devices.
        """

        def sharding(path: str, shape: tuple[int, ...]) -> NamedSharding:
            del shape
            if not self._is_repeated(path):
                return device_sharding(mesh, self.spec(path))
            # Shard s holds head s * K // n: the devices as K groups, one head each.
            heads = self.config.num_kv_heads
            groups = Mesh(mesh.devices.reshape(heads, -1), ("kv_head", "copy"))
            return device_sharding(groups, PartitionSpec(None, "kv_head"))

        return sharding

    def place(self, params: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
        """Parameters as the shards use them.

        Args:
            params: tree of `ModelConfig.param_shapes`, arrays on any devices or of numpy, raw bits or numbers.
            mesh: with the one axis `tensor` of `num_shards` devices.

        Returns:
            The tree sharded by `param_specs`. K and V weights and biases whose heads are repeated have n * H rows.

        Cost:
            No copy of what was loaded with `sharding_of`; of other arrays one copy, beside the caller's.
        """
        sharding_of = self.sharding_of(mesh)

        def one(path: tuple[Any, ...], value: Any) -> jax.Array:
            name = ".".join(key.key for key in path)
            placed = jax.device_put(value, sharding_of(name, value.shape))
            if not self._is_repeated(name):
                return placed
            shape = (value.shape[0], self.num_shards * self.config.head_dim, *value.shape[2:])
            parts = [shard.data for shard in placed.addressable_shards]
            return jax.make_array_from_single_device_arrays(shape, device_sharding(mesh, self.spec(name)), parts)

        return jax.tree.map_with_path(one, dict(params))

    def placed_shapes(self, mesh: Mesh, dtype: np.dtype) -> dict[str, Any]:
        """Shapes, dtypes and shardings of what `place` returns, before there is any of it.

        Args:
            mesh: as `place` takes it.
            dtype: of all parameters.
        """
        shapes = self.config.param_shapes()

        def one(path: tuple[Any, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            name = ".".join(key.key for key in path)
            shape = shapes[name]
            if self._is_repeated(name):
                shape = (shape[0], self.num_shards * self.config.head_dim, *shape[2:])
            return jax.ShapeDtypeStruct(shape, dtype, sharding=device_sharding(mesh, spec))

        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        return jax.tree.map_with_path(one, self.param_specs(), is_leaf=is_spec)

    def _is_repeated(self, path: str) -> bool:
        return self.kv_repeated and path.removeprefix("layers.").removesuffix("_bias") in _KV

    def add_up(self, partial: jax.Array) -> jax.Array:
        """Inside a shard: the sum of all shards' partial results."""
        return partial if self.num_shards == 1 else lax.psum(partial, TENSOR_AXIS)

    def largest(self, partial: jax.Array) -> jax.Array:
        """Inside a shard: element by element the largest of all shards' values."""
        return partial if self.num_shards == 1 else lax.pmax(partial, TENSOR_AXIS)

    def look_up(self, rows: Callable[[jax.Array], jax.Array], tokens: jax.Array) -> jax.Array:
        """Inside a shard: rows of a table that is sharded by vocabulary.

        Args:
            rows: from indices [...] into this shard's part of the table to its rows [..., D].
            tokens: [...] int32 token ids.

        Returns:
            [..., D] of `rows`, on every shard; exact, since all but one addend are 0.
        """
        if not self.vocabulary_sharded:
            return rows(tokens)
        size = self.config.vocab_size // self.num_shards
        local = tokens - lax.axis_index(TENSOR_AXIS) * size
        here = (local >= 0) & (local < size)
        found = rows(jnp.clip(local, 0, size - 1))
        return lax.psum(jnp.where(here[..., None], found, 0), TENSOR_AXIS)

    def gather_vocabulary(self, share: jax.Array) -> jax.Array:
        """Inside a shard: [..., V] from every shard's part of the last axis."""
        if not self.vocabulary_sharded:
            return share
        return lax.all_gather(share, TENSOR_AXIS, axis=share.ndim - 1, tiled=True)


def _listed(items: Iterable[str], joint: str) -> str:
    *rest, last = items
    return f"{', '.join(rest)} {joint} {last}" if rest else last


def _shares(size: int, shards: int) -> tuple[tuple[int, int], ...]:
    return tuple((s * size // shards, (s + 1) * size // shards) for s in range(shards))


def _all_of(size: int, shards: int) -> tuple[tuple[int, int], ...]:
    return ((0, size),) * shards
