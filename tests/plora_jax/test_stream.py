"""One completion's way out, where the engine's tests do not reach: text inside a token, prompts computed twice."""

from plora_jax.engine import RowResult, SamplingParams, Sequence, TokenLogprobs
from plora_jax.engine.plan import Row
from plora_jax.engine.stream import TokenStream
from plora_jax.tokenizer import StopChecker


class HalfCharacters:
    """A decoder that gives the text of two tokens with the second."""

    def __init__(self) -> None:
        self._held = ""

    def append(self, token_id: int) -> str:
        self._held += chr(token_id)
        if len(self._held) < 2:
            return ""
        text, self._held = self._held, ""
        return text

    def flush(self) -> str:
        return "?" if self._held else ""


def make_stream(sampling: SamplingParams) -> TokenStream:
    sequence = Sequence(seq_id=1, prompt_ids=[1, 2, 3, 4, 5], sampling=sampling, seed=0)
    stops = StopChecker(sampling.stop, sampling.include_stop_str_in_output)
    return TokenStream(0, sequence, eos_token_ids=frozenset({0}), decoder=HalfCharacters(), stops=stops)


def feed(stream: TokenStream, character: str) -> tuple[str, str | None]:
    """Draws a token; returns its piece's text and finish_reason."""
    seq = stream.sequence
    seq.output_ids.append(ord(character))
    delta = stream.advance(Row(seq, 0, 1, decode=True, samples=True), RowResult(ord(character), None, ()))
    assert delta is not None
    return delta.text, delta.finish_reason


def test_advance_text_follows_when_the_character_is_whole() -> None:
    stream = make_stream(SamplingParams(max_tokens=4))
    assert [feed(stream, c) for c in "abcd"] == [("", None), ("ab", None), ("", None), ("cd", "length")]


def test_advance_end_inside_a_character_flushes_the_decoder() -> None:
    stream = make_stream(SamplingParams(max_tokens=3))
    assert [feed(stream, c) for c in "abc"] == [("", None), ("ab", None), ("?", "length")]


def test_advance_stop_string_inside_a_token_cuts_its_text() -> None:
    stream = make_stream(SamplingParams(stop=("c",)))
    assert [feed(stream, c) for c in "abcd"] == [("", None), ("ab", None), ("", None), ("", "stop")]


def test_advance_stop_string_in_flushed_text_is_a_stop() -> None:
    stream = make_stream(SamplingParams(stop=("?",), max_tokens=1))
    assert feed(stream, "a") == ("", "stop")


def test_abort_gives_text_held_for_a_stop_string_but_no_half_character() -> None:
    stream = make_stream(SamplingParams(stop=("bx",)))
    assert [feed(stream, c) for c in "abc"] == [("", None), ("a", None), ("", None)]
    assert (stream.abort().text, stream.abort().finish_reason) == ("b", "abort")


def test_advance_prompt_computed_again_gives_its_logprobs_once() -> None:
    stream = make_stream(SamplingParams(prompt_logprobs=0))
    seq = stream.sequence

    def scored(start: int, count: int, token: int | None) -> tuple[TokenLogprobs | None, ...] | None:
        entries = tuple(TokenLogprobs(seq.prompt_ids[p], 0.0, ()) for p in range(start + 1, min(start + count + 1, 5)))
        if token is not None:
            seq.output_ids.append(token)
        row = Row(seq, start, count, decode=False, samples=token is not None)
        delta = stream.advance(row, RowResult(token, None, entries))
        return delta.prompt_logprobs if delta else None

    assert scored(0, 2, None) is None
    # Preempted here: it starts again.
    assert scored(0, 3, None) is None
    first = scored(3, 2, 65)
    assert first is not None
    assert [entry and entry.token_id for entry in first] == [None, 2, 3, 4, 5]
    assert scored(0, 6, 66) is None
