"""Near-data functions: jitted functions that run where the pool is.

Operands and results live in the pool; what the device wants of them it sends and fetches over the link itself
(`memory_pool.link`). The API moved between JAX versions; that difference is here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental import compute_on as _compute_on

from memory_pool import link

COMPUTE_TYPE = "device_host"
_wrap: Callable[..., Any] = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on


def near_data(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that runs near the data.

    Args:
        function: pure, on pool arrays only. Inside it `jnp.zeros`, `jnp.full`, `jnp.arange` and other constants on the
            device are refused when it is traced; Python scalars and arithmetic on operands are fine. Arithmetic between
            scalars gives one that counts as on the device: it may be combined with arrays, but what is broadcast from
            it, or indexed with it beside arrays of the pool, is refused. Nothing may move inside it (the audit checks).

    Returns:
        A function with the same arguments whose results are pool arrays. Gradients through it are not defined. Where
        the pool is emulated it is `function` itself, which runs on the device, as its operands are there.
    """
    if link.emulation():
        return function
    return _wrap(function, compute_type=COMPUTE_TYPE, out_memory_spaces=link.POOL)
