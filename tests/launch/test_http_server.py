"""How a server starts and how it ends."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
import uvicorn

from launch.http.server import AddressError, open_socket, serve_app
from tests.launch.http_rig import http_rig, live_server

_LONG = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}

# A server over the scripted executor, in a process of its own, so that it can be sent signals.
_PROGRAM = """
import sys
from launch.http.server import open_socket, serve_app
from tests.launch.http_rig import http_rig
with http_rig(shutdown_timeout_s=float(sys.argv[1])) as rig:
    rig.slow_down(0.02)
    listening = open_socket("127.0.0.1", 0)
    ended = serve_app(rig.state, listening, on_started=lambda: print(listening.getsockname()[1], flush=True))
    sys.exit(0 if ended else 130)
"""


@pytest.fixture
def start_server():
    processes: list[subprocess.Popen[str]] = []

    def start(timeout_s: float) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", _PROGRAM, str(timeout_s)]
        root = pathlib.Path(__file__).parents[2]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, env=os.environ
        )
        processes.append(process)
        assert process.stdout is not None
        return process, f"http://127.0.0.1:{process.stdout.readline().strip()}"

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def read_rest(lines) -> list[dict]:
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_streams_finish_refuses_new_requests_and_exits_0(start_server, sig):
    process, url = start_server(20)
    with httpx.stream("POST", f"{url}/v1/completions", json=_LONG) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(sig)
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            httpx.post(f"{url}/v1/completions", json=_LONG)
        chunks = read_rest(lines)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert process.wait(10) == 0
    assert process.communicate()[1] == ""


def test_streams_over_the_timeout_are_cancelled_and_end_cleanly(start_server):
    process, url = start_server(0.2)
    with httpx.stream("POST", f"{url}/v1/completions", json=_LONG) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        chunks = read_rest(lines)
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    assert process.wait(10) == 0


def test_second_interrupt_ends_at_once(start_server):
    process, url = start_server(30)
    with httpx.stream("POST", f"{url}/v1/completions", json=_LONG) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert process.communicate()[1] == ""


def test_idle_keep_alive_connection_does_not_hold_the_end():
    with http_rig() as rig, live_server(rig.state) as live, httpx.Client() as client:
        client.get(f"{live.url}/health")
        live.server.should_exit = True
        live.thread.join(3)
        assert not live.thread.is_alive()


def test_port_in_use_says_so_in_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            AddressError, match=rf"cannot listen on 127.0.0.1 port {port} .*choose another --port"
        ) as caught:
            open_socket("127.0.0.1", port)
    assert "\n" not in str(caught.value)


def test_listening_that_fails_at_the_start_says_so(monkeypatch):
    async def startup(self, sockets=None):
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(uvicorn.Server, "startup", startup)
    says = pytest.raises(AddressError, match=r"Address already in use.*choose another --port")
    with http_rig() as rig, open_socket("127.0.0.1", 0) as opened, says:
        serve_app(rig.state, opened)


def test_client_before_the_start_is_refused():
    opened = open_socket("127.0.0.1", 0)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{opened.getsockname()[1]}/health")
    opened.close()


def test_host_that_does_not_exist_says_so():
    with pytest.raises(AddressError, match=r"--host 'no\.such\.host\.invalid'"):
        open_socket("no.such.host.invalid", 0)
