"""What the sampler needs to know of the rows of a step, as arrays that the host builds before each step."""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import jax
import numpy as np

from plora_jax.engine.params import MAX_BIAS_ENTRIES, SamplingParams
from plora_jax.engine.plan import Sequence

_GREEDY_BELOW = 1e-5  # vLLM's bounds: colder is greedy, and nothing else is colder than _COLDEST
_COLDEST = 0.01
_INT32_MAX = int(np.iinfo(np.int32).max)

Array = jax.Array | np.ndarray


class SamplingBatch(NamedTuple):
    """Options of B rows.

    Attributes:
        temperature: f32[B]; 0 takes the best token.
        top_k: i32[B]; 0 for all tokens.
        top_p: f32[B].
        min_p: f32[B].
        presence: f32[B], presence penalty.
        frequency: f32[B], frequency penalty.
        repetition: f32[B], repetition penalty; 1 for none.
        seed: u32[B, 2], low word first.
        draw: i32[B], tokens that the sequence has generated so far.
        bias_ids: i32[B, E], tokens that `bias_values` belong to.
        bias_values: f32[B, E], added to the logits; -inf suppresses. Padding: id 0, value 0.
        history: i32[B, S], the tokens that penalties look at: prompt, then output.
        history_len: i32[B], how many of them count; 0 where the row has no penalty.
        prompt_len: i32[B], how many of them are the prompt's; 0 where no penalty looks at the prompt.
        any_random: bool[], a row has a temperature.
        any_filter: bool[], such a row has top_k, top_p or min_p.
        any_penalty: bool[], a row has a penalty.
        any_bias: bool[], a row has a bias entry.
        any_logprobs: bool[], a row asks for log-probabilities.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    presence: Array
    frequency: Array
    repetition: Array
    seed: Array
    draw: Array
    bias_ids: Array
    bias_values: Array
    history: Array
    history_len: Array
    prompt_len: Array
    any_random: Array
    any_filter: Array
    any_penalty: Array
    any_bias: Array
    any_logprobs: Array


def make_sampling_batch(
    rows: SequenceOf[Sequence], *, rows_padded: int, max_len: int, unknown: int = 0
) -> SamplingBatch:
    """Gathers the options of the rows that sample; padding rows are greedy without options.

    Args:
        rows: sequences, at most `rows_padded`, whose outputs hold all tokens generated so far.
        rows_padded: B.
        max_len: S, the longest context, tokens.
        unknown: tokens that each sequence has generated beyond those of its outputs; 0 where a row has a penalty.

    Returns:
        Numpy arrays. Those that no row writes to are shared and read-only, all of them where every row takes the best
        token as it is; the others are new, so that a step in flight may still read the last ones.

    Cost:
        A few microseconds a row; for a row with penalties, 50 ns for each token of its history.
    """
    assert not unknown or not any(row.sampling.penalises for row in rows)
    generated = [len(row.output_ids) + unknown for row in rows]
    if rows and all(map(_takes_the_best, rows, generated)):
        return _best_of_all(rows_padded, max_len)
    count = len(rows)
    params = [row.sampling for row in rows]
    temperature = _column([_temperature(p) for p in params], rows_padded, np.float32)
    random = temperature[:count] > 0
    # A client may ask for a top_k that no int32 holds; it means all tokens, as any past the vocabulary's size.
    top_k = _column([min(max(p.top_k, 0), _INT32_MAX) for p in params], rows_padded, np.int32)
    top_p = _column([p.top_p for p in params], rows_padded, np.float32, padding=1)
    min_p = _column([p.min_p for p in params], rows_padded, np.float32)
    filtered = (top_k[:count] > 0) | (top_p[:count] < 1) | (min_p[:count] > 0)
    bias_ids, bias_values = _bias(rows, generated, rows_padded)
    history, history_len, prompt_len = _history(rows, rows_padded, max_len)
    low_word = [row.seed & 0xFFFFFFFF for row in rows]
    high_word = [row.seed >> 32 & 0xFFFFFFFF for row in rows]
    return SamplingBatch(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence=_column([p.presence_penalty for p in params], rows_padded, np.float32),
        frequency=_column([p.frequency_penalty for p in params], rows_padded, np.float32),
        repetition=_column([p.repetition_penalty for p in params], rows_padded, np.float32, padding=1),
        seed=np.stack([_column(words, rows_padded, np.uint32) for words in (low_word, high_word)], axis=1),
        draw=_column(generated, rows_padded, np.int32),
        bias_ids=bias_ids,
        bias_values=bias_values,
        history=history,
        history_len=history_len,
        prompt_len=prompt_len,
        any_random=np.asarray(random.any()),
        any_filter=np.asarray((random & filtered).any()),
        any_penalty=np.asarray(any(p.penalises for p in params)),
        any_bias=np.asarray(bias_values.any()),
        any_logprobs=np.asarray(any(p.logprobs is not None for p in params)),
    )


def is_plain(batch: SamplingBatch) -> bool:
    """Whether every row takes the best token as it is, whatever else is in the batch."""
    return not (batch.any_random or batch.any_penalty or batch.any_bias or batch.any_logprobs)


def _takes_the_best(row: Sequence, generated: int) -> bool:
    params = row.sampling
    changed = params.logit_bias or params.penalises or generated < params.min_tokens
    return not changed and params.temperature < _GREEDY_BELOW and params.logprobs is None


@functools.lru_cache(maxsize=64)
def _best_of_all(rows_padded: int, max_len: int) -> SamplingBatch:
    batch = make_sampling_batch((), rows_padded=rows_padded, max_len=max_len)
    for array in batch:
        assert isinstance(array, np.ndarray)
        array.flags.writeable = False
    return batch


def _temperature(params: SamplingParams) -> float:
    return 0.0 if params.temperature < _GREEDY_BELOW else max(params.temperature, _COLDEST)


def _column(values: SequenceOf[float], rows_padded: int, dtype: type, *, padding: float = 0) -> np.ndarray:
    column = np.full(rows_padded, padding, dtype)
    column[: len(values)] = values
    return column


def _bias(rows: SequenceOf[Sequence], generated: SequenceOf[int], rows_padded: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids i32[B, E] and what is added to their logits, f32[B, E]; read-only where no row has any."""
    entries = []
    for place, (row, tokens) in enumerate(zip(rows, generated, strict=True)):
        bias = row.sampling.logit_bias
        ids, values = list(bias), list(bias.values())
        if tokens < row.sampling.min_tokens:
            ids += row.suppressed_ids
            values += [-np.inf] * len(row.suppressed_ids)
        if ids:
            entries.append((place, ids, values))
    if not entries:
        return _zeros(rows_padded, MAX_BIAS_ENTRIES, np.int32), _zeros(rows_padded, MAX_BIAS_ENTRIES, np.float32)
    all_ids = np.zeros((rows_padded, MAX_BIAS_ENTRIES), np.int32)
    all_values = np.zeros((rows_padded, MAX_BIAS_ENTRIES), np.float32)
    for place, ids, values in entries:
        all_ids[place, : len(ids)] = ids
        all_values[place, : len(ids)] = values
    return all_ids, all_values


def _history(rows: SequenceOf[Sequence], rows_padded: int, max_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens i32[B, S] of the rows with penalties, how many there are, i32[B], and of these the prompt's, i32[B]."""
    history_len = np.zeros(rows_padded, np.int32)
    prompt_len = np.zeros(rows_padded, np.int32)
    penalised = [(place, row) for place, row in enumerate(rows) if row.sampling.penalises]
    if not penalised:
        return _zeros(rows_padded, max_len, np.int32), history_len, prompt_len
    history = np.zeros((rows_padded, max_len), np.int32)
    for place, row in penalised:
        prompt = row.prompt_ids if row.sampling.repetition_penalty != 1 else []
        prompt_len[place] = len(prompt)
        history_len[place] = len(prompt) + len(row.output_ids)
        history[place, : len(prompt)] = prompt
        history[place, len(prompt) : history_len[place]] = row.output_ids
    return history, history_len, prompt_len


@functools.lru_cache(maxsize=64)
def _zeros(rows: int, columns: int, dtype: type) -> np.ndarray:
    """A read-only array of zeros, the same one each time: a step without such options neither makes nor clears one."""
    zeros = np.zeros((rows, columns), dtype)
    zeros.flags.writeable = False
    return zeros
