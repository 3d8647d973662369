"""What a server refuses and how it says so; no openai client between, so that nothing is hidden."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from tests.launch.http_rig import REPLY, HttpRig, http_rig


@pytest.fixture(scope="module")
def rig() -> Iterator[HttpRig]:
    with http_rig(max_prompts=4) as made:
        yield made


@pytest.fixture(scope="module")
def client(rig: HttpRig) -> TestClient:
    return rig.client()


_HI = [{"role": "user", "content": "Hi"}]

_BAD_BOTH = [
    ({"temperature": -1}, "temperature", "between 0 and 100, got -1"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"n": 10**6}, "n", "between 1 and 128, got 1000000"),
    ({"n": 0}, "n", "got 0"),
    ({"top_p": 0}, "top_p", "above 0 and at most 1"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"min_p": 1.5}, "min_p", "1.5"),
    ({"presence_penalty": 3}, "presence_penalty", "between -2 and 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"logit_bias": {"258": 1}}, "logit_bias", "vocabulary size 258"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "integer"),
    ({"stop": ""}, "stop", 'stop must be a list of strings that are not empty, got [""].'),
    ({"stop": ["a" * 500, ""]}, "stop", f'got ["{"a" * 98}... (508 characters).'),
    (
        {"logit_bias": {"1": 1000}},
        "logit_bias",
        'must be an object with values between -100 and 100, got {"1": 1000.0}.',
    ),
    ({"seed": 10**300}, "seed", f"64-bit integer, got 1{'0' * 99}... (301 characters)."),
    ({"max_tokens": 10**300}, "max_tokens", f"1{'0' * 99}... (301 characters) in max_tokens"),
    ({"stop": 3}, "stop", "list"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "vocabulary"),
    ({"stop_token_ids": [1] * 500}, "stop_token_ids", "at most 496 entries, those of logit_bias counted"),
    ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    ({"max_tokens": 300}, "max_tokens", "256 tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most"),
    ({"seed": 2**70}, "seed", "64-bit"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=true"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"guided_regex": "a*"}, "guided_regex", "not supported"),
    ({"guided_json": {}}, "guided_json", "guided_json is not supported by this server: leave it out."),
    ({"guided_choice": []}, "guided_choice", "not supported"),
    ({"guided_grammar": ""}, "guided_grammar", "not supported"),
    ({"structured_outputs": {}}, "structured_outputs", "not supported"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "not supported"),
    ({"bad_words": ["x"]}, "bad_words", "not supported"),
]
_BAD_COMPLETION = [
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "at least one"),
    ({"prompt": [[]]}, "prompt", "must be"),
    ({"prompt": 7}, "prompt", "must be a string"),
    ({"prompt": [1, "a"]}, "prompt", "must be a string"),
    ({"prompt": [10**300]}, "prompt", f"Token id 1{'0' * 99}... (301 characters) is out of vocabulary"),
    ({"prompt": [300]}, "prompt", "Token id 300 is out of vocabulary"),
    ({"prompt": ["a"] * 5}, "prompt", "at most 4 prompts, got 5"),
    ({"prompt": "a" * 300}, "prompt", "your prompt holds 300 tokens"),
    ({"prompt": None}, "prompt", "must be a string"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"best_of": 3}, "best_of", "best_of above n"),
]
_BAD_CHAT = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is missing"),
    ({"messages": [{"content": "x"}]}, "messages", "must be an object with a role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", 'has type "image_url"; this'),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tools are not supported"),
    ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages", "maximum context length"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tool_choice": "auto"}, "tool_choice", "not supported"),
    ({"functions": [{}]}, "functions", "not supported"),
    ({"audio": {"voice": "x"}}, "audio", "not supported"),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20, got 21"),
    ({"logprobs": 3}, "logprobs", "boolean"),
    ({"max_completion_tokens": 300}, "max_completion_tokens", "256 tokens"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both"),
    ({"chat_template_kwargs": {"template": "x"}}, "chat_template_kwargs", "'template'"),
    ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs", "a field of the request"),
    (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs",
        "may not hold 'messages'; give them as a field",
    ),
    ({"messages": [{"role": "user", "content": True}]}, "messages", "a string or a list of parts, got true."),
    ({"messages": [{"role": 1, "content": "x" * 500}]}, "messages", f'got {{"role": 1, "content": "{"x" * 76}... ('),
]


@pytest.mark.parametrize(("change", "param", "says"), _BAD_BOTH + _BAD_COMPLETION, ids=str)
def test_completion_with_a_bad_field_is_400_naming_it(client, change, param, says):
    _check_refused(client.post("/v1/completions", json={"model": "base", "prompt": "Hi", **change}), param, says)


@pytest.mark.parametrize(("change", "param", "says"), _BAD_BOTH + _BAD_CHAT, ids=str)
def test_chat_with_a_bad_field_is_400_naming_it(client, change, param, says):
    _check_refused(client.post("/v1/chat/completions", json={"model": "base", "messages": _HI, **change}), param, says)


def _check_refused(response, param, says):
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_number_that_is_not_finite_is_refused(client, route):
    body = '{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
    response = client.post(route, content=body, headers={"Content-Type": "application/json"})
    _check_refused(response, "temperature", "temperature")


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        ("{", "application/json", "not valid JSON"),
        ("[]", "application/json", "JSON object"),
        ("", "application/json", "JSON object"),
        ('{"prompt": "x"}', "text/plain", "JSON object"),
        ("{}", "application/json", "prompt: Field required"),
    ],
)
def test_body_of_another_form_is_400(client, body, kind, says):
    response = client.post("/v1/completions", content=body, headers={"Content-Type": kind})
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_half_a_surrogate_pair_is_400(client, route):
    body = '{"prompt": "a\\ud800", "messages": [{"role": "user", "content": "a\\ud800"}]}'
    response = client.post(route, content=body, headers={"Content-Type": "application/json"})
    param = "messages" if "chat" in route else "prompt"
    _check_refused(response, param, f"{param} is not valid Unicode: lone surrogate U+D800.")


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_half_a_surrogate_pair_to_tokenize_is_400(client, field):
    value = '"a\\ud800"' if field == "prompt" else '[{"role": "user", "content": "a\\ud800"}]'
    body = f'{{"{field}": {value}}}'
    response = client.post("/tokenize", content=body, headers={"Content-Type": "application/json"})
    _check_refused(response, field, f"{field} is not valid Unicode: lone surrogate U+D800.")


def test_model_that_no_answer_can_name_is_404(client):
    body = '{"prompt": "a", "model": "\\ud800"}'
    response = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "The model `\\ud800` does not exist."


def test_model_with_a_long_name_is_not_echoed_whole(client):
    response = client.post("/v1/completions", json={"prompt": "a", "model": "m" * 5000})
    assert response.json()["error"]["message"] == f"The model `{'m' * 255}... (5000 characters)` does not exist."


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model": "\xff"}', "The body is not valid JSON: byte 0xFF at position 11 is not valid UTF-8."),
        (b"[" * 100_000, "The body is not JSON that this server reads: its arrays and objects are nested too deeply."),
        (
            b'{"seed": ' + b"9" * 5000 + b"}",
            "The body is not JSON that this server reads: a number has over 4300 digits.",
        ),
    ],
    ids=["utf8", "depth", "digits"],
)
def test_body_that_cannot_be_read_says_why(client, body, says):
    response = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == says


def test_unsupported_fields_that_ask_for_nothing_and_unknown_ones_are_ignored(client):
    idle = {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "audio": None, "functions": []}
    body = {"messages": _HI, "user": "me", "store": True, "made_up": 1, **idle}
    response = client.post("/v1/chat/completions", json=body)
    assert response.json()["choices"][0]["message"]["content"] == REPLY
    assert response.json()["model"] == "base"


def test_fields_sent_as_null_take_their_defaults(client):
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "logit_bias", "max_tokens", "stream"))
    response = client.post("/v1/chat/completions", json={"messages": _HI, **nulls})
    assert response.json()["choices"][0]["message"]["content"] == REPLY


def test_unknown_path_and_wrong_method_have_the_openai_shape(client):
    for response, code in ((client.get("/v1/nothing"), 404), (client.get("/v1/completions"), 405)):
        assert response.status_code == code
        assert response.json()["error"]["code"] == code


def test_stream_is_written_as_server_sent_events(client):
    body = {"prompt": "Hi", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    response = client.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, "length"]
    assert [c["usage"] for c in chunks[:-1]] == [None, None]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2}


@pytest.mark.parametrize(
    ("route", "prompt", "counted"),
    [
        ("/v1/completions", {"prompt": "Hi"}, [(2, 1), (2, 2), (2, 2)]),
        ("/v1/chat/completions", {"messages": _HI}, [(21, 0), (21, 1), (21, 2), (21, 2)]),
    ],
)
def test_usage_that_is_asked_for_in_every_chunk_counts_what_there_is_so_far(client, route, prompt, counted):
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = client.post(route, json={**prompt, "max_tokens": 2, "stream": True, "stream_options": options})
    events = response.text.split("\n\n")
    usages = [json.loads(event.removeprefix("data: "))["usage"] for event in events[:-2]]
    assert [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages] == counted
    assert all(usage["total_tokens"] == sum(pair) for usage, pair in zip(usages, counted, strict=True))


def test_usage_in_every_chunk_is_part_of_include_usage(client):
    body = {"prompt": "Hi", "max_tokens": 2, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert "usage" not in client.post("/v1/completions", json=body).text


def test_continue_final_message_leaves_the_turn_open(client):
    messages = [*_HI, {"role": "assistant", "content": "He "}]
    opened = client.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert bytes(opened[-3:]) == b"\nHe"
    answer = client.post("/v1/chat/completions", json={"messages": messages, "continue_final_message": True})
    assert answer.json()["usage"]["prompt_tokens"] == len(opened)


def test_prompt_logprobs_of_a_chat_stand_beside_the_choices(client):
    body = {"messages": _HI, "prompt_logprobs": 0, "max_tokens": 1}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None


def test_text_parts_of_a_message_are_joined(client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole = client.post("/tokenize", json={"messages": [{"role": "user", "content": "a\nb"}]}).json()
    assert client.post("/tokenize", json={"messages": [{"role": "user", "content": parts}]}).json() == whole


def test_tokenize_and_detokenize_are_inverse(client):
    answer = client.post("/tokenize", json={"prompt": "wör<|im_end|>", "return_token_strs": True}).json()
    assert answer == {
        "count": 5,
        "max_model_len": 256,
        "tokens": [ord("w"), 0xC3, 0xB6, ord("r"), 257],
        "token_strs": ["w", "Ã", "¶", "r", "<|im_end|>"],
    }
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "wör<|im_end|>"}


@pytest.mark.parametrize(
    ("route", "body", "code", "says"),
    [
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "model": "y"}, 404, "The model `y` does not exist."),
        ("/detokenize", {"tokens": [258]}, 400, "Token id 258 is out of vocabulary"),
        ("/detokenize", {"tokens": [2**40]}, 400, "out of vocabulary"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ],
)
def test_tokenize_routes_refuse(client, route, body, code, says):
    response = client.post(route, json=body)
    assert response.status_code == code
    assert says in response.json()["error"]["message"]


def test_version_and_health_answer(client):
    assert list(client.get("/version").json()) == ["version"]
    for path in ("/health", "/ping"):
        assert (client.get(path).status_code, client.get(path).content) == (200, b"")


def test_description_of_the_api_names_every_route(client):
    paths = set(client.get("/openapi.json").json()["paths"])
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/load_lora_adapter", "/metrics"} <= paths


def test_refused_requests_leave_nothing_behind(rig, client):
    body = {"prompt": ["a", "a" * 300], "max_tokens": 5}
    assert client.post("/v1/completions", json=body).status_code == 400
    rig.wait_idle()
