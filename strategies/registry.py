"""The strategies by name. Adding one is a function with the same signature and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from strategies import attention, lora


class LoraStrategy(NamedTuple):
    """Attributes: delta: see strategies.lora.resident, the reference."""

    delta: Callable


class AttentionStrategy(NamedTuple):
    """Attributes: attend: see strategies.attention.local, the reference."""

    attend: Callable


LORA = {"resident": LoraStrategy(lora.resident)}
ATTENTION = {"local": AttentionStrategy(attention.local)}
