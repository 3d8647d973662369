"""Text to token ids and back: the tokenizer of a base model, its chat template, and text that grows token by token."""

from plora_jax.tokenizer.chat import ChatError, check_syntax, render_chat
from plora_jax.tokenizer.detokenizer import Detokenizer
from plora_jax.tokenizer.stop import StopChecker
from plora_jax.tokenizer.tokenizer import Tokenizer, TokenizerError, load_tokenizer

__all__ = [
    "ChatError",
    "Detokenizer",
    "StopChecker",
    "Tokenizer",
    "TokenizerError",
    "check_syntax",
    "load_tokenizer",
    "render_chat",
]
