"""Checks and counts what a traced program moves across the link.

The audit is independent of the ledger: it walks the closed jaxpr. Outside near-data functions only the transfers of
`memory_pool/link.py` may touch pool arrays, so a scatter of device values into the pool, a sort or a callback on it, or
host arithmetic that nobody asked for is refused; and the bytes of the transfers are added up, times the length of the
loops they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

from memory_pool import link

_LINK_FILE = link.__file__
_NEAR_DATA = "compute_on"
_TRANSFER = "device_put"


class AuditError(ValueError):
    """A program that moves or touches pool arrays in a way that is not counted; names the operation and where."""


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


def audit(function: Callable[..., Any], *args: Any, loop_counts: Mapping[str, int] | None = None) -> LinkTraffic:
    """Traces a function and checks and counts its transfers.

    Args:
        function: to be traced; jitted or not.
        args: arrays or shapes with shardings that carry the memory kind.
        loop_counts: how often the branches of a `cond` or the body of a `while` are run, by the name of the
            `jax.named_scope` they are in. Transfers in a loop without a count are refused.

    Returns:
        Bytes in one call.

    Raises:
        AuditError: pool arrays are touched outside near-data functions and the link.
    """
    closed = jax.make_jaxpr(function)(*args)
    return _Walk(dict(loop_counts or {})).jaxpr(closed.jaxpr, shards=1)


class _Walk:
    def __init__(self, loop_counts: dict[str, int]) -> None:
        self._loop_counts = loop_counts

    def jaxpr(self, jaxpr: core.Jaxpr, *, shards: int) -> LinkTraffic:
        total = NO_TRAFFIC
        for eqn in jaxpr.eqns:
            total = total.plus(self._equation(eqn, shards=shards))
        return total

    def _equation(self, eqn: Any, *, shards: int) -> LinkTraffic:
        name = eqn.primitive.name
        if name == _TRANSFER:
            return _transfer(eqn, shards=shards)
        if name == _NEAR_DATA:
            return _near_data(eqn)
        inner = _inner_jaxprs(eqn)
        if not inner:
            _refuse_pool_values(eqn)
            return NO_TRAFFIC
        if name == "shard_map":
            shards *= eqn.params["mesh"].size
        traffic = [self.jaxpr(jaxpr, shards=shards) for jaxpr in inner]
        if name == "scan":
            return NO_TRAFFIC.plus(traffic[0], times=eqn.params["length"])
        if name in ("while", "cond"):
            return self._counted(eqn, traffic)
        total = NO_TRAFFIC
        for part in traffic:
            total = total.plus(part)
        return total

    def _counted(self, eqn: Any, traffic: list[LinkTraffic]) -> LinkTraffic:
        busiest = max(traffic, key=lambda t: t.to_device + t.to_pool)
        if busiest == NO_TRAFFIC:
            return NO_TRAFFIC
        scopes = str(eqn.source_info.name_stack).split("/")
        counts = [self._loop_counts[scope] for scope in scopes if scope in self._loop_counts]
        if not counts:
            raise AuditError(
                f"transfers under `{eqn.primitive.name}` at {_where(eqn)} have no count: put it in a jax.named_scope "
                "and pass that name in loop_counts"
            )
        return NO_TRAFFIC.plus(busiest, times=counts[-1])


def _transfer(eqn: Any, *, shards: int) -> LinkTraffic:
    to_device = to_pool = transfers = 0
    for before, after in zip(eqn.invars, eqn.outvars, strict=True):
        if _in_pool(before) == _in_pool(after):
            continue
        if not _from_link(eqn):
            raise AuditError(f"a transfer between memory spaces outside memory_pool/link.py, at {_where(eqn)}")
        size = shards * after.aval.size * after.aval.dtype.itemsize
        transfers += shards
        to_device, to_pool = (to_device + size, to_pool) if _in_pool(before) else (to_device, to_pool + size)
    return LinkTraffic(to_device, to_pool, transfers)


def _near_data(eqn: Any) -> LinkTraffic:
    outside = [v.aval for v in (*eqn.invars, *eqn.outvars) if not _in_pool(v)]
    if outside:
        raise AuditError(
            f"a near-data function at {_where(eqn)} takes or gives {outside[0]}, which is in device memory: send it "
            "over the link first, and give results back to the pool"
        )
    return NO_TRAFFIC


def _refuse_pool_values(eqn: Any) -> None:
    touched = [v.aval for v in (*eqn.invars, *eqn.outvars) if _in_pool(v)]
    if touched:
        raise AuditError(
            f"`{eqn.primitive.name}` at {_where(eqn)} touches {touched[0]} in the pool outside a near-data function"
        )


def _in_pool(var: Any) -> bool:
    return getattr(var.aval, "memory_space", None) == link.POOL


def _inner_jaxprs(eqn: Any) -> list[core.Jaxpr]:
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, core.Jaxpr):
                found.append(item)
    return found


def _frames(eqn: Any) -> list[Any]:
    traceback = eqn.source_info.traceback
    return [] if traceback is None else list(traceback.frames)


def _from_link(eqn: Any) -> bool:
    return any(frame.file_name == _LINK_FILE for frame in _frames(eqn))


def _where(eqn: Any) -> str:
    ours = [f for f in _frames(eqn) if "site-packages" not in f.file_name and "/jax/" not in f.file_name]
    return f"{ours[0].file_name}:{ours[0].line_num}" if ours else "an unknown place"
