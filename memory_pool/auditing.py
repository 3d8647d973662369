"""Checks and counts what a traced program moves across the link.

The audit is independent of the ledger: it walks the closed jaxpr. Outside near-data functions only the transfers of
`memory_pool/link.py` may touch pool arrays (`memory_pool/audit_rules.py`), and the bytes of those transfers are added
up, times the length of the loops they are in. Where the pool is emulated (`memory_pool.link.emulation`) types do not
tell pool arrays from others: the audit then only counts the identities that stand for transfers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from memory_pool import audit_rules as rules
from memory_pool import link
from memory_pool.audit_rules import AuditError

__all__ = ["NO_TRAFFIC", "AuditError", "LinkTraffic", "audit"]


class LinkTraffic(NamedTuple):
    """Bytes over the link in one call, all devices together.

    Attributes:
        to_device: bytes read from the pool.
        to_pool: bytes written to it.
        transfers: number of transfers.
    """

    to_device: int
    to_pool: int
    transfers: int

    def plus(self, other: LinkTraffic, times: int = 1) -> LinkTraffic:
        return LinkTraffic(*(a + times * b for a, b in zip(self, other, strict=True)))


NO_TRAFFIC = LinkTraffic(0, 0, 0)


def audit(
    function: Callable[..., Any],
    *args: Any,
    loop_counts: Mapping[str, int] | None = None,
    control_args: Collection[int] = (),
) -> LinkTraffic:
    """Traces a function and checks and counts its transfers.

    Args:
        function: to be traced; jitted or not.
        args: arrays or shapes with shardings that carry the memory kind.
        loop_counts: how often the branches of a `cond` or the body of a `while` are run, by the name of the
            `jax.named_scope` they are in. Transfers in a loop without a count are refused.
        control_args: positions of arguments that each call brings from the host program. Their leaves in the pool
            (indices, page tables, flags) count as written to it, once on every device that gets a copy. All of their
            leaves count where the pool is emulated.

    Returns:
        Bytes in one call.

    Raises:
        AuditError: pool arrays are touched outside near-data functions and the link.
    """
    return AuditedProgram(function, *args, control_args=control_args).count(loop_counts)


class AuditedProgram:
    """A program that is traced once and counted for any number of loop counts; see `audit`.

    Args:
        function: to be traced; jitted or not.
        args: arrays or shapes with shardings that carry the memory kind.
        control_args: positions of arguments that each call brings from the host program.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, control_args: Collection[int] = ()) -> None:
        for leaf in jax.tree.leaves(args):
            rules.check_shardings((getattr(leaf, "sharding", None),), f"an argument of shape {np.shape(leaf)}")
        self._closed = jax.make_jaxpr(function)(*args)
        self._arguments = [_argument(leaf) for leaf in jax.tree.leaves([args[i] for i in control_args])]

    def count(self, loop_counts: Mapping[str, int] | None = None) -> LinkTraffic:
        """Checks the program and counts the bytes of one call."""
        traffic = _Walk(dict(loop_counts or {})).program(self._closed, shards=1)
        for argument in self._arguments:
            traffic = traffic.plus(argument)
        return traffic


class _Walk:
    def __init__(self, loop_counts: dict[str, int]) -> None:
        self._loop_counts = loop_counts

    def program(self, program: core.Jaxpr | core.ClosedJaxpr, *, shards: int) -> LinkTraffic:
        rules.check_constants(program, "a traced function")
        total = NO_TRAFFIC
        for eqn in rules.bare(program).eqns:
            total = total.plus(self._equation(eqn, shards=shards))
        return total

    def _equation(self, eqn: Any, *, shards: int) -> LinkTraffic:
        name = eqn.primitive.name
        rules.check_equation(eqn)
        if name == rules.TRANSFER:
            return _transfer(eqn, shards=shards)
        if name == rules.MARK:
            return _marked(eqn, shards=shards)
        if name == rules.NEAR_DATA:
            rules.check_near_data(eqn)
            return NO_TRAFFIC
        if name == "shard_map":
            shards *= _shards(eqn)
        traffic = [self.program(inner, shards=shards) for inner in rules.inner_programs(eqn)]
        moving = [t for t in traffic if t != NO_TRAFFIC]
        if not moving:
            return NO_TRAFFIC
        if name == "scan":
            return NO_TRAFFIC.plus(moving[0], times=eqn.params["length"])
        if name in ("while", "cond"):
            return self._counted(eqn, moving)
        total = NO_TRAFFIC
        for part in moving:
            total = total.plus(part)
        return total

    def _counted(self, eqn: Any, moving: list[LinkTraffic]) -> LinkTraffic:
        name, at = eqn.primitive.name, rules.where(eqn)
        if name == "while" and self.program(eqn.params["cond_jaxpr"], shards=1) != NO_TRAFFIC:
            raise AuditError(f"the condition of `while` at {at} has transfers: bring what it needs before the loop")
        if any(part != moving[0] for part in moving):
            raise AuditError(
                f"branches of `cond` at {at} move different amounts, {moving}: one count cannot tell how many; let "
                "only one branch use the link"
            )
        scopes = str(eqn.source_info.name_stack).split("/")
        counts = [self._loop_counts[scope] for scope in scopes if scope in self._loop_counts]
        if not counts:
            raise AuditError(
                f"transfers under `{name}` at {at} have no count: put it in a jax.named_scope and pass that name in "
                "loop_counts"
            )
        return NO_TRAFFIC.plus(moving[0], times=counts[-1])


def _transfer(eqn: Any, *, shards: int) -> LinkTraffic:
    to_device = to_pool = transfers = 0
    for before, after in zip(eqn.invars, eqn.outvars, strict=True):
        if rules.in_pool(before) == rules.in_pool(after):
            if rules.in_pool(before) and not rules.from_link(eqn):
                raise AuditError(f"`device_put` of {before.aval} inside the pool at {rules.where(eqn)}: leave it there")
            continue
        if not rules.from_link(eqn):
            raise AuditError(f"a transfer between memory spaces outside memory_pool/link.py, at {rules.where(eqn)}")
        size = shards * after.aval.size * after.aval.dtype.itemsize
        transfers += shards
        to_device, to_pool = (to_device + size, to_pool) if rules.in_pool(before) else (to_device, to_pool + size)
    return LinkTraffic(to_device, to_pool, transfers)


def _marked(eqn: Any, *, shards: int) -> LinkTraffic:
    """What an identity stands for: a transfer where the pool is emulated and `memory_pool/link.py` itself named it."""
    direction = link.MARKS.get(eqn.params["name"])
    if direction is None or not link.emulation() or not rules.from_link(eqn):
        return NO_TRAFFIC
    size = shards * sum(out.aval.size * out.aval.dtype.itemsize for out in eqn.outvars)
    return NO_TRAFFIC._replace(**{direction: size, "transfers": shards})


def _shards(eqn: Any) -> int:
    mesh = eqn.params["mesh"]
    return math.prod(mesh.shape[axis] for axis in eqn.params.get("manual_axes") or mesh.axis_names)


def _argument(leaf: Any) -> LinkTraffic:
    """An argument in the pool: each device that holds a part of it has received that part."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or (sharding.memory_kind != link.POOL_KIND and not link.emulation()):
        return NO_TRAFFIC
    devices = sharding.num_devices
    size = math.prod(sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    return LinkTraffic(0, devices * size, devices)
