"""The parts of a step as a breakdown names them, from the names that programs and the host's annotations carry."""

from __future__ import annotations

import re

from plora_jax.engine import annotations
from plora_jax.engine.batch import LORA_PHASES
from plora_jax.engine.traffic import PROMPT_SCOPE
from plora_jax.model import scopes
from strategies.strategy_table import LORA

OUTSIDE = "host: outside of all parts"

HOST = {
    annotations.STEP: OUTSIDE,
    annotations.PLAN: "host: plan",
    annotations.PACK: "host: pack",
    annotations.DISPATCH: "host: dispatch",
    annotations.RESULTS: "host: waits while nothing runs",
    annotations.DELIVER: "host: deliver",
}
"""By annotation."""

ATTENTION = {phase: scopes.attention_of(phase) for phase in ("decode", "prefill")}
_PARTS = {
    *(scopes.INPUTS, scopes.EMBED, scopes.NORM, scopes.ROTARY, scopes.KV_WRITE, scopes.ACTIVATION, scopes.EXPERTS),
    *(scopes.HEAD, scopes.SAMPLE, PROMPT_SCOPE),
    *scopes.PRODUCTS.values(),
    *ATTENTION.values(),
}
_NUMBERS = re.compile(r"(\.\d+|\.clone)+$")
_NO_NAMES = ("", "while", "body", "closed_call")
"""What stands last in the names of an operation that says nothing of it."""
_ADAPTERS = re.compile(rf"({'|'.join(LORA_PHASES)})\.(any|{'|'.join(LORA)})")


def adapters_of(phase: str) -> str:
    """Name of what adapters add in a phase of `LORA_PHASES`."""
    return f"{phase} adapters"


def part_of(operation: str, names: str) -> str:
    """The part that an operation belongs to; what belongs to none keeps a name of its own kind.

    Args:
        operation: its name in the compiled program.
        names: around it when it was traced, outermost first, with slashes; empty for what the compiler made.
    """
    for name in reversed(names.split("/")):
        if name in _PARTS:
            return name
        if found := _ADAPTERS.fullmatch(name):
            return adapters_of(found[1])
    last = names.rpartition("/")[2]
    kind = re.sub(_NUMBERS, "", operation) if last in _NO_NAMES else last
    return f"{scopes.LAYERS}: {kind}" if f"/{scopes.LAYERS}/" in f"/{names}/" else f"unnamed: {kind}"
