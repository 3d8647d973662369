"""Why the engine refuses or fails a request; what the HTTP layer turns into status codes.

`RequestError` (a field of the request is at fault) lives in params.py beside the checks that raise it.
"""

from __future__ import annotations


class UnknownAdapterError(KeyError):
    """No adapter of this name is loaded.

    Attributes:
        name: the name asked for.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"no adapter named {self.name!r} is loaded"


class AdapterExistsError(ValueError):
    """The name is taken.

    Attributes:
        name: the name asked for.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"adapter name {name!r} {why}")
        self.name = name


class NoPlanError(ValueError):
    """There is no plan that could be explained; says why."""


class OverloadedError(RuntimeError):
    """As many requests are in flight as the engine admits; the same request may succeed later.

    Attributes:
        retry_after_s: a guess at when.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(RuntimeError):
    """The engine takes no requests: it is shutting down, or its executor failed again and again."""


class GenerationFailedError(RuntimeError):
    """A generation ended with finish_reason "error"; the message says why."""
