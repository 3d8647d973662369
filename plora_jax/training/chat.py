"""The base model's own tokenizer and chat template, as `data.tokenize` needs them."""

from __future__ import annotations

from collections.abc import Sequence

from plora_jax.config import ModelConfig
from plora_jax.tokenizer import ChatError, Tokenizer, render_chat
from plora_jax.training.config import TrainingError
from plora_jax.training.data import Message


class ModelChat:
    """A model's tokenizer and template.

    Args:
        tokenizer: of the base model.
        model: its configuration, for the end tokens.
        template: Jinja text to use in place of the model's own.
    """

    def __init__(self, tokenizer: Tokenizer, model: ModelConfig, *, template: str | None = None) -> None:
        self._tokenizer, self._template = tokenizer, template
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.eos_token_ids = model.eos_token_ids or own

    def encode(self, text: str, *, start: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=start)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as text.

        Raises:
            TrainingError: the model has no template, or its template refuses these messages.
        """
        try:
            return render_chat(
                self._tokenizer, messages, add_generation_prompt=add_generation_prompt, template=self._template
            )
        except ChatError as error:
            raise TrainingError(f"{error} (first message: {messages[0]['content'][:60]!r})") from error
