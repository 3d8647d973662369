"""What a server says when it answers: where it is, and two lines to try that work as they stand."""

from __future__ import annotations

import json
import shlex

from launch.console import StageLog
from launch.http import ServerState
from launch.http.config import is_loopback


def print_greeting(state: ServerState, port: int, *, log: StageLog) -> None:
    """Prints the URL, what is served and two curl lines.

    Args:
        state: of the server.
        port: it listens on.
        log: prints.
    """
    url = server_url(state.config.host, port)
    adapters = [status.name for status in state.engine.adapters()]
    log.say("serving", ", ".join([*state.model_names, *adapters[:8]]) + (", ..." if len(adapters) > 8 else ""))
    if not is_loopback(state.config.host) and state.config.api_key is None:
        log.say("caution", f"anyone who reaches {state.config.host} can use this server: set --api_key")
    log.say("ready", url)
    base = state.model_names[0]
    asked = ((base, True), (adapters[-1], True) if adapters else (base, False))
    # A base without a chat template and without adapters has only one line to show.
    for line in dict.fromkeys(curl_line(state, url, model, chat=chat) for model, chat in asked):
        print(f"\n{line}", flush=True)


def curl_line(state: ServerState, url: str, model: str, *, chat: bool) -> str:
    """A command that asks a model something.

    Args:
        state: of the server.
        url: of the server.
        model: base model or adapter.
        chat: a chat, where the model has a template; else a completion.
    """
    chat = chat and bool(state.chat_template or state.tokenizer.chat_templates)
    body: dict[str, object] = {"model": model, "max_tokens": 64, "temperature": 0}
    if chat:
        body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    else:
        body["prompt"] = "The capital of France is"
    key = "" if state.config.api_key is None else ' -H "Authorization: Bearer YOUR_KEY"'
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return f'curl {url}{path} -H "Content-Type: application/json"{key} -d {shlex.quote(json.dumps(body))}'


def server_url(host: str, port: int) -> str:
    """Where a client on this machine finds a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
