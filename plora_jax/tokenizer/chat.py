"""Chat messages to the text of a prompt, by the model's own Jinja template.

The environment is the one that transformers gives to chat templates (transformers 5, utils/chat_template_utils.py):
sandboxed and immutable, blocks trimmed, loop controls, a `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, the special tokens as variables and the `generation` tag, whose body is rendered as it is.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plora_jax.tokenizer.tokenizer import Tokenizer
from plora_jax.wording import in_json

_RESERVED = frozenset({"messages", "add_generation_prompt"})


class ChatError(ValueError):
    """Messages that cannot become a prompt, with the reason."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    template: str | None = None,
    **kwargs: Any,
) -> str:
    """Renders a conversation as the text of a prompt.

    The text holds the special tokens already: encode it with `add_special_tokens=False`.

    Args:
        tokenizer: gives the template and the special tokens.
        messages: each with a role and a content, which is a string or a list of `{"type": "text", "text": ...}` parts
            (joined with newlines, as vLLM does).
        add_generation_prompt: end with the opening of the assistant's turn.
        template: Jinja text, or the name of one of the tokenizer's templates; None for its default one.
        **kwargs: more variables for the template.

    Raises:
        ChatError: no template, a message of the wrong form, or what the template itself objects to.
    """
    taken = sorted(_RESERVED & kwargs.keys())
    if taken:
        raise ChatError(f"chat template variables may not be named {', '.join(taken)}: the request sets those itself.")
    source = _template_source(tokenizer, template)
    plain = [_plain_message(i, message) for i, message in enumerate(messages)]
    if not plain:
        raise ChatError("messages is empty; a chat needs at least one message.")
    variables: dict[str, Any] = {"tools": None, "documents": None, **tokenizer.special_tokens, **kwargs}
    check_syntax(source)
    try:
        return _compile(source).render(messages=plain, add_generation_prompt=add_generation_prompt, **variables)
    except Exception as error:  # a template is a program: on odd messages it may fail in any way
        raise ChatError(f"the chat template cannot render these messages: {error}") from error


def check_syntax(template: str) -> None:
    """Raises ChatError where a template is not valid Jinja."""
    try:
        _compile(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error


def _template_source(tokenizer: Tokenizer, template: str | None) -> str:
    if template is not None:
        return tokenizer.chat_templates.get(template, template)
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    if tokenizer.chat_templates:
        names = ", ".join(sorted(tokenizer.chat_templates))
        raise ChatError(f"the model has no default chat template, only {names}: choose one with --chat_template.")
    raise ChatError("the model has no chat template: give one with --chat_template.")


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its content as one string."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatError(f"messages[{index}] must be an object with a role, got {in_json(message)}.")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, (list, tuple)):
        raise ChatError(f"messages[{index}].content must be a string or a list of parts, got {in_json(content)}.")
    texts = [_part_text(f"messages[{index}].content[{i}]", part) for i, part in enumerate(content)]
    return {**message, "content": "\n".join(texts)}


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise ChatError(f'{where} has type {in_json(kind)}; this model reads only parts of type "text".')
    if not isinstance(part.get("text"), str):
        raise ChatError(f"{where}.text must be a string, got {in_json(part.get('text'))}.")
    return part["text"]


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says, for training masks; in a prompt it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)
