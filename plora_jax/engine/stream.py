"""From the tokens of one sequence to the pieces its client gets: text, stop conditions, log-probabilities."""

from __future__ import annotations

from typing import Protocol

from plora_jax.engine.outputs import Delta, TokenLogprobs
from plora_jax.engine.plan import Row, RowResult, Sequence


class TextDecoder(Protocol):
    """Turns tokens into text that is certain (`plora_jax.tokenizer.Detokenizer`)."""

    def append(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class StopFinder(Protocol):
    """Holds text back that may begin a stop string (`plora_jax.tokenizer.StopChecker`)."""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]: ...
    def flush(self) -> str: ...


class TokenStream:
    """One completion on its way out; owned by the engine's thread.

    Args:
        index: which of the n completions.
        sequence: its tokens.
        eos_token_ids: end tokens of the model.
        decoder: its detokenizer.
        stops: its stop strings.
    """

    def __init__(
        self, index: int, sequence: Sequence, *, eos_token_ids: frozenset[int], decoder: TextDecoder, stops: StopFinder
    ) -> None:
        self.index, self.sequence = index, sequence
        self._eos = frozenset() if sequence.sampling.ignore_eos else eos_token_ids
        self._decoder, self._stops = decoder, stops
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._delivered = 0

    def goes_on(self, result: RowResult) -> bool:
        """Whether this result surely does not end the completion, which its text may decide."""
        if result.token_id is None:
            return True
        return not self.sequence.sampling.stop and self._ends_at(result.token_id)[0] is None

    def advance(self, row: Row, result: RowResult) -> Delta | None:
        """What a step's result means for the client; `sequence` already holds the new token.

        Returns:
            A piece, with a finish_reason where the completion ends here; None where the row drew no token.
        """
        self._collect_prompt(row, result)
        if result.token_id is None:
            return None
        finish, stop_reason = self._ends_at(result.token_id)
        text, matched = self._decode(result.token_id, finish)
        if matched is not None:
            finish, stop_reason = "stop", matched
        sampling = self.sequence.sampling
        wants_prompt = sampling.prompt_logprobs is not None and not self._delivered
        self._delivered += 1
        return Delta(
            self.index,
            text,
            (result.token_id,),
            logprobs=None if result.logprobs is None else (result.logprobs,),
            prompt_logprobs=tuple(self._prompt_logprobs) if wants_prompt else None,
            finish_reason=finish,
            stop_reason=stop_reason,
        )

    def abort(self) -> Delta:
        """The last piece of a completion that is cancelled: text held back for a stop string that did not come."""
        return Delta(self.index, self._stops.flush(), (), finish_reason="abort")

    def fail(self, error: str) -> Delta:
        """The last piece of a completion that cannot go on."""
        return Delta(self.index, "", (), finish_reason="error", error=error)

    def _may_stop(self) -> bool:
        return len(self.sequence.output_ids) > self.sequence.sampling.min_tokens

    def _ends_at(self, token_id: int) -> tuple[str | None, int | None]:
        """(finish_reason, stop_reason) as far as tokens and their number decide."""
        sampling = self.sequence.sampling
        if self._may_stop() and token_id in self._eos:
            return "stop", None
        if self._may_stop() and token_id in sampling.stop_token_ids:
            return "stop", token_id
        # max_tokens is resolved against the context, so this is also where the context is full.
        at_limit = len(self.sequence.output_ids) >= (sampling.max_tokens or 0)
        return ("length" if at_limit else None), None

    def _decode(self, token_id: int, finish: str | None) -> tuple[str, str | None]:
        """Text that is certain now, and the stop string found in it."""
        hidden = finish == "stop" and not self.sequence.sampling.include_stop_str_in_output
        new = "" if hidden else self._decoder.append(token_id)
        text, matched = self._stops.feed(new, may_stop=self._may_stop())
        if finish is None or matched is not None:
            return text, matched
        rest, matched = self._stops.feed(self._decoder.flush(), may_stop=self._may_stop())
        return text + rest + ("" if matched is not None else self._stops.flush()), matched

    def _collect_prompt(self, row: Row, result: RowResult) -> None:
        """Keeps log-probabilities of prompt tokens once, though a preempted prompt is computed again."""
        for position, entry in enumerate(result.prompt_logprobs, start=row.start + 1):
            if position == len(self._prompt_logprobs):
                self._prompt_logprobs.append(entry)
