"""Draws the next tokens inside the jitted step.

Every option is data, never a static variant, so one program serves every mix of requests; what no row needs is skipped
at run time by `lax.cond` on flags that the host sets. The order is vLLM's (vllm/v1/sample/sampler.py): logit_bias and
the suppression before min_tokens, penalties, [argmax where temperature is 0], temperature, min_p, top_k, top_p, draw.

A row's token is a function of its own logits and options only. The noise is Threefry with the sequence's seed as key
and (tokens generated so far, token id) as counter, and the sums that decide where top_p cuts are sums of integers,
which no order of addition can change: neither the place in the batch nor its size matters.

XLA's sort over a vocabulary is slow on the CPU and is not used. The cut of top_k and top_p is looked for among the
`CANDIDATES` best tokens (`lax.top_k`), and where a row's cut lies deeper, by bisection over the ordered integer form of
float32. Both find the same cut. 32 rows of 49,152 logits on two CPU cores, XLA alone: 1.6 ms greedy, 5.5 to draw from
all tokens, 14 with cuts among the candidates, 34 with a deeper one, 58 with every option at once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plora_jax.engine.params import MAX_LOGPROBS
from plora_jax.engine.sampling_batch import Array, SamplingBatch, make_sampling_batch
from strategies.rowwise import first_best, ordered

__all__ = ["CANDIDATES", "SampledRows", "SamplingBatch", "make_sampling_batch", "sample", "token_logprobs"]

CANDIDATES = 256

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class SampledRows(NamedTuple):
    """What was drawn.

    Attributes:
        token_ids: i32[B], always inside the vocabulary.
        logprobs: f32[B], of the tokens drawn; 0 where no row asks for any.
        top_ids: i32[B, 20], the most probable tokens, best first; ids past the vocabulary's size are 0.
        top_logprobs: f32[B, 20], theirs; -inf past the vocabulary's size.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(logits_BV: jax.Array, batch: SamplingBatch) -> SampledRows:
    """Draws one token a row.

    Args:
        logits_BV: f32[B, V], V at most 262,144. NaN counts as -inf; a row without a finite logit gives token 0.
        batch: the rows' options.

    Returns:
        The tokens and, where a row asks, log-probabilities of the model before bias, penalties and temperature.
    """
    rows = logits_BV.shape[0]
    shaped = batch.any_random | batch.any_bias | batch.any_penalty
    token_ids = lax.cond(shaped, lambda x: _sample_shaped(x, batch), first_best, logits_BV)
    scored = lax.cond(
        batch.any_logprobs,
        lambda x: token_logprobs(x, token_ids),
        lambda _: (
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
            jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
        ),
        logits_BV,
    )
    return SampledRows(token_ids, *scored)


def token_logprobs(logits_TV: jax.Array, targets_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores given tokens and finds the most probable ones.

    Args:
        logits_TV: f32[T, V]; NaN counts as -inf.
        targets_T: i32[T], the tokens to score.

    Returns:
        Log-probabilities f32[T] of the targets; ids i32[T, 20] and log-probabilities f32[T, 20] of the most probable
        tokens, best first, of equal ones the lowest id first (past V tokens: id 0, -inf).
    """
    x_TV = _without_nan(logits_TV)
    best_T1 = _finite_max(x_TV)
    total_T1 = jnp.sum(jnp.exp(x_TV - best_T1), axis=1, keepdims=True)
    norm_T1 = best_T1 + jnp.where(total_T1 > 0, jnp.log(total_T1), 0.0)
    top_TK, ids_TK = lax.top_k(x_TV, min(MAX_LOGPROBS, x_TV.shape[1]))
    missing = ((0, 0), (0, MAX_LOGPROBS - ids_TK.shape[1]))
    chosen_T1 = jnp.take_along_axis(x_TV, targets_T[:, None], axis=1)
    return (
        (chosen_T1 - norm_T1)[:, 0],
        jnp.pad(ids_TK, missing),
        jnp.pad(top_TK - norm_T1, missing, constant_values=-jnp.inf),
    )


def _sample_shaped(logits_BV: jax.Array, batch: SamplingBatch) -> jax.Array:
    """Tokens i32[B] of rows that may have bias, penalties and a temperature."""
    x_BV = lax.cond(
        batch.any_bias | batch.any_penalty, lambda x: _penalised(_biased(x, batch), batch), lambda x: x, logits_BV
    )
    x_BV = _without_nan(x_BV)
    return lax.cond(batch.any_random, lambda x: _drawn(x, batch), first_best, x_BV)


def _biased(x_BV: jax.Array, batch: SamplingBatch) -> jax.Array:
    rows_B1 = jnp.arange(x_BV.shape[0])[:, None]
    return lax.cond(
        batch.any_bias,
        lambda x: x.at[rows_B1, batch.bias_ids].add(batch.bias_values, mode="drop"),
        lambda x: x,
        x_BV,
    )


def _penalised(x_BV: jax.Array, batch: SamplingBatch) -> jax.Array:
    def penalise(x: jax.Array) -> jax.Array:
        rows, vocab = x.shape
        place_BS = lax.broadcasted_iota(jnp.int32, batch.history.shape, 1)
        known_BS = place_BS < batch.history_len[:, None]
        output_BS = known_BS & (place_BS >= batch.prompt_len[:, None])
        rows_B1 = jnp.arange(rows)[:, None]
        # Entries that do not count are sent past the vocabulary, where the scatter drops them.
        seen_BV = jnp.zeros((rows, vocab), jnp.int32)
        seen_BV = seen_BV.at[rows_B1, jnp.where(known_BS, batch.history, vocab)].max(1, mode="drop")
        count_BV = jnp.zeros((rows, vocab), jnp.float32)
        count_BV = count_BV.at[rows_B1, jnp.where(output_BS, batch.history, vocab)].add(1.0, mode="drop")
        factor_B1 = batch.repetition[:, None]
        x = jnp.where(seen_BV > 0, jnp.where(x > 0, x / factor_B1, x * factor_B1), x)
        x = x - batch.frequency[:, None] * count_BV
        return x - jnp.where(count_BV > 0, batch.presence[:, None], 0.0)

    return lax.cond(batch.any_penalty, penalise, lambda x: x, x_BV)


def _drawn(x_BV: jax.Array, batch: SamplingBatch) -> jax.Array:
    """Gumbel-max: the largest logit / temperature + noise is a draw from the softmax; greedy rows take their best."""
    floor_B = lax.cond(
        batch.any_filter,
        lambda x: _floors(x, batch),
        lambda x: jnp.full((x.shape[0],), -jnp.inf, jnp.float32),
        x_BV,
    )
    random_B1 = batch.temperature[:, None] > 0
    # The best is subtracted first, so that a small temperature cannot make infinities of two tokens.
    scaled_BV = (x_BV - _finite_max(x_BV)) / jnp.where(random_B1, batch.temperature[:, None], 1.0)
    noisy_BV = jnp.where(x_BV >= floor_B[:, None], scaled_BV + _gumbel(batch, x_BV.shape[1]), -jnp.inf)
    return first_best(jnp.where(random_B1, noisy_BV, x_BV))


def _gumbel(batch: SamplingBatch, vocab: int) -> jax.Array:
    """Standard Gumbel noise f32[B, V] from the seeds and draw numbers."""
    token_BV = lax.broadcasted_iota(jnp.uint32, (batch.seed.shape[0], vocab), 1)
    draw_BV = jnp.broadcast_to(batch.draw.astype(jnp.uint32)[:, None], token_BV.shape)
    word0_BV, word1_BV = _threefry2x32(batch.seed[:, :1], batch.seed[:, 1:], draw_BV, token_BV)
    # Fine near 0, where the largest noise comes from; kept off 1, where it would be -inf and the best token lost.
    uniform_BV = ((word0_BV ^ word1_BV).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform_BV, 1 - 2.0**-24)))


def _threefry2x32(key0: Array, key1: Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., SC'11), the generator behind jax.random.

    Written out because XLA fuses it with what follows: 1 ms for 32 x 49,152 words on two CPU cores, where
    jax.random.bits takes 7; and because its bits then do not hang on jax's configuration.
    """
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def _floors(x_BV: jax.Array, batch: SamplingBatch) -> jax.Array:
    """The smallest logit f32[B] that min_p, top_k and top_p leave in; tokens that equal it stay in too."""
    vocab = x_BV.shape[1]
    best_B1 = _finite_max(x_BV)
    temperature_B1 = jnp.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
    keys_BV = ordered(x_BV)
    top_BC, ids_BC = lax.top_k(x_BV, min(CANDIDATES, vocab))
    top_keys_BC = ordered(top_BC)

    cuts_k_B = (batch.top_k > 0) & (batch.top_k < vocab)
    one = jnp.ones((), jnp.int32)
    kth_B = _threshold(
        keys_BV, one, top_keys_BC, jnp.ones(ids_BC.shape, jnp.int32), target_B=jnp.where(cuts_k_B, batch.top_k, 1)
    )
    floor_B = best_B1[:, 0] + temperature_B1[:, 0] * jnp.log(batch.min_p)
    floor_B = jnp.maximum(floor_B, jnp.where(cuts_k_B, _unordered(kth_B), -jnp.inf))

    weights_BV = jnp.where(x_BV >= floor_B[:, None], jnp.exp((x_BV - best_B1) / temperature_B1), 0.0)
    shares_BV = _shares(weights_BV)
    total_B = jnp.sum(shares_BV, axis=1)
    cuts_p_B = batch.top_p < 1
    wanted_B = jnp.ceil(batch.top_p * total_B.astype(jnp.float32)).astype(jnp.int32)
    nucleus_B = _threshold(
        keys_BV,
        shares_BV,
        top_keys_BC,
        jnp.take_along_axis(shares_BV, ids_BC, axis=1),
        target_B=jnp.where(cuts_p_B, jnp.clip(wanted_B, one, jnp.maximum(total_B, one)), one),
    )
    return jnp.maximum(floor_B, jnp.where(cuts_p_B, _unordered(nucleus_B), -jnp.inf))


def _shares(weights_BV: jax.Array) -> jax.Array:
    """Weights in [0, 1] as integers i32[B, V] in proportion, whose sum is about 2**30: sums of them are exact.

    The scale itself must not depend on an order of addition, so its sum is taken over integers too, in two halves
    of 12 bits that cannot overflow before 2**18 tokens.
    """
    fixed_BV = jnp.round(weights_BV * 2.0**24).astype(jnp.int32)
    high_B1 = jnp.sum(fixed_BV >> 12, axis=1, keepdims=True).astype(jnp.float32)
    low_B1 = jnp.sum(fixed_BV & 0xFFF, axis=1, keepdims=True).astype(jnp.float32)
    total_B1 = jnp.maximum(high_B1 * 2.0**-12 + low_B1 * 2.0**-24, 2.0**-24)
    return jnp.round(weights_BV * (2.0**30 / total_B1)).astype(jnp.int32)


def _threshold(
    keys_BV: jax.Array, weights: jax.Array, top_keys_BC: jax.Array, top_weights_BC: jax.Array, *, target_B: jax.Array
) -> jax.Array:
    """The largest key i32[B] such that the weights of all keys not below it sum to at least the target.

    Args:
        keys_BV: i32[B, V].
        weights: i32[B, V] or i32[], not negative; a row's sum is below 2**31.
        top_keys_BC: the C largest keys of each row, best first.
        top_weights_BC: their weights.
        target_B: i32[B], at least 1 and at most the row's sum of weights.
    """
    sums_BC = jnp.cumsum(top_weights_BC, axis=1)
    among_B = sums_BC[:, -1] >= target_B
    place_B1 = jnp.sum((sums_BC < target_B[:, None]).astype(jnp.int32), axis=1, keepdims=True)
    top_B = jnp.take_along_axis(top_keys_BC, jnp.minimum(place_B1, sums_BC.shape[1] - 1), axis=1)[:, 0]

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B, high_B = bounds  # the answer is in [low, high)
        middle_B = low_B + lax.shift_right_logical(high_B - low_B, jnp.ones_like(low_B))
        mass_B = jnp.sum(jnp.where(keys_BV >= middle_B[:, None], weights, 0), axis=1)
        reached_B = mass_B >= target_B
        return jnp.where(reached_B, middle_B, low_B), jnp.where(reached_B, high_B, middle_B)

    def bisect() -> jax.Array:
        # Rows that are settled already start with a range of one.
        low_B = jnp.where(among_B, top_B, jnp.min(keys_BV, axis=1))
        high_B = jnp.where(among_B, top_B, top_keys_BC[:, -1]) + 1
        return lax.while_loop(lambda bounds: jnp.any(bounds[0] + 1 < bounds[1]), halve, (low_B, high_B))[0]

    return lax.cond(jnp.all(among_B), lambda: top_B, bisect)


def _unordered(keys: jax.Array) -> jax.Array:
    """The float32 of an ordered key."""
    magnitude = lax.bitcast_convert_type(jnp.abs(keys), jnp.float32)
    return jnp.where(keys < 0, -magnitude, magnitude)


def _without_nan(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(x), -jnp.inf, jnp.minimum(x, _FLOAT32_MAX))


def _finite_max(x_BV: jax.Array) -> jax.Array:
    """The largest entry f32[B, 1]; 0 where all are -inf, so that it can be subtracted."""
    best_B1 = jnp.max(x_BV, axis=1, keepdims=True)
    return jnp.where(best_B1 == -jnp.inf, 0.0, best_B1)
