"""The OpenAI-compatible HTTP server: routes on the engine's API, and nothing that knows JAX.

A request's way: `guards` (key, size) -> a route module (`completions`, `chat`, ...) -> `protocol` (checks,
SamplingParams) -> `flight` (Engine.submit, pieces as they come) -> `sse` or one JSON body.
"""

from launch.http.app import create_app
from launch.http.config import HttpConfig
from launch.http.server import serve_app
from launch.http.state import ServerState

__all__ = ["HttpConfig", "ServerState", "create_app", "serve_app"]
