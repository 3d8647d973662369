r"""Tells why a running server serves an adapter as it does.

python -m launch.explain --adapter sql
    every strategy, what it would change, and what a step waits for

python -m launch.explain --adapter sql --url http://gpu1:8000 --api_key ...
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request

from launch import flags
from launch.flags import StartError

_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainConfig:
    """What is asked, and whom.

    Attributes:
        adapter: name of a loaded adapter.
        url: of the server.
        api_key: of the server, if it asks for one.
    """

    adapter: str = ""
    url: str = "http://127.0.0.1:8000"
    api_key: str | None = None


def explain(config: ExplainConfig) -> str:
    """The server's explanation.

    Raises:
        StartError: no adapter is named, there is no server, or it has no explanation.
    """
    if not config.adapter:
        raise StartError("--adapter is missing: name a loaded adapter, as GET /v1/adapters lists them")
    if not config.url.startswith(("http://", "https://")):
        raise StartError(f"--url {config.url!r} must begin with http:// or https://")
    name = urllib.parse.quote(config.adapter, safe="")
    request = urllib.request.Request(f"{config.url.rstrip('/')}/v1/adapters/{name}/explain?format=text")
    if config.api_key is not None:
        request.add_header("Authorization", f"Bearer {config.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise StartError(f"{config.url} answers {error.code}: {_message(error)}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StartError(f"no server answers at {config.url}: {error}; start one, or set --url") from error


def _message(answer: urllib.error.HTTPError) -> str:
    text = answer.read().decode(errors="replace")
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text.strip() or answer.reason


def main() -> None:
    """Asks and prints."""
    print(explain(flags.read(ExplainConfig)), end="")


def cli() -> None:
    flags.define(ExplainConfig)
    flags.run(main)


if __name__ == "__main__":
    cli()
