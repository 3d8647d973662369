"""Adapters over HTTP: load, unload, and what is loaded."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict

from launch.http.adapter_paths import MAX_NAME_CHARS, OutsideRootError, name_problem, resolve_inside
from launch.http.errors import ApiError
from launch.http.state import ServerState, state_of
from plora_jax.engine.errors import AdapterExistsError, NoPlanError, UnknownAdapterError
from plora_jax.wording import shortened

router = APIRouter()
"""Looking only."""

change_router = APIRouter()
"""Loading and unloading; installed only where --adapter_routes is on."""


class LoadRequest(BaseModel):
    """Body of POST /v1/load_lora_adapter."""

    model_config = ConfigDict(extra="ignore")

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool = False
    pinned: bool = False


class UnloadRequest(BaseModel):
    """Body of POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="ignore")

    lora_name: str | None = None


@change_router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadRequest, request: Request) -> PlainTextResponse:
    """Reads an adapter in a thread of its own, so that running streams go on."""
    if not body.lora_name or not body.lora_path:
        missing = "lora_name" if not body.lora_name else "lora_path"
        raise ApiError(400, f"Both 'lora_name' and 'lora_path' must be given: {missing} is missing.", param=missing)
    state = state_of(request)
    state.check_open()
    problem = name_problem(body.lora_name, state.model_names)
    if problem:
        raise ApiError(400, f"{problem}.", param="lora_name")
    await asyncio.to_thread(_load, state, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@change_router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadRequest, request: Request) -> PlainTextResponse:
    """Takes an adapter's name away; requests that use it end undisturbed."""
    if not body.lora_name:
        raise ApiError(400, "'lora_name' must be given.", param="lora_name")
    try:
        state_of(request).engine.unload_adapter(body.lora_name)
    except UnknownAdapterError as error:
        message = _not_found(body.lora_name)
        raise ApiError(404, message, param="lora_name") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/v1/adapters")
async def list_adapters(request: Request) -> dict[str, Any]:
    """Every adapter with where it is and what serves it."""
    engine = state_of(request).engine
    return {"object": "list", "data": [_card(engine.clock.now(), status) for status in engine.adapters()]}


@router.get("/v1/adapters/{name}/explain", response_model=None)
async def explain_adapter(name: str, request: Request, format: Literal["json", "text"] = "json") -> Response:
    """Why the planner has an adapter served as it is: what every other strategy would do to the step."""
    try:
        found = await asyncio.to_thread(state_of(request).engine.explain_adapter, name)
    except UnknownAdapterError as error:
        raise ApiError(404, _not_found(name), param="name") from error
    except NoPlanError as error:
        raise ApiError(409, f"Nothing can be explained: {error}.", param="name") from error
    if format == "text":
        return PlainTextResponse(found.text + "\n")
    return JSONResponse({"object": "adapter.explanation", **found.values})


def _not_found(name: str) -> str:
    return f"The lora adapter '{shortened(name, MAX_NAME_CHARS)}' cannot be found."


def _card(now_s: float, status: Any) -> dict[str, Any]:
    card = dataclasses.asdict(status)
    last_used_s = card.pop("last_used_s")
    # The engine's clock starts anywhere, so an age says more than a time.
    card["last_used_s_ago"] = None if last_used_s is None else round(now_s - last_used_s, 3)
    card["loaded_s_ago"] = round(now_s - card.pop("loaded_s"), 3)
    card["bytes"] = card.pop("nbytes")
    return {"object": "adapter", **card}


def _load(state: ServerState, body: LoadRequest) -> None:
    """Runs in a thread. Every failure becomes an answer that says why; the name is then free again."""
    name, path = body.lora_name or "", body.lora_path or ""
    try:
        inside = resolve_inside(state.config.adapter_root, path)
        state.engine.load_adapter(name, inside, load_inplace=body.load_inplace, pinned=body.pinned)
    except OutsideRootError as error:
        raise ApiError(400, f"lora_path is refused: {error}.", param="lora_path") from error
    except AdapterExistsError as error:
        raise ApiError(400, f"The lora adapter '{name}' cannot be loaded: {error}.", param="lora_name") from error
    except FileNotFoundError as error:
        raise ApiError(404, f"No adapter found for '{name}': {error}.", param="lora_path") from error
    except (ValueError, OSError) as error:
        raise ApiError(400, f"The lora adapter '{name}' cannot be served: {error}", param="lora_path") from error
