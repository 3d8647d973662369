"""POST /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from launch.http.chat import render_prompt
from launch.http.errors import ApiError
from launch.http.protocol import ChatRequest
from launch.http.state import state_of
from plora_jax.wording import in_json

router = APIRouter()


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize: a prompt, or messages."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    tokens: list[int]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Token ids of a prompt or of a conversation."""
    state = state_of(request)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = await state.encode(body.prompt, add_special_tokens=special, param="prompt")
    else:
        chat = ChatRequest.model_validate(body.model_dump(exclude={"prompt", "return_token_strs"}))
        text = render_prompt(state.tokenizer, chat, template=state.chat_template)
        ids = await state.encode(text, add_special_tokens=bool(body.add_special_tokens), param="messages")
    texts = [state.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": state.max_model_len, "tokens": ids, "token_strs": texts}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    """Text of token ids, special tokens as well."""
    state = state_of(request)
    state.check_model(body.model)
    size = state.engine.vocab_size
    outside = next((t for t in body.tokens if not 0 <= t < size), None)
    if outside is not None:
        raise ApiError(400, f"Token id {in_json(outside)} is out of vocabulary: ids are below {size}.", param="tokens")
    return {"prompt": state.decode_all(body.tokens)}
