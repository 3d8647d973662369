"""Text that grows token by token, and the stop strings in it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora_jax.tokenizer import Detokenizer, StopChecker, Tokenizer
from tests.plora_jax.tokenizers_for_tests import default_tokenizer, pack_tokenizer, sentencepiece_tokenizer

REPLACEMENT = "\ufffd"
ALPHABET = "ab é你好ñ\u0301👩\u200d🚀😀한\n"
# Ids of the default model that stand for one byte each: 256 of them follow the 17 special tokens.
BYTE_IDS = st.integers(17, 272)


def pieces(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.append(token_id) for token_id in output), detokenizer.flush()]


def continuation(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    return tokenizer.decode(prompt + output, skip)[len(tokenizer.decode(prompt, skip)) :]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(BYTE_IDS, st.integers(0, 49151)), max_size=60), st.booleans(), st.text("a é", max_size=9))
def test_detokenizer_any_ids_join_to_the_decoded_text(output: list[int], skip: bool, prompt_text: str) -> None:
    tokenizer = default_tokenizer()
    prompt = tokenizer.encode(prompt_text)
    assert "".join(pieces(tokenizer, prompt, output, skip=skip)) == continuation(tokenizer, prompt, output, skip=skip)


@settings(max_examples=100, deadline=None)
@given(st.lists(BYTE_IDS, max_size=120))
def test_detokenizer_random_bytes_join_to_the_decoded_text(output: list[int]) -> None:
    tokenizer = default_tokenizer()
    assert "".join(pieces(tokenizer, [504], output)) == continuation(tokenizer, [504], output)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40), st.booleans(), st.lists(st.integers(0, 255), max_size=12))
def test_detokenizer_wordlevel_ids_join_to_the_decoded_text(output: list[int], skip: bool, prompt: list[int]) -> None:
    tokenizer = pack_tokenizer()
    assert "".join(pieces(tokenizer, prompt, output, skip=skip)) == continuation(tokenizer, prompt, output, skip=skip)


@pytest.mark.parametrize("make", [default_tokenizer, sentencepiece_tokenizer])
@settings(max_examples=100, deadline=None)
@given(st.text(ALPHABET, max_size=40), st.text(ALPHABET, max_size=10))
def test_detokenizer_text_that_ends_well_never_shows_a_replacement(make, text: str, prompt_text: str) -> None:
    tokenizer = make()
    prompt, output = tokenizer.encode(prompt_text), tokenizer.encode(text, add_special_tokens=False)
    got = pieces(tokenizer, prompt, output)
    assert "".join(got) == continuation(tokenizer, prompt, output)
    assert not any(REPLACEMENT in piece for piece in got)
    assert got[-1] == ""  # nothing was held back at the end


def test_detokenizer_long_run_of_byte_tokens_comes_out_a_character_at_a_time() -> None:
    tokenizer = sentencepiece_tokenizer()
    output = tokenizer.encode("😀" * 40, add_special_tokens=False)[1:]
    assert len(output) == 160
    assert pieces(tokenizer, [1], output) == ["", "", "", "😀"] * 40 + [""]


def test_detokenizer_character_over_four_tokens_waits_for_its_last_byte() -> None:
    tokenizer = default_tokenizer()
    byte_ids = {tokenizer.token_bytes(i): i for i in range(17, 273)}
    output = [byte_ids[bytes([byte])] for byte in "a😀b".encode()]
    assert pieces(tokenizer, [504], output) == ["a", "", "", "", "😀", "b", ""]


def test_detokenizer_bad_bytes_are_not_held_for_ever() -> None:
    tokenizer = default_tokenizer()
    bad = next(i for i in range(17, 273) if tokenizer.token_bytes(i) == b"\x80")
    got = pieces(tokenizer, [504], [bad] * 100)
    held = [n - len(text) for n, text in enumerate(itertools.accumulate(got[:-1]), start=1)]
    assert max(held) == 3
    assert "".join(got) == REPLACEMENT * 100


def test_detokenizer_genuine_replacement_character_comes_out() -> None:
    tokenizer = default_tokenizer()
    output = tokenizer.encode("a\ufffd", add_special_tokens=False)
    assert "".join(pieces(tokenizer, [504], output)) == "a\ufffd"


def test_detokenizer_unfinished_character_is_flushed_as_replacement() -> None:
    tokenizer = default_tokenizer()
    lead = next(i for i in range(17, 273) if tokenizer.token_bytes(i) == b"\xf0")
    assert pieces(tokenizer, [504], [504, lead]) == ["The", "", REPLACEMENT]


def test_detokenizer_continuation_of_sentencepiece_prompt_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    ab = tokenizer.encode("ab", add_special_tokens=False)
    assert pieces(tokenizer, [1, *ab], ab + ab) == [" ab", " ab", ""]
    assert pieces(tokenizer, [1], ab + ab) == ["ab", " ab", ""]


def test_detokenizer_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = default_tokenizer()
    assert pieces(tokenizer, [1], [504, 2]) == ["The", "", ""]
    assert pieces(tokenizer, [1], [504, 2], skip=False) == ["The", "<|im_end|>", ""]


@pytest.mark.parametrize("output", [[2] * 500, [273] * 500, [200] * 500])
def test_detokenizer_long_output_keeps_its_window_short(output: list[int]) -> None:
    detokenizer = Detokenizer(default_tokenizer(), list(range(300, 700)), skip_special_tokens=True)
    for token_id in output:
        detokenizer.append(token_id)
        assert len(detokenizer._window) <= 33


def stop_text(stop: tuple[str, ...], fed: list[str], *, include: bool = False) -> tuple[str, str | None]:
    checker, sent = StopChecker(stop, include), ""
    for piece in fed:
        emit, matched = checker.feed(piece)
        sent += emit
        if matched is not None:
            return sent, matched
    return sent + checker.flush(), None


def expected_stop(stop: tuple[str, ...], text: str, *, include: bool) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.booleans(),
)
def test_stop_checker_any_cut_gives_the_text_before_the_first_match(stop, fed, include) -> None:
    assert stop_text(stop, fed, include=include) == expected_stop(stop, "".join(fed), include=include)


def test_stop_checker_string_over_several_pieces_sends_nothing_of_it() -> None:
    checker = StopChecker(("STOP",), False)
    assert checker.feed("one S") == ("one ", None)
    assert checker.feed("TO") == ("", None)
    assert checker.feed("P two") == ("", "STOP")


def test_stop_checker_held_text_that_is_no_match_comes_out() -> None:
    checker = StopChecker(("STOP",), False)
    assert checker.feed("a ST") == ("a ", None)
    assert checker.feed("ONE S") == ("STONE ", None)
    assert checker.flush() == "S"
    assert checker.flush() == ""


def test_stop_checker_include_stop_ends_with_the_stop_string() -> None:
    assert stop_text(("\n\n", "END"), ["x", "\n", "\nEND"], include=True) == ("x\n\n", "\n\n")


def test_stop_checker_without_stop_strings_passes_text_through() -> None:
    assert stop_text((), ["a", "b"]) == ("ab", None)


def test_stop_checker_too_short_text_counts_only_matches_that_end_later() -> None:
    checker = StopChecker(("ab",), False)
    assert checker.feed("xab", may_stop=False) == ("xab", None)
    assert checker.feed("ya", may_stop=False) == ("y", None)
    assert checker.feed("b") == ("", "ab")


def test_stop_checker_barred_match_stays_barred_while_it_is_held() -> None:
    checker = StopChecker(("aa", "aab"), False)
    assert checker.feed("aa", may_stop=False) == ("", None)
    assert checker.feed("c") == ("aac", None)
    assert checker.feed("aa") == ("", "aa")
