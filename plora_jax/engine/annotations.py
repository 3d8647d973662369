"""Names of the host's parts of a step in traces, beside those of compiled programs (`plora_jax.model.scopes`).

They cost some hundred nanoseconds while nobody traces.
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager

STEP = "plora.step"
PLAN = "plora.plan"
PACK = "plora.pack"
DISPATCH = "plora.dispatch"
RESULTS = "plora.results"
DELIVER = "plora.deliver"


def annotate(part: str) -> AbstractContextManager[object]:
    """A context in which the calling thread is said to be at a part of a step."""
    # Code that plans runs without JAX, and then there is no profiler either.
    profiler = sys.modules.get("jax.profiler")
    return contextlib.nullcontext() if profiler is None else profiler.TraceAnnotation(part)
