"""The files that stand beside tokenizer.json in a Hugging Face directory, as one configuration."""

from __future__ import annotations

import json
import pathlib
from typing import Any


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded exactly; the message says what to do."""


def read_tokenizer_config(directory: pathlib.Path) -> dict[str, Any]:
    """Reads tokenizer_config.json with what other files add to it.

    special_tokens_map.json fills in special tokens that tokenizer_config.json leaves out. Chat templates: those of
    chat_template.jinja and additional_chat_templates/ win over chat_template.json, which wins over the entry of
    tokenizer_config.json.

    Returns:
        The entries; "chat_template", where there is one, is a list of name and template.

    Raises:
        TokenizerError: a file is not a JSON object or its chat template has an unknown form.
    """
    config = _read_object(directory / "tokenizer_config.json")
    for name, token in _read_object(directory / "special_tokens_map.json").items():
        config.setdefault(name, token)
    templates = _templates(directory / "tokenizer_config.json", config.pop("chat_template", None))
    file = directory / "chat_template.json"
    templates |= _templates(file, _read_object(file).get("chat_template"))
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _read_object(file: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file, empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} must hold a JSON object, got {type(value).__name__}.")
    return value


def _templates(file: pathlib.Path, entry: Any) -> dict[str, str]:
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    try:
        return {item["name"]: item["template"] for item in entry}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            f"{file}: chat_template must be a string or a list of objects with name and template, got {entry!r}."
        ) from error
