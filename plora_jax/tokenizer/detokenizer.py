"""The text of one completion, piece by piece as its tokens arrive.

A token may end inside a character, and a sentencepiece tokenizer drops the leading space of a text but not that of a
continuation. So a short window of tokens is decoded at each step, starting with some that were given out before, and
only what is new in it is given out (the prefix and read offsets of text-generation-inference and vLLM). A text that
ends in U+FFFD, which stands for bytes that are no character yet, is held back: no character takes more than four
tokens, so after that the bytes are known to be bad and go out as U+FFFD.
"""

from __future__ import annotations

from collections.abc import Sequence

from plora_jax.tokenizer.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_MAX_CHARACTER_TOKENS = 4  # a UTF-8 character has at most 4 bytes, a token at least one
_MAX_OPEN_CHARS = _MAX_CHARACTER_TOKENS - 1  # U+FFFD that an unfinished character shows as, at most
_MAX_WINDOW_TOKENS = 16
_KEPT_TOKENS = 8


class Detokenizer:
    """Incremental decoding: the pieces, put together, are the text of the output as a continuation of the prompt.

    Cost: the decoding of at most 16 tokens for each token.

    Args:
        tokenizer: the model's tokenizer.
        prompt_ids: the prompt; its last tokens decide whether the output starts with a space.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = self._prompt_window(prompt_ids)
        self._settled_tokens = len(self._window)  # tokens of the window whose text is out and ends with a character
        self._given_chars = len(self._decode(self._window))  # characters of the window's text that are out

    def append(self, token_id: int) -> str:
        """Takes the next token and returns the text that became certain, which may be empty."""
        if not self._shows(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            piece = text[self._given_chars :]
            self._settle(len(text))
            return piece
        if len(self._window) - self._settled_tokens < _MAX_CHARACTER_TOKENS:
            return ""
        return self._force()

    def flush(self) -> str:
        """Returns what was held back, once the completion has ended; an unfinished character becomes U+FFFD."""
        text = self._decode(self._window)
        piece = text[self._given_chars :]
        self._settle(len(text))
        return piece

    def _settle(self, given_chars: int) -> None:
        """Marks the whole window as given out and, where it is long, keeps the tokens since the last such mark."""
        self._given_chars = given_chars
        if len(self._window) > _MAX_WINDOW_TOKENS and self._settled_tokens < len(self._window):
            self._window = self._window[self._settled_tokens :]
            self._given_chars = len(self._decode(self._window))
        self._settled_tokens = len(self._window)

    def _force(self) -> str:
        """Gives out bytes that can be no character any more; the end of the window may still become one."""
        if self._settled_tokens:
            # A byte-fallback decoder shows a whole run of byte tokens as bad if one is: leave the good ones out of it.
            self._window = self._window[self._settled_tokens :]
            self._settled_tokens = self._given_chars = 0
        text = self._decode(self._window)
        open_chars = min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_OPEN_CHARS)
        piece = text[self._given_chars : len(text) - open_chars]
        self._given_chars = max(self._given_chars, len(text) - open_chars)
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._window = self._window[-_KEPT_TOKENS:]
            self._given_chars = len(self._decode(self._window)) - open_chars
        return piece

    def _prompt_window(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last few visible tokens of the prompt, starting where a character starts."""
        tail: list[int] = []
        for token_id in reversed(prompt_ids):
            if len(tail) == _KEPT_TOKENS:
                break
            if self._shows(token_id):
                tail.append(token_id)
        tail.reverse()
        cuts = range(min(_MAX_CHARACTER_TOKENS, len(tail)))
        return next((tail[c:] for c in reversed(cuts) if not self._decode(tail[c:]).startswith(REPLACEMENT)), tail)

    def _shows(self, token_id: int) -> bool:
        """Whether the token can add to the text. The others stay out of the window, which they would make longer."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return False
        return bool(self._tokenizer.id_to_token(token_id))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
