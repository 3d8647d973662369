"""The application: every route, behind the guards."""

from __future__ import annotations

from fastapi import FastAPI

from launch.http import adapters, chat, completions, models, system, tokens
from launch.http.errors import install_error_handlers
from launch.http.guards import KeyGuard, SizeGuard
from launch.http.state import ServerState
from launch.http.system import VERSION


def create_app(state: ServerState) -> FastAPI:
    """Builds the ASGI application of one server.

    Args:
        state: what the routes share; its engine is started and stopped by the caller.
    """
    # The interactive pages load scripts from elsewhere; the description itself stays at /openapi.json.
    app = FastAPI(title="plora_jax", version=VERSION, docs_url=None, redoc_url=None)
    app.state.server = state
    for module in (completions, chat, models, adapters, system, tokens):
        app.include_router(module.router)
    if state.config.adapter_routes_on:
        app.include_router(adapters.change_router)
    install_error_handlers(app)
    # The last one added is the first one passed.
    app.add_middleware(SizeGuard, max_bytes=int(state.config.max_body_mb * 1e6))
    if state.config.api_key is not None:
        app.add_middleware(KeyGuard, key=state.config.api_key)
    return app
