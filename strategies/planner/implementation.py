"""Which implementation of the optimizer's hot parts runs: C++ where the native kernels are there, else numpy.

The numpy functions are the reference: they say what the native ones answer, to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from strategies.native import unavailable

P = ParamSpec("P")
R = TypeVar("R")


def is_native() -> bool:
    """Whether the native functions run; builds them if `prepare` has not."""
    return unavailable() is None


def prepare() -> None:
    """Builds the native functions unless that is done: for whoever cannot wait for a compiler in the first choice.

    On the CPU the model's kernels, which are in the same library, have been built before.
    """
    unavailable()


def either(native: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates the numpy version of a function, in whose place `native` answers where it can."""

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(reference)
        def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
            return (native if is_native() else reference)(*args, **kwargs)

        return chosen

    return decorate
