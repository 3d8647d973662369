"""A conversation in the terminal: answers as they come, and commands that start with a slash."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TextIO

from plora_jax.engine.engine import Engine
from plora_jax.engine.errors import GenerationFailedError, UnknownAdapterError
from plora_jax.engine.params import RequestError, SamplingParams
from plora_jax.tokenizer import ChatError, render_chat

_HELP = """\
/adapter NAME   answer with this adapter from now on; without a name, with the base model
/adapters       list the adapters
/system TEXT    set the system message; without a text, take it away
/reset          forget the conversation
/help           this list
/quit           end (or Ctrl-D)
Ctrl-C stops the answer that runs."""


class Speaker:
    """Asks the engine and prints what it says, piece by piece.

    Args:
        engine: started.
        sampling: options of every answer.
        adapter: name of an adapter, None for the base model.
        template: chat template; None for the model's own.
        out: answers go there.
        err: everything else.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams,
        *,
        adapter: str | None = None,
        template: str | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self.engine, self.adapter = engine, adapter
        self._sampling, self._template = sampling, template
        self._out, self._err = out or sys.stdout, err or sys.stderr

    def note(self, text: str) -> None:
        """Prints something that is no answer."""
        print(text, file=self._err, flush=True)

    def answer_once(self, prompt: str, *, raw: bool, system: str | None) -> int:
        """Answers one prompt; returns the exit code of the program."""
        try:
            self.say(self.encode(prompt) if raw else self.render([*_opening(system), _message("user", prompt)]))
        except (RequestError, ChatError, UnknownAdapterError, GenerationFailedError) as error:
            self.note(f"error: {error}")
            return 1
        return 0

    def encode(self, text: str) -> list[int]:
        return self.engine.tokenizer.encode(text)

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation."""
        text = render_chat(self.engine.tokenizer, messages, template=self._template)
        return self.engine.tokenizer.encode(text, add_special_tokens=False)

    def say(self, prompt_ids: list[int]) -> str:
        """Prints an answer as it comes; Ctrl-C ends it.

        Returns:
            The text, as far as it came.

        Raises:
            GenerationFailedError, RequestError, UnknownAdapterError: as the engine says.
        """
        generation = self.engine.submit(prompt_ids, self._sampling, adapter=self.adapter)
        text = ""
        try:
            for delta in generation:
                if delta.finish_reason == "error":
                    raise GenerationFailedError(delta.error or "the generation failed")
                text += delta.text
                print(delta.text, end="", file=self._out, flush=True)
        except KeyboardInterrupt:
            self.note(" (stopped)")
        finally:
            generation.cancel()
        print(file=self._out, flush=True)
        return text


@dataclasses.dataclass
class ChatTerminal:
    """A conversation. Owns its messages.

    Attributes:
        speaker: answers.
        system: system message.
        read_line: asks the user for a line; raises EOFError at the end of the input.
        messages: what was said so far.
    """

    speaker: Speaker
    system: str | None = None
    read_line: Callable[[str], str] = input
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def run(self) -> int:
        """Chats until /quit or the end of the input; returns the exit code of the program."""
        _use_line_editing()
        if self.speaker.adapter is not None and not self._use_adapter(self.speaker.adapter):
            return 1
        self.speaker.note("Chat with " + self.speaker.engine.model_name + "; /help lists the commands.")
        while True:
            try:
                line = self.read_line(f"{self.speaker.adapter or 'base'}> ").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                # At the prompt it only throws the line away, as in a shell.
                self.speaker.note("\n/quit or Ctrl-D ends the chat.")
                continue
            if line in ("/quit", "/exit"):
                return 0
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        asked = [*self.messages, _message("user", line)]
        try:
            text = self.speaker.say(self.speaker.render(_opening(self.system) + asked))
        except RequestError as error:
            self.speaker.note(f"error: {error} /reset forgets the conversation.")
        except (ChatError, UnknownAdapterError, GenerationFailedError) as error:
            self.speaker.note(f"error: {error}")
        else:
            self.messages = [*asked, _message("assistant", text)]

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        note = self.speaker.note
        match word:
            case "/adapter":
                self._use_adapter(rest)
            case "/adapters":
                note("\n".join(self._names()) or "no adapters are loaded")
            case "/system":
                self.system = rest or None
                note("the system message is set" if rest else "no system message")
            case "/reset":
                self.messages = []
                note("the conversation is forgotten")
            case "/help":
                note(_HELP)
            case _:
                note(f"there is no command {word}; /help lists them")

    def _use_adapter(self, name: str) -> bool:
        if name and name not in self._names():
            known = ", ".join(self._names()) or "none"
            self.speaker.note(f"no adapter named {name!r} is loaded; there are: {known}")
            return False
        self.speaker.adapter = name or None
        self.speaker.note(f"answering with {f'adapter {name}' if name else 'the base model'}")
        return True

    def _names(self) -> list[str]:
        return [status.name for status in self.speaker.engine.adapters()]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _opening(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [_message("system", system)]


def _use_line_editing() -> None:
    """Gives `input` a history and arrow keys where the platform has them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
