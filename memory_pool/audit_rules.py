"""What an equation of a traced program may do to pool arrays; whatever else it does is refused with its place.

Types refuse most mixtures of device and pool arrays when they are traced. These rules close what types let through:
scatters of device values into the pool, sorts, host arithmetic outside near-data functions, callbacks, shardings that
name a memory the type does not, and transfers hidden inside near-data functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.extend import core

from memory_pool import link

NEAR_DATA = "compute_on"
TRANSFER = "device_put"
MARK = "name"
"""An identity with a name, which stands for a transfer where the pool is emulated."""
BLOCKS = frozenset({"dynamic_slice", "dynamic_update_slice"})
"""How `memory_pool/link.py` copies blocks out of the pool and into it."""
STRUCTURAL = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "scan", "while", "cond", "shard_map", "checkpoint", "remat", "remat2"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
)
"""Primitives that only pass their operands to the programs inside them."""

_NEAR_TYPE = "device_host"


class AuditError(ValueError):
    """A program that moves or touches pool arrays in a way that is not counted; names the operation and where."""


def in_pool(value: Any) -> bool:
    """Whether the type of a traced value, or of an array, says that it is in the pool."""
    aval = getattr(value, "aval", value)
    return getattr(aval, "memory_space", None) == link.POOL


def where(eqn: Any) -> str:
    """File and line of an equation, as the reader knows it."""
    frames = _own_frames(eqn)
    outside_link = [f for f in frames if f.file_name != link.__file__] or frames
    return f"{outside_link[0].file_name}:{outside_link[0].line_num}" if frames else "an unknown place"


def inner_programs(eqn: Any) -> list[core.Jaxpr | core.ClosedJaxpr]:
    """The programs that an equation carries as parameters."""
    values = [item for v in eqn.params.values() for item in (v if isinstance(v, tuple | list) else (v,))]
    return [v for v in values if isinstance(v, core.ClosedJaxpr | core.Jaxpr)]


def bare(program: core.Jaxpr | core.ClosedJaxpr) -> core.Jaxpr:
    """The program without the constants it holds."""
    return program.jaxpr if isinstance(program, core.ClosedJaxpr) else program


def check_shardings(shardings: Iterable[Any], at: str) -> None:
    """Refuses shardings under which a pool array can lose its host type.

    Raises:
        AuditError: a SingleDeviceSharding of the pool.
    """
    for sharding in shardings:
        if isinstance(sharding, jax.sharding.SingleDeviceSharding) and sharding.memory_kind == link.POOL_KIND:
            raise AuditError(
                f"{at} has SingleDeviceSharding(memory_kind={link.POOL_KIND!r}): arrays returned with it lose their "
                "host type and mix with device arrays unnoticed; use pool_sharding(mesh), which is a NamedSharding"
            )


def check_constants(program: core.Jaxpr | core.ClosedJaxpr, at: str) -> None:
    """The rule of shardings, for the arrays that a program has captured."""
    if isinstance(program, core.ClosedJaxpr):
        check_shardings((getattr(c, "sharding", None) for c in program.consts), f"an array captured by {at}")


def check_equation(eqn: Any) -> None:
    """Refuses what no equation outside near-data functions may do.

    Raises:
        AuditError: see the module.
    """
    name = eqn.primitive.name
    if _calls_back(name):
        raise AuditError(
            f"`{name}` at {where(eqn)}: a callback can read pool arrays that the trace does not show; a program whose "
            "traffic is counted has none"
        )
    compute_type = getattr(eqn.ctx, "compute_type", None)
    if compute_type is not None:
        raise AuditError(
            f"`{name}` at {where(eqn)} is under the context compute_on({compute_type!r}), which moves its operands "
            "uncounted: make it a near_data function"
        )
    params = eqn.params
    if name == TRANSFER:
        check_shardings(params["devices"], f"`{name}` at {where(eqn)}")
    _check_memory_of(eqn, eqn.invars, params.get("in_shardings", ()))
    _check_memory_of(eqn, eqn.outvars, params.get("out_shardings", ()))
    if name == "sharding_constraint":
        _check_memory_of(eqn, eqn.outvars, (params["sharding"],))
    if name == "while" and in_pool(decides := bare(params["cond_jaxpr"]).outvars[0]):
        raise AuditError(
            f"`while` at {where(eqn)} is decided by {decides.aval} in the pool, which the device would read uncounted: "
            "bring it with link.to_device first"
        )
    if name not in STRUCTURAL | {TRANSFER, NEAR_DATA} and not (name in BLOCKS and from_link(eqn)):
        _refuse_pool_values(eqn)


def check_near_data(eqn: Any) -> None:
    """Refuses near-data functions that take, give or capture device arrays, or move any inside.

    Raises:
        AuditError: see the module.
    """
    if eqn.params["compute_type"] != _NEAR_TYPE:
        raise AuditError(
            f"compute_on({eqn.params['compute_type']!r}) at {where(eqn)} does not run near the data: use near_data"
        )
    outside = [v.aval for v in (*eqn.invars, *eqn.outvars) if not in_pool(v)]
    if outside:
        raise AuditError(
            f"a near-data function at {where(eqn)} takes or gives {outside[0]}, which is in device memory: send it "
            "over the link first, and give results back to the pool"
        )
    for program in inner_programs(eqn):
        _check_inside(program, where(eqn))


def from_link(eqn: Any) -> bool:
    """Whether `memory_pool/link.py` itself made this transfer."""
    frames = _own_frames(eqn)
    return bool(frames) and frames[0].file_name == link.__file__


def _calls_back(name: str) -> bool:
    return "callback" in name or name == "debug_print"


def _check_inside(program: core.Jaxpr | core.ClosedJaxpr, at: str) -> None:
    """What runs near the data moves nothing and captures nothing of the device."""
    check_constants(program, f"a near-data function at {at}")
    captured = [v.aval for v in bare(program).constvars if not in_pool(v)]
    if captured:
        raise AuditError(
            f"a near-data function at {at} has captured {captured[0]}, which is in device memory: pass it as an "
            "operand that was sent with link.to_pool"
        )
    for eqn in bare(program).eqns:
        name = eqn.primitive.name
        moves = name == TRANSFER and any(in_pool(v) for v in (*eqn.invars, *eqn.outvars))
        if moves or name == "sharding_constraint" or _calls_back(name):
            raise AuditError(
                f"`{name}` at {where(eqn)} is inside the near-data function at {at}: what runs near the data moves "
                "nothing; use the link before and after it"
            )
        if name == NEAR_DATA:
            check_near_data(eqn)
            continue
        for inner in inner_programs(eqn):
            _check_inside(inner, at)


def _check_memory_of(eqn: Any, values: Any, shardings: Any) -> None:
    """Refuses a sharding whose memory is not that of the value's type."""
    check_shardings(shardings, f"`{eqn.primitive.name}` at {where(eqn)}")
    for value, sharding in zip(values, shardings, strict=False):
        kind = getattr(sharding, "memory_kind", None)
        if kind is not None and (kind == link.POOL_KIND) != in_pool(value):
            raise AuditError(
                f"`{eqn.primitive.name}` at {where(eqn)} puts {value.aval} in memory {kind!r}, an uncounted transfer: "
                "use link.to_pool or link.to_device"
            )


def _refuse_pool_values(eqn: Any) -> None:
    touched = [v.aval for v in (*eqn.invars, *eqn.outvars) if in_pool(v)]
    if touched:
        raise AuditError(
            f"`{eqn.primitive.name}` at {where(eqn)} touches {touched[0]} in the pool outside a near-data function"
        )


def _own_frames(eqn: Any) -> list[Any]:
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else list(traceback.frames)
    return [f for f in frames if "site-packages" not in f.file_name and "/jax/" not in f.file_name]
