"""The sampler against a plain numpy sampler that sorts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plora_jax.engine import sampling
from plora_jax.engine.params import SamplingParams
from plora_jax.engine.plan import Sequence
from plora_jax.engine.sampling import SamplingBatch, make_sampling_batch, sample, token_logprobs
from plora_jax.engine.sampling_batch import is_plain

VOCAB = 1000
ROWS = 8
MAX_LEN = 64

jitted_sample = jax.jit(sample)


def row(seed: int = 0, prompt: tuple[int, ...] = (1, 2, 3), output: tuple[int, ...] = (), **options: Any) -> Sequence:
    suppressed = options.pop("suppressed", ())
    options.setdefault("max_tokens", 100)
    return Sequence(
        seq_id=seed,
        prompt_ids=list(prompt),
        output_ids=list(output),
        sampling=SamplingParams(**options),
        seed=seed,
        suppressed_ids=suppressed,
    )


def batch_of(rows: list[Sequence], rows_padded: int = ROWS) -> SamplingBatch:
    return make_sampling_batch(rows, rows_padded=rows_padded, max_len=MAX_LEN)


def logits_of(seed: int, *, rows: int = ROWS, vocab: int = VOCAB, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * spread).astype(np.float32)


def draw(logits: np.ndarray, rows: list[Sequence]) -> np.ndarray:
    tokens = jitted_sample(logits, batch_of(rows, len(logits))).token_ids
    return np.asarray(tokens)[: len(rows)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def adjusted(logits: np.ndarray, sequence: Sequence) -> np.ndarray:
    """Bias, suppression and penalties of one row, token by token."""
    options, out = sequence.sampling, logits.astype(np.float64).copy()
    for token, bias in options.logit_bias.items():
        out[token] += bias
    if len(sequence.output_ids) < options.min_tokens:
        out[list(sequence.suppressed_ids)] = -np.inf
    for token in {*sequence.prompt_ids, *sequence.output_ids}:
        out[token] *= 1 / options.repetition_penalty if out[token] > 0 else options.repetition_penalty
    for token in set(sequence.output_ids):
        out[token] -= options.frequency_penalty * sequence.output_ids.count(token) + options.presence_penalty
    return out


def kept(logits: np.ndarray, options: SamplingParams, *, slack: float = 0.0) -> np.ndarray:
    """Tokens of one row that min_p, top_k and top_p leave in, by sorting."""
    scaled = logits.astype(np.float64) / options.temperature
    mask = np.exp(scaled - scaled.max()) >= options.min_p
    if options.top_k > 0:
        mask &= logits >= np.sort(np.where(mask, logits, -np.inf))[::-1][min(options.top_k, len(logits)) - 1]
    if options.top_p < 1:
        probs = np.where(mask, np.exp(scaled - scaled.max()), 0.0)
        probs /= probs.sum()
        order = np.argsort(-scaled, kind="stable")
        above = np.cumsum(probs[order]) - probs[order]
        last = logits[order[above < options.top_p + slack]].min()
        mask &= logits >= last
    return mask


def cut_mask(logits: np.ndarray, rows: list[Sequence]) -> np.ndarray:
    floors = jax.jit(sampling._floors)(logits, batch_of(rows, len(logits)))
    return logits >= np.asarray(floors)[:, None]


def test_sample_greedy_takes_first_of_the_best() -> None:
    logits = logits_of(1)
    logits[2, [700, 30, 31]] = 50.0
    logits[3] = 0.0
    logits[4] = -np.abs(logits[4])
    logits[5, :3] = [-0.0, 0.0, -0.0]
    logits[5, 3:] = -1.0
    got = draw(logits, [row(temperature=0.0) for _ in range(ROWS)])
    np.testing.assert_array_equal(got, logits.argmax(axis=1))
    assert got[2] == 30
    assert got[3] == 0
    assert got[5] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 400},
        {"top_k": 5000},
        {"top_k": 10**12},
        {"top_p": 0.5},
        {"top_p": 1e-3},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 500, "top_p": 0.9999, "temperature": 3.0},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 0.6},
    ],
    ids=str,
)
def test_sample_filter_keeps_what_sorting_keeps(options: dict[str, Any]) -> None:
    logits = logits_of(2)
    rows = [row(seed=i, **options) for i in range(ROWS)]
    got = cut_mask(logits, rows)
    for mask, row_logits, sequence in zip(got, logits, rows, strict=True):
        # The cut of top_p may fall either way where a cumulated probability is within float32's error of it.
        assert (mask | ~kept(row_logits, sequence.sampling, slack=-1e-6)).all()
        assert (~mask | kept(row_logits, sequence.sampling, slack=1e-6)).all()
        assert mask.any()


def test_sample_random_options_in_one_batch_match_the_reference() -> None:
    rng = np.random.default_rng(3)
    for trial in range(6):
        logits = logits_of(100 + trial)
        rows = [
            row(
                seed=int(rng.integers(0, 2**63)),
                prompt=tuple(rng.integers(0, VOCAB, 20).tolist()),
                output=tuple(rng.integers(0, 30, rng.integers(0, 30)).tolist()),
                temperature=float(rng.choice([0.0, 0.5, 1.0, 2.0])),
                top_k=int(rng.choice([0, -1, 3, 50, 600])),
                top_p=float(rng.choice([1.0, 0.3, 0.95])),
                min_p=float(rng.choice([0.0, 0.02])),
                presence_penalty=float(rng.choice([0.0, 1.5])),
                frequency_penalty=float(rng.choice([0.0, -0.7])),
                repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
                logit_bias={int(rng.integers(0, VOCAB)): 6.0} if rng.random() < 0.5 else {},
                min_tokens=10,
                suppressed=(5, 17),
            )
            for _ in range(ROWS)
        ]
        got = draw(logits, rows)
        noise = np.asarray(sampling._gumbel(jax.tree.map(jnp.asarray, batch_of(rows)), VOCAB))
        for token, row_logits, row_noise, sequence in zip(got, logits, noise, rows, strict=True):
            x = adjusted(row_logits, sequence)
            if sequence.sampling.temperature > 0:
                mask = kept(x.astype(np.float32), sequence.sampling)
                x = np.where(mask, x / sequence.sampling.temperature + row_noise, -np.inf)
            assert token == x.argmax()


def test_sample_ties_at_the_cut_all_stay() -> None:
    logits = logits_of(4)
    logits[:, :600] = 20.0
    logits[:, 600:] = np.nextafter(np.float32(20.0), np.float32(0.0))
    rows = [row(top_k=5), row(top_p=0.1), row(top_k=400, top_p=0.5), row(top_k=2, top_p=0.5, min_p=1.0)] * 2
    np.testing.assert_array_equal(cut_mask(logits, rows), logits == 20.0)


def test_sample_shallow_and_deep_cuts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(5)
    rows = [row(top_k=k, top_p=p) for k, p in [(5, 1.0), (0, 0.5), (90, 0.9), (1, 0.1), (0, 0.8), (33, 0.99)]]
    rows += [row(), row(temperature=0.0)]
    shallow = cut_mask(logits, rows)
    monkeypatch.setattr(sampling, "CANDIDATES", 1)
    deep = np.asarray(jax.jit(lambda x, batch: sampling._floors(x, batch))(logits, batch_of(rows)))
    np.testing.assert_array_equal(logits >= deep[:, None], shallow)


def test_sample_penalties_change_the_greedy_token() -> None:
    logits = np.full((ROWS, VOCAB), -5.0, np.float32)
    logits[:, 10:14] = [3.0, 2.9, 2.0, 1.0]
    options: list[dict[str, Any]] = [
        {"output": (10,), "presence_penalty": 0.2},
        {"output": (10, 10, 11), "frequency_penalty": 0.5},
        {"prompt": (10,), "repetition_penalty": 1.2},
        {"prompt": (10,), "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"prompt": (10, 11), "output": (12,), "repetition_penalty": 10.0},
        {"output": (13,), "presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"prompt": (0,) * 40, "output": (10,) * 20, "frequency_penalty": 0.004},
        {"output": (10,)},
    ]
    got = draw(logits, [row(temperature=0.0, **o) for o in options])
    np.testing.assert_array_equal(got, [11, 11, 11, 10, 13, 13, 10, 10])


def test_sample_repetition_penalty_multiplies_negative_logits() -> None:
    logits = np.full((ROWS, VOCAB), -9.0, np.float32)
    logits[:, 7], logits[:, 8] = -1.0, -1.5
    got = draw(logits, [row(temperature=0.0, prompt=(7,), repetition_penalty=2.0), row(temperature=0.0, prompt=(7,))])
    np.testing.assert_array_equal(got, [8, 7])


def test_sample_bias_and_min_tokens_steer_the_greedy_token() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 4], logits[:, 9] = 5.0, 4.0
    rows = [
        row(temperature=0.0, logit_bias={0: 6.0}),
        row(temperature=0.0, logit_bias={4: -100.0}),
        row(temperature=0.0, logit_bias={VOCAB - 1: 5.5}),
        row(temperature=0.0, min_tokens=2, suppressed=(4,), output=(1,)),
        row(temperature=0.0, min_tokens=2, suppressed=(4,), output=(1, 1)),
        row(temperature=0.0, min_tokens=1, suppressed=(4,), logit_bias={4: 100.0}),
        row(temperature=0.0, suppressed=(4,)),
    ]
    np.testing.assert_array_equal(draw(logits, rows), [0, 9, VOCAB - 1, 9, 4, 9, 4])


def test_sample_row_is_the_same_alone_and_in_any_batch() -> None:
    wide = logits_of(6, rows=32, spread=1.0)
    mixed = [row(seed=50 + i, temperature=1.0, top_k=i, top_p=1.0 - i / 64) for i in range(32)]
    for number in range(40):
        output = tuple(range(number % 20))
        probe = row(seed=9_000_000_000 + number, output=output, top_p=0.9, top_k=300, presence_penalty=0.5)
        place = (7 * number) % 32
        rows = [*mixed[:place], probe, *mixed[place + 1 :]]
        alone = np.zeros((ROWS, VOCAB), np.float32)
        alone[3] = wide[place]
        solo = draw(alone, [row(temperature=0.0)] * 3 + [probe])[3]
        assert draw(wide, rows)[place] == solo


def test_sample_same_seed_and_draw_number_repeat_the_token() -> None:
    flat = np.zeros((32, VOCAB), np.float32)
    by_draw = draw(flat, [row(seed=5, output=(0,) * i) for i in range(32)])
    np.testing.assert_array_equal(by_draw, draw(flat, [row(seed=5, output=(1,) * i) for i in range(32)]))
    assert len(set(by_draw.tolist())) > 28
    seeds = [1, 2, 1 + 2**32, 2**64 - 1, -(2**63), -1]
    by_seed = draw(flat, [row(seed=s) for s in seeds]).tolist()
    assert len(set(by_seed)) == 5
    assert by_seed[3] == by_seed[5]  # the same 64 bits


def test_sample_frequencies_follow_the_softmax() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], np.float32)) * 1.5
    counts = np.zeros(6)
    rows = [row(seed=s, temperature=1.5) for s in range(64)]
    batch = batch_of(rows, 64)
    step = jax.jit(lambda draw: sample(jnp.broadcast_to(logits, (64, 6)), batch._replace(draw=draw)).token_ids)
    for number in range(150):
        counts += np.bincount(np.asarray(step(np.full(64, number, np.int32))), minlength=6)
    expected = np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01]) * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # chi-square, 5 degrees of freedom, p = 0.001


def test_gumbel_bits_are_those_of_jax_random() -> None:
    batch = jax.tree.map(jnp.asarray, batch_of([row(seed=s) for s in (0, 7, 2**40 + 3)]))
    got = np.asarray(sampling._gumbel(batch, VOCAB))
    for words, noise in zip(np.asarray(batch.seed), got, strict=True):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        with jax.threefry_partitionable(True):
            uniform = np.asarray(jax.random.bits(key, (VOCAB,), jnp.uint32)).astype(np.float64) / 2**32
        np.testing.assert_allclose(noise, -np.log(-np.log1p(-uniform - 2.0**-33)), rtol=1e-4, atol=1e-5)


def test_sample_logprobs_are_the_models_whatever_the_options() -> None:
    logits = logits_of(8)
    rows = [row(seed=i, logprobs=3, temperature=0.3, top_k=2, logit_bias={i: 50.0}) for i in range(ROWS)]
    got = jitted_sample(logits, batch_of(rows))
    np.testing.assert_array_equal(got.token_ids, np.arange(ROWS))
    for i in range(ROWS):
        expected = log_softmax(logits[i])
        order = np.argsort(-logits[i], kind="stable")[:20]
        np.testing.assert_allclose(got.logprobs[i], expected[i], rtol=1e-5)
        np.testing.assert_array_equal(got.top_ids[i], order)
        np.testing.assert_allclose(got.top_logprobs[i], expected[order], rtol=1e-5)


def test_sample_without_logprobs_gives_zeros() -> None:
    got = jitted_sample(logits_of(9), batch_of([row()]))
    assert not np.asarray(got.logprobs).any()
    assert not np.asarray(got.top_ids).any()
    assert not np.asarray(got.top_logprobs).any()


def test_token_logprobs_small_vocabulary_pads_the_top() -> None:
    logits = np.array([[1.0, 3.0, 2.0], [0.0, -np.inf, 0.0]], np.float32)
    logprobs, top_ids, top_logprobs = jax.jit(token_logprobs)(logits, np.array([0, 1], np.int32))
    np.testing.assert_allclose(logprobs, [log_softmax(logits[0])[0], -np.inf], rtol=1e-5)
    np.testing.assert_array_equal(top_ids[:, :3], [[1, 2, 0], [0, 2, 1]])
    assert (np.asarray(top_ids)[:, 3:] == 0).all()
    assert (np.asarray(top_logprobs)[:, 3:] == -np.inf).all()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"top_p": 0.5}])
def test_sample_broken_logits_give_a_token_of_the_vocabulary(options: dict[str, Any]) -> None:
    logits = logits_of(10)
    logits[0] = -np.inf
    logits[1] = np.nan
    logits[2, 5] = np.nan
    logits[2, 6] = 90.0
    logits[3, 8] = np.inf
    rows = [row(logprobs=1, repetition_penalty=1.5, **options) for _ in range(ROWS)]
    got = jitted_sample(logits, batch_of(rows))
    tokens = np.asarray(got.token_ids)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert tokens[2] == 6
    assert tokens[3] == 8
    assert not np.isnan(np.asarray(got.logprobs)).any()
    assert not np.isnan(np.asarray(got.top_logprobs)).any()


def test_sample_coldest_temperature_takes_the_best() -> None:
    logits = logits_of(11) * 1e30
    got = draw(logits, [row(seed=i, temperature=1e-4) for i in range(ROWS)])
    np.testing.assert_array_equal(got, logits.argmax(axis=1))


def test_sample_any_options_are_one_program() -> None:
    traces = []

    def counted(logits: jax.Array, batch: SamplingBatch) -> Any:
        traces.append(None)
        return sample(logits, batch)

    step = jax.jit(counted)
    mixes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 5},
        {"top_p": 0.4, "logprobs": 2},
        {"min_p": 0.3, "presence_penalty": 1.0},
        {"logit_bias": {3: 1.0}, "repetition_penalty": 1.1, "output": (3, 4)},
    ]
    for options in mixes:
        step(logits_of(12), batch_of([row(**options)]))
    assert len(traces) == 1


def test_make_sampling_batch_flags_say_what_the_rows_use() -> None:
    def flags(**options: Any) -> dict[str, bool]:
        batch = batch_of([row(temperature=0.0), row(**options)])
        return {name: bool(getattr(batch, name)) for name in batch._fields if name.startswith("any_")}

    off = dict.fromkeys(("any_random", "any_filter", "any_penalty", "any_bias", "any_logprobs"), False)
    assert flags(temperature=0.0, top_k=5, top_p=0.1, min_p=0.5) == off
    assert flags(temperature=1e-6) == off
    assert flags() == off | {"any_random": True}
    assert flags(top_p=0.5) == off | {"any_random": True, "any_filter": True}
    assert flags(temperature=0.0, frequency_penalty=0.1) == off | {"any_penalty": True}
    assert flags(temperature=0.0, logit_bias={1: 2.0}) == off | {"any_bias": True}
    assert flags(temperature=0.0, min_tokens=1, suppressed=(2,)) == off | {"any_bias": True}
    assert flags(temperature=0.0, logprobs=0) == off | {"any_logprobs": True}


def test_batch_of_rows_that_take_the_best_token_is_shared_and_read_only() -> None:
    greedy = row(temperature=0.0, seed=3, output=(1, 2), min_tokens=2, suppressed=(5,))
    batch = batch_of([greedy, greedy])
    assert is_plain(batch)
    assert batch is batch_of([row(temperature=1e-7)])
    assert not any(np.asarray(array).flags.writeable for array in batch)
    logits = logits_of(40)
    np.testing.assert_array_equal(sample(logits, batch).token_ids, np.argmax(logits, axis=1))
    for changed in (
        row(),
        row(temperature=0.0, presence_penalty=0.1),
        row(temperature=0.0, logit_bias={1: 2.0}),
        row(temperature=0.0, min_tokens=1, suppressed=(2,)),
        row(temperature=0.0, logprobs=0),
    ):
        assert not is_plain(batch_of([greedy, changed]))


def test_make_sampling_batch_history_holds_only_rows_with_penalties() -> None:
    rows = [
        row(prompt=(5, 6), output=(7,)),
        row(prompt=(5, 6), output=(7,), repetition_penalty=1.1),
        row(prompt=(5, 6), output=(7, 8), presence_penalty=0.1),
    ]
    batch = batch_of(rows)
    np.testing.assert_array_equal(batch.history_len, [0, 3, 2, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.prompt_len, [0, 2, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(np.asarray(batch.history)[:4, :3], [[0, 0, 0], [5, 6, 7], [7, 8, 0], [0, 0, 0]])
    np.testing.assert_array_equal(batch.draw, [1, 1, 2, 0, 0, 0, 0, 0])


def test_make_sampling_batch_arrays_in_flight_are_not_written_again() -> None:
    first = batch_of([row(repetition_penalty=1.1, logit_bias={1: 1.0})])
    second = batch_of([row(repetition_penalty=1.1, logit_bias={1: 1.0})])
    shared = [name for name in first._fields if getattr(first, name) is getattr(second, name)]
    assert shared == []
    idle = batch_of([row()])
    assert not np.asarray(idle.history).flags.writeable
    assert idle.history is batch_of([row(top_k=3)]).history
