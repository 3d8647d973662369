"""What an operator may set of the HTTP server, as one frozen value."""

from __future__ import annotations

import dataclasses
import ipaddress


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Options of the HTTP server.

    Attributes:
        host: address to listen on.
        port: TCP port to listen on; 0 takes a free one.
        api_key: clients must send it as `Authorization: Bearer KEY`; /health, /ping and /metrics stay open.
        served_model_name: name of the base model for clients, repeatable; the first one labels metrics. Default: the
            last part of the model's path.
        chat_template: file with a Jinja chat template, or the template itself, instead of the model's own.
        adapter_root: directory that the load route may read adapters from, and where relative paths start; unset, it
            reads none.
        adapter_routes: whether adapters can be loaded and unloaded over HTTP. Default: true on a loopback host, false
            elsewhere.
        shutdown_timeout_s: seconds that running streams get to finish after SIGTERM or SIGINT.
        max_body_mb: largest request body, MB of 1e6 bytes.
        max_prompts: most prompts in one completion request.
        access_log: print a line for each request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    adapter_root: str | None = None
    adapter_routes: bool | None = None
    shutdown_timeout_s: float = 10.0
    max_body_mb: float = 32.0
    max_prompts: int = 256
    access_log: bool = False

    @property
    def adapter_routes_on(self) -> bool:
        return is_loopback(self.host) if self.adapter_routes is None else self.adapter_routes

    def problems(self) -> list[str]:
        """Every value that cannot be, each with what is allowed."""
        found: list[str] = []
        if not 0 <= self.port <= 65535:
            found.append(f"--port must be between 0 and 65535, got {self.port}")
        if self.api_key is not None and not self.api_key.strip():
            found.append("--api_key is empty: give a key, or leave the flag out for an open server")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            found.append("--api_key must be printable ASCII, as it travels in an HTTP header")
        if self.shutdown_timeout_s < 0:
            found.append(f"--shutdown_timeout_s must be at least 0, got {self.shutdown_timeout_s:g}")
        if self.max_body_mb <= 0:
            found.append(f"--max_body_mb must be above 0, got {self.max_body_mb:g}")
        if self.max_prompts < 1:
            found.append(f"--max_prompts must be at least 1, got {self.max_prompts}")
        if any(not name for name in self.served_model_name):
            found.append("--served_model_name is empty: give a name, or leave the flag out")
        return found


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
