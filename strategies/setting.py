"""What is fixed when a program is compiled: page sizes, kernels, the widest rank. The lanes are data."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from memory_pool.layout import PageLayout
from strategies.kernel_tables import KernelSet
from strategies.rowwise import add_rows

Sums = dict[str, jax.Array]
"""[N, O] float32 by projection: what a step has of the outputs so far."""


class LoraSetting(NamedTuple):
    """How one phase applies adapters to the projections that share an input.

    Attributes:
        layout: of pages.
        group: names of the projections.
        max_rank: most rank components of an adapter on one pool device.
        device: kernels on the device.
        near: kernels near the data; None where nothing computes there, and pages are copied block by block.
    """

    layout: PageLayout
    group: tuple[str, ...]
    max_rank: int
    device: KernelSet
    near: KernelSet | None

    @property
    def at_the_data(self) -> KernelSet:
        """Kernels that can run near the data, for strategies that are nowhere without."""
        assert self.near is not None, "nothing computes near the data"
        return self.near.near_the_data()

    def added(self, sums: Mapping[str, jax.Array], parts: Sequence[Sequence[jax.Array]], *, first: int) -> Sums:
        """Sums with what the stripes give; each gives one array a projection, [T, O] bfloat16 or float32.

        Args:
            sums: [N, O] float32 by projection; N is at least `first` + T.
            parts: by stripe.
            first: row of `sums` that belongs to the first token.
        """
        own = [sums[name] for name in self.group]
        return dict(zip(self.group, add_rows(own, self.total(parts), first=first), strict=True))

    def total(self, parts: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """By projection, the sum of what the stripes give; each gives one array a projection."""
        if len(parts) == 1:
            return list(parts[0])
        return [functools.reduce(jnp.add, (y.astype(jnp.float32) for y in part)) for part in zip(*parts, strict=True)]


class AttentionSetting(NamedTuple):
    """How one phase attends.

    Attributes:
        layout: of pages.
        device: kernels on the device.
        near: kernels near the data; None where nothing computes there, and pages are copied block by block.
    """

    layout: PageLayout
    device: KernelSet
    near: KernelSet | None

    @property
    def at_the_data(self) -> KernelSet:
        """Kernels that can run near the data, for strategies that are nowhere without."""
        assert self.near is not None, "nothing computes near the data"
        return self.near.near_the_data()
