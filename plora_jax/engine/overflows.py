"""What is said when the numbers of a sequence overflowed, so that it has no finite logits to draw a token from."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Overflows:
    """Words for the client each time, and for the log once an adapter."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def reason(self, adapter_id: int, adapter: str | None, *, dtype: str) -> str:
        """Why the completion ends.

        Args:
            adapter_id: identity of the adapter's load.
            adapter: its name; None for the base model.
            dtype: what the numbers overflow.
        """
        if adapter is None:
            why = f"the logits of the base model are not finite: its numbers overflow {dtype}"
        else:
            why = (
                f"the logits of adapter {adapter!r} are not finite: its weights or its lora_alpha are too large for "
                f"{dtype}"
            )
        if adapter_id not in self._told:
            self._told.add(adapter_id)
            logger.warning("%s; requests that meet this end with an error", why)
        return why
