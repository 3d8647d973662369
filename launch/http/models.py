"""GET /v1/models: the base model and every adapter as model cards."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from launch.http.errors import model_not_found
from launch.http.state import ServerState, state_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Cards of all models that a request may name."""
    return {"object": "list", "data": _cards(state_of(request))}


@router.get("/v1/models/{model:path}")
async def get_model(model: str, request: Request) -> dict[str, Any]:
    """One card."""
    for card in _cards(state_of(request)):
        if card["id"] == model:
            return card
    raise model_not_found(model)


def _cards(state: ServerState) -> list[dict[str, Any]]:
    base = [_card(state, name, root=state.model_root, parent=None, created=state.created) for name in state.model_names]
    parent = state.model_names[0]
    return base + [
        _card(state, a.name, root=a.path or a.name, parent=parent, created=int(state.epoch_s + a.loaded_s))
        for a in state.engine.adapters()
    ]


def _card(state: ServerState, name: str, *, root: str, parent: str | None, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "plora_jax",
        "root": root,
        "parent": parent,
        "max_model_len": state.max_model_len,
    }
