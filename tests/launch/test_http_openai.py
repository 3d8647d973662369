"""The official openai client, unmodified, against a server over a scripted executor."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.launch.http_rig import REPLY, HttpRig, LiveServer, http_rig, live_server


@pytest.fixture(scope="module")
def rig() -> Iterator[HttpRig]:
    with http_rig() as made:
        yield made


@pytest.fixture(scope="module")
def server(rig: HttpRig) -> Iterator[LiveServer]:
    with live_server(rig.state) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made


_MESSAGES = [{"role": "user", "content": "Hi"}]


def test_chat_whole_answers_with_text_and_usage(client):
    answer = client.chat.completions.create(model="base", messages=_MESSAGES)
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    # <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n, and the answer's bytes with the end token.
    assert answer.usage.prompt_tokens == 1 + 5 + 2 + 1 + 1 + 1 + 10
    assert answer.usage.completion_tokens == len(REPLY.encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream_sends_role_text_and_one_finish_reason(client):
    chunks = list(client.chat.completions.create(model="base", messages=_MESSAGES, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == REPLY
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({c.id for c in chunks}) == 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert all("\ufffd" not in (c.choices[0].delta.content or "") for c in chunks)


def test_chat_stream_with_include_usage_sends_it_last_and_alone(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="base", messages=_MESSAGES, **options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(REPLY.encode()) + 1
    assert all(c.usage is None for c in chunks[:-1])


def test_completion_whole_and_streamed_are_equal(client):
    whole = client.completions.create(model="base", prompt="Hi", max_tokens=50)
    parts = list(client.completions.create(model="base", prompt="Hi", max_tokens=50, stream=True))
    assert whole.choices[0].text == "".join(c.choices[0].text for c in parts) == REPLY
    assert whole.object == parts[0].object == "text_completion"
    assert parts[-1].choices[0].finish_reason == "stop"


def test_completion_without_max_tokens_generates_16(client):
    answer = client.completions.create(model="base", prompt="Hi")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_completion_with_several_prompts_numbers_choices_by_prompt(client):
    answer = client.completions.create(model="base", prompt=["a", "b"], n=2, max_tokens=5, echo=True)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "aHello"), (1, "aHello"), (2, "bHello"), (3, "bHello")]
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == 20


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_before_it_and_sends_nothing_of_it(client, stream):
    answer = client.chat.completions.create(model="base", messages=_MESSAGES, stop=["ld! 1"], stream=stream)
    if stream:
        chunks = list(answer)
        text, choice = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0]
    else:
        text, choice = answer.choices[0].message.content, answer.choices[0]
    assert text == "Hello wör"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "ld! 1")


def test_logprobs_of_chat_have_token_bytes_and_top(client):
    answer = client.chat.completions.create(
        model="base", messages=_MESSAGES, logprobs=True, top_logprobs=1, max_completion_tokens=3
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["H", "e", "l"]
    assert content[0].bytes == [ord("H")]
    assert content[0].logprob == -float(ord("H"))
    assert content[0].top_logprobs[0].token == "H"


def test_logprobs_of_a_split_character_carry_its_bytes(client):
    answer = client.chat.completions.create(model="base", messages=_MESSAGES, logprobs=True)
    content = answer.choices[0].logprobs.content
    assert bytes(b for entry in content[:-1] for b in entry.bytes).decode() == REPLY


def test_logprobs_of_an_echoed_completion_score_the_prompt(client):
    answer = client.completions.create(model="base", prompt="abc", max_tokens=2, logprobs=1, echo=True)
    shape = answer.choices[0].logprobs
    assert answer.choices[0].text == "abcHe"
    assert shape.tokens == ["a", "b", "c", "H", "e"]
    assert shape.text_offset == [0, 1, 2, 3, 4]
    assert shape.token_logprobs == [None, -98.0, -99.0, -72.0, -101.0]
    assert shape.top_logprobs[0] is None
    assert shape.top_logprobs[4] == {"e": -101.0}


def test_logprobs_stream_continues_text_offsets(client):
    options = {"max_tokens": 3, "logprobs": 0, "echo": True, "stream": True}
    shapes = [c.choices[0].logprobs for c in client.completions.create(model="base", prompt="ab", **options)]
    assert [o for s in shapes for o in s.text_offset] == [0, 1, 2, 3, 4]
    assert [t for s in shapes for t in s.tokens] == ["a", "b", "H", "e", "l"]


def test_echo_with_max_tokens_0_scores_the_prompt_alone(client):
    answer = client.completions.create(model="base", prompt="abc", max_tokens=0, logprobs=1, echo=True)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].logprobs.token_logprobs == [None, -98.0, -99.0]
    assert answer.usage.completion_tokens == 0


def test_prompt_logprobs_are_vllms(client):
    answer = client.completions.create(model="base", prompt="ab", max_tokens=1, extra_body={"prompt_logprobs": 1})
    entry = {"logprob": -98.0, "rank": 1, "decoded_token": "b"}
    assert answer.choices[0].prompt_logprobs == [None, {"98": entry}]


def test_n_2_gives_two_choices_and_streams_both(client):
    messages = [{"role": "user", "content": "random"}]
    options = {"model": "base", "messages": messages, "n": 2, "seed": 5, "max_tokens": 8}
    whole = [c.message.content for c in client.chat.completions.create(**options).choices]
    assert whole[0] != whole[1]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == whole


def test_seed_makes_an_answer_repeatable(client):
    def ask(**options):
        answer = client.completions.create(model="base", prompt="random", max_tokens=8, **options)
        return answer.choices[0].text

    assert ask(seed=1) == ask(seed=1)
    assert ask(seed=1) != ask(seed=2)
    assert ask() != ask()


def test_unknown_model_is_404_with_vllms_text(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="x", messages=_MESSAGES)
    assert caught.value.body == {
        "message": "The model `x` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


def test_prompt_over_the_context_names_the_field_and_both_lengths(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="base", prompt="a" * 300)
    assert caught.value.param == "prompt"
    assert "256 tokens" in caught.value.message
    assert "300" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="base", messages=_MESSAGES, max_completion_tokens=300)
    assert caught.value.param == "max_completion_tokens"


def test_default_max_tokens_shrinks_to_what_the_context_has_left(client):
    answer = client.completions.create(model="base", prompt="a" * 250)
    assert answer.usage.completion_tokens == 6


def test_default_max_tokens_shrinks_only_where_it_must(client):
    answer = client.completions.create(model="base", prompt=["a" * 250, "b"])
    assert [len(choice.text.encode()) for choice in answer.choices] == [6, 16]


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_disconnects_leaves_nothing_behind(rig, server, stream):
    rig.slow_down(0.02)
    body = {"model": "base", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream}
    try:
        with httpx.Client(timeout=0.3) as http:
            if stream:
                with http.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                    lines = response.iter_lines()  # closes the response when it is dropped
                    next(lines)
                    assert server.metric("vllm:num_requests_running") == 1
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(f"{server.url}/v1/completions", json=body)
        rig.wait_idle()
    finally:
        rig.slow_down(0)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_client_that_leaves_while_waiting_leaves_nothing_behind(rig, server):
    rig.slow_down(0.02)
    body = {"model": "base", "prompt": ["x"] * 24, "max_tokens": 200, "ignore_eos": True, "stream": True}
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert server.metric("vllm:num_requests_waiting") > 0
        rig.wait_idle()
    finally:
        rig.slow_down(0)


def test_streams_go_on_while_another_client_reads_nothing(rig, server, client):
    body = {"model": "base", "prompt": ["x"] * 4, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body):
        answer = client.chat.completions.create(model="base", messages=_MESSAGES)
        assert answer.choices[0].message.content == REPLY
    rig.wait_idle()


def test_many_streams_at_once_all_finish(client):
    texts: list[str] = []

    def ask() -> None:
        stream = client.chat.completions.create(model="base", messages=_MESSAGES, stream=True)
        texts.append("".join(c.choices[0].delta.content or "" for c in stream))

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert texts == [REPLY] * 24


def test_failed_step_is_500_whole_and_an_error_event_in_a_stream(client, rig):
    rig.executor.fail_with = RuntimeError("the device is on fire")
    try:
        with pytest.raises(openai.InternalServerError, match="on fire"):
            client.chat.completions.create(model="base", messages=_MESSAGES)
        with pytest.raises(openai.APIError, match="on fire"):
            list(client.chat.completions.create(model="base", messages=_MESSAGES, stream=True))
    finally:
        rig.executor.fail_with = None
    assert client.chat.completions.create(model="base", messages=_MESSAGES).choices[0].message.content == REPLY


def test_models_lists_the_base(client):
    cards = client.models.list().data
    assert [(c.id, c.owned_by, c.root, c.parent, c.max_model_len) for c in cards] == [
        ("base", "plora_jax", "/models/base", None, 256)
    ]
    assert cards[0].created <= time.time()
    assert client.models.retrieve("base").id == "base"
