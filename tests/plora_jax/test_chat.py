"""Chat messages to prompt text."""

from __future__ import annotations

import re

import pytest

from plora_jax.tokenizer import ChatError, render_chat
from tests.plora_jax.tokenizers_for_tests import default_tokenizer, pack_tokenizer

USER = [{"role": "user", "content": "hi"}]


def render(template: str, conversation=USER, /, **kwargs) -> str:
    return render_chat(default_tokenizer(), conversation, template=template, **kwargs)


def test_render_chat_default_model_gives_the_golden_prompt() -> None:
    tokenizer = default_tokenizer()
    text = render_chat(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 37  # golden of DESIGN.md


def test_render_chat_own_system_message_replaces_the_default_one() -> None:
    text = render_chat(default_tokenizer(), [{"role": "system", "content": "S"}, *USER], add_generation_prompt=False)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"


def test_render_chat_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], "messages[0] must be an object with a role"),
        ([{"role": "user", "content": 3}], "messages[0].content must be a string or a list of parts, got 3"),
        (
            [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            'messages[1].content[0] has type "image_url"; this model reads only parts of type "text"',
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a string"),
    ],
)
def test_render_chat_message_of_wrong_form_is_refused(messages, text: str) -> None:
    with pytest.raises(ChatError, match=re.escape(text)):
        render("x", messages)


def test_render_chat_template_objection_is_the_message() -> None:
    with pytest.raises(ChatError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_render_chat_template_that_fails_on_a_message_is_a_chat_error() -> None:
    with pytest.raises(ChatError, match=r"cannot render these messages: .*NoneType"):
        render_chat(default_tokenizer(), [{"role": "user", "content": None}])


def test_render_chat_broken_template_names_its_line() -> None:
    with pytest.raises(ChatError, match="not valid Jinja: line 2"):
        render("a\n{% if %}")


def test_render_chat_without_template_says_which_flag_gives_one() -> None:
    with pytest.raises(ChatError, match="has no chat template: give one with --chat_template"):
        render_chat(pack_tokenizer(), USER)


def test_render_chat_sandbox_refuses_python_internals_and_changes() -> None:
    with pytest.raises(ChatError, match="unsafe"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ChatError, match="append"):
        render("{{ messages.append(1) }}")


def test_render_chat_environment_is_that_of_transformers() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"  # lstrip_blocks, trim_blocks
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'
    assert render("{{ bos_token }} {{ eos_token }}") == "<|im_start|> <|im_end|>"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert render("{{ tools is none }} {{ add_generation_prompt }}", add_generation_prompt=False) == "True False"


def test_render_chat_variables_reach_the_template() -> None:
    assert render("{{ enable_thinking }} {{ tokenizer }}", enable_thinking=False, tokenizer="t") == "False t"


def test_render_chat_variable_that_the_request_sets_is_refused() -> None:
    with pytest.raises(ChatError, match="may not be named messages"):
        render("x", messages=[])
