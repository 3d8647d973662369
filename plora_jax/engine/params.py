"""What a client may ask of one generation, and the checks that need no model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from plora_jax.wording import in_json

MAX_LOGPROBS = 20
MAX_N = 128
MAX_BIAS_ENTRIES = 512


class RequestError(ValueError):
    """A request that cannot be served as asked.

    Attributes:
        param: the field at fault, as clients name it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one generation; names, meanings and defaults are vLLM's.

    Attributes:
        n: completions to make of one prompt.
        max_tokens: tokens to generate at most; None for as many as the context holds.
        min_tokens: tokens to generate before an end token or stop token may be chosen.
        temperature: 0 takes the most probable token.
        top_k: sample among the k most probable tokens; 0 or -1 for all.
        top_p: sample among the fewest tokens whose probabilities sum to top_p.
        min_p: leave out tokens below min_p times the largest probability.
        presence_penalty: subtracted from the logit of each token already generated.
        frequency_penalty: subtracted once for each time a token was generated.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        logit_bias: added to the logits, by token id.
        seed: makes the sampled tokens a function of the request alone.
        stop: generation ends before the first of these strings.
        stop_token_ids: generation ends at these tokens.
        ignore_eos: do not end at the model's end token.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: None, or how many of the most probable tokens to report besides the chosen one. Log-probabilities are
            those of the model, before penalties, bias and temperature.
        prompt_logprobs: the same for every prompt token but the first.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def penalises(self) -> bool:
        """Whether a draw looks at the tokens before it."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def validate(self, vocab_size: int) -> None:
        """Checks every field.

        Raises:
            RequestError: naming the first field at fault, its value and what is allowed.
        """

        def need(ok: bool, param: str, allowed: str) -> None:
            if not ok:
                raise RequestError(f"{param} must be {allowed}, got {in_json(getattr(self, param))}.", param)

        finite = math.isfinite
        need(1 <= self.n <= MAX_N, "n", f"between 1 and {MAX_N}")
        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        need(self.min_tokens >= 0, "min_tokens", "at least 0")
        need(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        need(finite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "between 0 and 100")
        need(self.top_k >= -1, "top_k", "-1 or 0 (all tokens) or at least 1")
        need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        need(finite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty", "above 0")
        need(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        need(all(self.stop), "stop", "a list of strings that are not empty")
        for param in ("logprobs", "prompt_logprobs"):
            value = getattr(self, param)
            need(value is None or 0 <= value <= MAX_LOGPROBS, param, f"between 0 and {MAX_LOGPROBS}")
        known, ids = range(vocab_size), f"ids below the vocabulary size {vocab_size}"
        need(all(t in known for t in self.stop_token_ids), "stop_token_ids", ids)
        need(all(t in known for t in self.logit_bias), "logit_bias", ids)
        need(
            all(-100 <= b <= 100 for b in self.logit_bias.values()),
            "logit_bias",
            "an object with values between -100 and 100",
        )
        longer, other = sorted(("logit_bias", "stop_token_ids"), key=lambda param: -len(getattr(self, param)))
        entries, most = len(self.logit_bias) + len(self.stop_token_ids), MAX_BIAS_ENTRIES - 16
        need(entries <= most, longer, f"at most {most} entries, those of {other} counted")
