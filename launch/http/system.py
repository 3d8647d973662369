"""Routes for operators: health, version, metrics."""

from __future__ import annotations

import importlib.metadata

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from launch.http.state import state_of

router = APIRouter()


def _version() -> str:
    try:
        return importlib.metadata.version("plora_jax")
    except importlib.metadata.PackageNotFoundError:
        # Run from a checkout that is not installed.
        return "0+checkout"


VERSION = _version()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are served, 503 when the engine is dead or the server goes down."""
    state = state_of(request)
    return Response(status_code=200 if state.engine.healthy and not state.draining else 503)


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> Response:
    """/health under the name that SageMaker asks for."""
    return await health(request)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this program."""
    return {"version": VERSION}


@router.get("/metrics")
def metrics(request: Request) -> Response:
    """Everything that is counted; in a thread, as a long list of adapters takes a while."""
    return Response(state_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)
