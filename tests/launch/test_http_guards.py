"""The API key, the limits, and answers when the engine cannot take more."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.launch.http_rig import http_rig, live_server

_BODY = {"model": "base", "prompt": "x", "max_tokens": 2}


def test_key_guards_every_route_but_the_probes():
    with http_rig(api_key="sesame") as rig:
        client = rig.client()
        for path in ("/health", "/ping", "/metrics"):
            assert client.get(path).status_code == 200
        for method, path in (
            *(("GET", p) for p in ("/v1/models", "/v1/adapters", "/version", "/openapi.json", "/nothing", "/health/")),
            *(("POST", p) for p in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")),
            *(("POST", p) for p in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")),
        ):
            response = client.request(method, path, json=_BODY)
            assert response.status_code == 401, path
            assert response.json()["error"]["type"] == "AuthenticationError"
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("header", ["Bearer sesam", "Bearer sesame ", "Bearer", "sesame", "Basic sesame", "Bearer é"])
def test_wrong_key_is_refused(header):
    with http_rig(api_key="sesame") as rig:
        headers = {"Authorization": header.encode()}
        assert rig.client().post("/v1/completions", json=_BODY, headers=headers).status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_right_key_is_let_through(scheme):
    with http_rig(api_key="sesame") as rig:
        headers = {"Authorization": f"{scheme} sesame"}
        assert rig.client().post("/v1/completions", json=_BODY, headers=headers).status_code == 200


def test_body_over_the_limit_is_413_announced_or_not():
    with http_rig(max_body_mb=0.001) as rig, live_server(rig.state) as live:
        big = b'{"prompt": "' + b"x" * 2000 + b'"}'
        headers = {"Content-Type": "application/json"}
        announced = httpx.post(f"{live.url}/v1/completions", content=big, headers=headers)
        chunked = httpx.post(f"{live.url}/v1/completions", content=iter([big[:1500], big[1500:]]), headers=headers)
        for response in (announced, chunked):
            assert response.status_code == 413
            assert "--max_body_mb" in response.json()["error"]["message"]
        assert httpx.post(f"{live.url}/v1/completions", json=_BODY).status_code == 200


def test_more_requests_than_may_wait_are_429_with_retry_after():
    with http_rig(max_num_seqs=1, max_waiting=1) as rig, live_server(rig.state) as live:
        rig.slow_down(0.02)
        long = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        url = f"{live.url}/v1/completions"
        with httpx.stream("POST", url, json=long), httpx.stream("POST", url, json=long):
            response = httpx.post(url, json=_BODY)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "RateLimitError"
        rig.wait_idle()
        rig.slow_down(0)
        assert httpx.post(url, json=_BODY).status_code == 200


def test_request_that_does_not_fit_wholly_takes_nothing():
    with http_rig(max_num_seqs=1, max_waiting=1) as rig, live_server(rig.state) as live:
        rig.slow_down(0.02)
        url = f"{live.url}/v1/completions"
        with httpx.stream("POST", url, json={"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}):
            assert httpx.post(url, json={**_BODY, "prompt": ["a", "b"]}).status_code == 429
            until_s = time.monotonic() + 2
            while rig.engine.stats().waiting:
                assert time.monotonic() < until_s, "a part of the refused request waits still"
        rig.wait_idle()


def test_request_that_can_never_fit_is_400_and_not_429():
    with http_rig(max_num_seqs=1, max_waiting=1) as rig:
        response = rig.client().post("/v1/completions", json={**_BODY, "prompt": ["a", "b", "c"]})
        assert response.status_code == 400
        assert "asks for 3 completions; at most 2 fit" in response.json()["error"]["message"]


def test_dead_engine_is_503_everywhere():
    with http_rig() as rig:
        client = rig.client()
        rig.executor.fail_with = RuntimeError("broken")
        for _ in range(3):
            assert client.post("/v1/completions", json=_BODY).status_code in (500, 503)
        response = client.post("/v1/completions", json=_BODY)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "ServiceUnavailableError"
        assert client.get("/health").status_code == 503
        assert client.get("/metrics").status_code == 200
