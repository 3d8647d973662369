"""The arrays behind all pages, and the copies between them.

Three arrays of one page format (`memory_pool.layout`), raw bits: the pool, in host memory; adapter pages and KV pages,
on the device, each as large as its byte budget. Page 0 of each is reserved: what only fills up a table points at it.
A step reads the pool and never writes it. Pages move here, between two steps, by programs that are compiled when the
memory is made: one program a batch size, and a copy of any number of pages is a sum of batches, so none is padded.

Where nothing computes near the data, each page is a copy of its own (`link.read_block`, `link.write_block`), page
numbers stay on the device, and pages of the host program get into the pool by way of the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from memory_pool import link
from memory_pool.huge_pages import use_huge_pages
from memory_pool.layout import PageLayout
from memory_pool.near import near_data
from memory_pool.raw import raw_dtype

COPY_PAGES = 8
"""Most pages of one copy."""

COPY_BYTES = 4 << 20
"""Most bytes of one copy, all shards together, where a page is not larger: no step waits longer than that takes."""

_SHARDED = PartitionSpec(link.TENSOR_AXIS)
_WHOLE = PartitionSpec()


class Copies(NamedTuple):
    """Copy functions on whole arrays, not compiled; n L rows are those of n shards.

    Attributes:
        write: (pool [n L, P, W], pages [n L, C, W], pool_ids [C]) -> pool.
        load: (to [n L, P, W], pool, ids [C], pool_ids [C]) -> to.
        save: (pool, from [n L, P, W], pool_ids [C], ids [C]) -> pool.
    """

    write: Callable[..., jax.Array]
    load: Callable[..., jax.Array]
    save: Callable[..., jax.Array]


def copies(mesh: Mesh, *, near: bool = True) -> Copies:
    """The copy functions for a mesh with the axis `tensor`; each shard copies its own rows.

    Args:
        mesh: devices.
        near: near-data functions do it: `pool_ids`, and the pages of `write`, are in the pool. Else they are on the
            device.

    Cost:
        load and save move C pages of every shard, page numbers are already there. So does write, unless `near`: then
        nothing crosses.
    """

    def write(pool: jax.Array, pages: jax.Array, pool_ids: jax.Array) -> jax.Array:
        return near_data(_put)(pool, pages, pool_ids) if near else _send(pool, pages, pool_ids)

    def load(to: jax.Array, pool: jax.Array, ids: jax.Array, pool_ids: jax.Array) -> jax.Array:
        pages = link.to_device(near_data(_take)(pool, pool_ids)) if near else _bring(pool, pool_ids)
        return _put(to, pages, ids)

    def save(pool: jax.Array, source: jax.Array, pool_ids: jax.Array, ids: jax.Array) -> jax.Array:
        pages = _take(source, ids)
        return near_data(_put)(pool, link.to_pool(pages), pool_ids) if near else _send(pool, pages, pool_ids)

    def sharded(function: Callable[..., jax.Array], *specs: PartitionSpec) -> Callable[..., jax.Array]:
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=_SHARDED, check_vma=False)

    return Copies(
        write=sharded(write, _SHARDED, _SHARDED, _WHOLE),
        load=sharded(load, _SHARDED, _SHARDED, _WHOLE, _WHOLE),
        save=sharded(save, _SHARDED, _SHARDED, _WHOLE, _WHOLE),
    )


class PageMemory:
    """Page arrays of a server. Owned by the engine's thread.

    Args:
        layout: of a page on one shard.
        mesh: devices, with the axis `tensor`.
        pool_devices: pool devices; device d owns pages [d * pool_pages, (d + 1) * pool_pages).
        pool_pages: pages of each pool device, the reserved one included.
        adapter_pages: pages of the adapter budget, the reserved one included.
        kv_pages: pages of the KV budget, the reserved one included.
        near: near-data functions copy pages; else each page is a copy of its own.

    Attributes:
        near: as given.
        pool: [n L, P, W] raw bits in the pool, n the shards of `tensor`.
        adapters: [n L, P, W] raw bits on the device.
        kv: [n L, P, W] raw bits on the device; a step takes it and gives it back, and whoever runs the step puts the
            result here.
        copy_pages: most pages of one copy.
        page_bytes: bytes of a page, all shards together.
    """

    def __init__(
        self,
        layout: PageLayout,
        mesh: Mesh,
        *,
        pool_devices: int,
        pool_pages: int,
        adapter_pages: int,
        kv_pages: int,
        near: bool = True,
    ) -> None:
        self.layout, self.mesh, self.near = layout, mesh, near
        self.num_shards = int(mesh.shape[link.TENSOR_AXIS])
        assert not layout.projections or layout.num_shards == self.num_shards, layout.num_shards
        self.pool_devices, self.pool_pages = pool_devices, pool_pages
        self.page_bytes = self.num_shards * layout.page_bytes
        self._raw = raw_dtype(layout.dtype)
        pool, device = link.pool_sharding(mesh, _SHARDED), link.device_sharding(mesh, _SHARDED)
        self.pool = link.allocate(self._shape(pool_devices * pool_pages), self._raw, pool)
        self.adapters = link.allocate(self._shape(adapter_pages), self._raw, device)
        self.kv = link.allocate(self._shape(kv_pages), self._raw, device)
        use_huge_pages(jax.block_until_ready([self.pool, self.adapters, self.kv]))
        most = max(1, min(COPY_PAGES, COPY_BYTES // self.page_bytes))
        self._sizes = [1 << power for power in reversed(range(most.bit_length()))]
        self.copy_pages = self._sizes[0]
        self._compile()

    @property
    def num_pool_pages(self) -> int:
        """Pages of all pool devices, the reserved ones included."""
        return self.pool.shape[1]

    @property
    def num_adapter_pages(self) -> int:
        return self.adapters.shape[1]

    @property
    def num_kv_pages(self) -> int:
        return self.kv.shape[1]

    def control_bytes(self, count: int) -> int:
        """Bytes of the page numbers that a load or save of `count` pages sends to the pool, all devices."""
        return count * np.dtype(np.int32).itemsize * self.mesh.size if self.near else 0

    def write(self, pool_ids: Sequence[int], pages: np.ndarray) -> int:
        """Writes pages of the host program into the pool.

        Args:
            pool_ids: [N] where to.
            pages: [n L, N, W] raw bits; not changed by anyone until the copy is done.

        Returns:
            Bytes over the link, all shards: 0 where near-data functions write, as both are host memory.

        Mutates:
            `pool`, in place.
        """
        for start, size in self._batches(len(pool_ids)):
            batch = np.ascontiguousarray(pages[:, start : start + size])
            self.pool = self._write[size](self.pool, batch, _ids(pool_ids, start, size))
        return 0 if self.near else len(pool_ids) * self.page_bytes

    def load_adapters(self, device_ids: Sequence[int], pool_ids: Sequence[int]) -> int:
        """Copies pages of the pool over adapter pages of the device.

        Returns:
            Bytes over the link to the device, all shards.

        Mutates:
            `adapters`, in place.
        """
        self.adapters = self._load(self._load_adapters, self.adapters, device_ids, pool_ids)
        return len(pool_ids) * self.page_bytes

    def load_kv(self, device_ids: Sequence[int], pool_ids: Sequence[int]) -> int:
        """Copies pages of the pool over KV pages of the device.

        Returns:
            Bytes over the link to the device, all shards.

        Mutates:
            `kv`, in place.
        """
        self.kv = self._load(self._load_kv, self.kv, device_ids, pool_ids)
        return len(pool_ids) * self.page_bytes

    def save_kv(self, pool_ids: Sequence[int], device_ids: Sequence[int]) -> int:
        """Copies KV pages of the device over pages of the pool.

        Returns:
            Bytes over the link to the pool, all shards.

        Mutates:
            `pool`, in place.
        """
        assert len(pool_ids) == len(device_ids), (pool_ids, device_ids)
        for start, size in self._batches(len(pool_ids)):
            ids = _ids(pool_ids, start, size), _ids(device_ids, start, size)
            self.pool = self._save_kv[size](self.pool, self.kv, *ids)
        return len(pool_ids) * self.page_bytes

    def kv_is_lost(self) -> bool:
        """Whether the KV pages of the device went down with a step that failed after it had taken them."""
        try:
            return bool(self.kv.is_deleted() or self.kv.block_until_ready().is_deleted())
        # What the step failed with, as the backend says it.
        except Exception:
            return True

    def renew_kv(self) -> None:
        """Has other KV pages on the device, empty ones.

        Mutates:
            `kv`.
        """
        self.kv = link.allocate(self.kv.shape, self._raw, link.device_sharding(self.mesh, _SHARDED))

    def _load(self, programs: dict[int, Any], to: jax.Array, ids: Sequence[int], pool_ids: Sequence[int]) -> jax.Array:
        assert len(ids) == len(pool_ids), (ids, pool_ids)
        for start, size in self._batches(len(ids)):
            to = programs[size](to, self.pool, _ids(ids, start, size), _ids(pool_ids, start, size))
        return to

    def _batches(self, count: int) -> list[tuple[int, int]]:
        """Start and size of each copy; the sizes are the powers of two that add up to `count`, largest first."""
        batches, start = [], 0
        for size in self._sizes:
            while count - start >= size:
                batches.append((start, size))
                start += size
        return batches

    def _shape(self, pages: int) -> tuple[int, int, int]:
        return self.num_shards * self.layout.num_layers, pages, self.layout.page_width

    def _compile(self) -> None:
        functions = copies(self.mesh, near=self.near)
        of_pool = link.pool_sharding if self.near else link.device_sharding
        running: list[dict[int, Future[Any]]] = [{}, {}, {}, {}]
        # While threads compile one or read it from the cache, the next is lowered.
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            for size in self._sizes:
                pool_ids, ids = _id_shape(size, of_pool(self.mesh)), _id_shape(size, link.device_sharding(self.mesh))
                pages = jax.ShapeDtypeStruct(self._shape(size), self._raw, sharding=of_pool(self.mesh, _SHARDED))
                for programs, function, *args in (
                    (running[0], functions.write, self.pool, pages, pool_ids),
                    (running[1], functions.load, self.adapters, self.pool, ids, pool_ids),
                    (running[2], functions.load, self.kv, self.pool, ids, pool_ids),
                    (running[3], functions.save, self.pool, self.kv, pool_ids, ids),
                ):
                    programs[size] = threads.submit(_lowered(function, *args).compile)
        self._write, self._load_adapters, self._load_kv, self._save_kv = (
            {size: program.result() for size, program in programs.items()} for programs in running
        )


def _take(pages: jax.Array, ids: jax.Array) -> jax.Array:
    """[L, P, W], [C] -> [L, C, W]; may run near the data."""
    return pages.at[:, ids].get(mode="promise_in_bounds")


def _put(pages: jax.Array, values: jax.Array, ids: jax.Array) -> jax.Array:
    """[L, P, W] with [L, C, W] over the pages [C]; may run near the data."""
    return pages.at[:, ids].set(values, mode="promise_in_bounds")


def _bring(pool: jax.Array, ids: jax.Array) -> jax.Array:
    """[L, P, W], [C] -> [L, C, W] on the device, a copy a page."""
    layers, _, width = pool.shape
    return jnp.concatenate([link.read_block(pool, (0, ids[c], 0), (layers, 1, width)) for c in range(len(ids))], 1)


def _send(pool: jax.Array, values: jax.Array, ids: jax.Array) -> jax.Array:
    """[L, P, W] with [L, C, W] of the device over the pages [C], a copy a page."""
    for c in range(len(ids)):
        pool = link.write_block(pool, values[:, c : c + 1], (0, ids[c], 0))
    return pool


def _lowered(function: Callable[..., jax.Array], *args: Any) -> Any:
    """A program that updates its first argument in place, to be compiled."""
    return jax.jit(function, donate_argnums=0).lower(*args)


def _id_shape(size: int, sharding: jax.sharding.NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), np.int32, sharding=sharding)


def _ids(ids: Sequence[int], start: int, size: int) -> np.ndarray:
    return np.array(ids[start : start + size], np.int32)
