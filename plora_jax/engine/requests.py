"""Checks of a request against the model, and the sequences it becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf

from plora_jax.engine.params import RequestError, SamplingParams
from plora_jax.engine.plan import Sequence
from plora_jax.wording import in_json


def resolve_request(
    prompt_ids: SequenceOf[int], sampling: SamplingParams, *, vocab_size: int, max_model_len: int
) -> SamplingParams:
    """Checks a request and resolves `max_tokens`.

    Args:
        prompt_ids: tokens of the prompt.
        sampling: options as the client gave them.
        vocab_size: V.
        max_model_len: longest sequence, prompt and output together, tokens.

    Returns:
        The options with `max_tokens` a number.

    Raises:
        RequestError: naming the field at fault.
    """
    sampling.validate(vocab_size)
    prompt = len(prompt_ids)
    if not prompt:
        raise RequestError("prompt must hold at least one token", "prompt")
    outside = next((t for t in prompt_ids if not 0 <= t < vocab_size), None)
    if outside is not None:
        raise RequestError(f"Token id {in_json(outside)} is out of vocabulary: ids are below {vocab_size}.", "prompt")
    context = f"This model's maximum context length is {max_model_len} tokens. However, "
    if prompt >= max_model_len or sampling.max_tokens is None:
        if prompt >= max_model_len:
            raise RequestError(
                f"{context}your prompt holds {prompt} tokens, and at least 1 is generated. "
                "Please reduce the length of the prompt.",
                "prompt",
            )
        sampling = dataclasses.replace(sampling, max_tokens=max_model_len - prompt)
    assert sampling.max_tokens is not None
    if prompt + sampling.max_tokens > max_model_len:
        raise RequestError(
            f"{context}you requested {in_json(prompt + sampling.max_tokens)} tokens ({prompt} in the prompt, "
            f"{in_json(sampling.max_tokens)} in max_tokens). Please reduce the length of the prompt or max_tokens.",
            "max_tokens",
        )
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            f"min_tokens must be at most the {sampling.max_tokens} tokens that the context has left for this prompt, "
            f"got {sampling.min_tokens}.",
            "min_tokens",
        )
    return sampling


def make_sequence(
    seq_id: int,
    prompt_ids: SequenceOf[int],
    sampling: SamplingParams,
    *,
    seed: int,
    eos_token_ids: SequenceOf[int],
    adapter_id: int,
    arrival_s: float,
    priority: int,
) -> Sequence:
    """A sequence that is ready to be scheduled.

    Args:
        seq_id: unique in the engine.
        prompt_ids: tokens of the prompt.
        sampling: resolved options.
        seed: taken modulo 2^64.
        eos_token_ids: end tokens of the model.
        adapter_id: identity of the adapter load, 0 for the base model.
        arrival_s: clock time of submission.
        priority: smaller runs first.
    """
    ends = () if sampling.ignore_eos else tuple(eos_token_ids)
    suppressed = tuple(dict.fromkeys(ends + sampling.stop_token_ids)) if sampling.min_tokens else ()
    return Sequence(
        seq_id=seq_id,
        prompt_ids=list(prompt_ids),
        sampling=sampling,
        seed=seed % 2**64,
        adapter_id=adapter_id,
        arrival_s=arrival_s,
        priority=priority,
        suppressed_ids=suppressed,
    )
