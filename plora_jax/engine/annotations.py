"""Names of the host's parts of a step in traces, beside those of compiled programs (`plora_jax.model.scopes`).

They cost some hundred nanoseconds while nobody traces.
"""

from __future__ import annotations

import jax

STEP = "plora.step"
PLAN = "plora.plan"
PACK = "plora.pack"
DISPATCH = "plora.dispatch"
RESULTS = "plora.results"
DELIVER = "plora.deliver"


def annotate(part: str) -> jax.profiler.TraceAnnotation:
    """A context in which the calling thread is said to be at a part of a step."""
    return jax.profiler.TraceAnnotation(part)
