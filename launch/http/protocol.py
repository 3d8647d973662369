"""Requests of the OpenAI API as checked values, and the SamplingParams they stand for.

Fields and meanings are OpenAI's; the extras and their meanings are vLLM's. A field of either that changes the answer
and is not supported is refused when it asks for something; other unknown fields are ignored, as clients send many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from launch.http.errors import ApiError
from plora_jax.engine.params import MAX_LOGPROBS, SamplingParams
from plora_jax.wording import in_json


def _absent(value: Any) -> bool:
    return not value


def _unset(value: Any) -> bool:
    return value is None


# Fields that are refused, and which values of them ask for nothing.
_REFUSED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("tools", "functions", "audio", "prediction", "suffix", "web_search_options"), _absent),
    **dict.fromkeys(("tool_choice", "function_call"), lambda value: value in (None, "none")),
    "response_format": lambda value: value is None or (isinstance(value, dict) and value.get("type") == "text"),
    "modalities": lambda value: value in (None, [], ["text"]),
    # An empty schema asks for JSON all the same.
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
        _unset,
    ),
    **dict.fromkeys(("use_beam_search", "prompt_embeds", "logits_processors"), _absent),
    **dict.fromkeys(
        ("bad_words", "allowed_token_ids", "truncate_prompt_tokens", "documents", "chat_template"), _absent
    ),
}


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    """Token counts in a stream.

    Attributes:
        include_usage: send them in a chunk of their own before the end.
        continuous_usage_stats: and in every chunk, as far as the request is by then, all its completions together.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What both generation routes share. A field that is None was not sent and takes SamplingParams' default."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_stop_list)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    priority: int = 0
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for field, asks_nothing in _REFUSED.items():
                if field in body and not asks_nothing(body[field]):
                    raise ApiError(400, f"{field} is not supported by this server: leave it out.", param=field)
        return body

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            message = "stream_options can only be given together with stream=true."
            raise ApiError(400, message, param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs cannot be given together with stream=true."
            raise ApiError(400, message, param="prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, **overrides: Any) -> SamplingParams:
        """The options of the engine that this request names; `overrides` stand over its fields."""
        values = {name: getattr(self, name) for name in _PASSED if getattr(self, name) is not None} | overrides
        for name in ("stop", "stop_token_ids"):
            values[name] = tuple(values.get(name, ()))
        return SamplingParams(**values)


# Fields that pass to SamplingParams under the same name.
_PASSED = (
    *("n", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids"),
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs"),
)


def _prompt_list(value: Any) -> list[str | list[int]]:
    """The four forms of a prompt as one: a list of texts or token lists."""
    prompts = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not prompts:
        raise ValueError("must hold at least one prompt")
    for prompt in prompts:
        if not (isinstance(prompt, str) or _is_ids(prompt)):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
        if not prompt:
            raise ValueError("must not be empty")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompt_list)]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of > (self.n or 1):
            message = (
                f"best_of above n is not supported by this server: got {in_json(self.best_of)} with n {self.n or 1}."
            )
            raise ApiError(400, message, param="best_of")
        return self

    @property
    def prompt_only(self) -> bool:
        """Nothing is to be generated: the prompt comes back, scored where logprobs are asked for."""
        return bool(self.echo) and self.max_tokens == 0

    def to_sampling(self) -> SamplingParams:
        overrides: dict[str, Any] = {"logprobs": self.logprobs}
        if self.prompt_only:
            overrides |= {"max_tokens": 1, "min_tokens": 0}
        if self.echo and self.logprobs is not None:
            overrides["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self.sampling(**overrides)


_NOT_FOR_TEMPLATES = {
    "template": "the server's template is used",
    "add_generation_prompt": "give it as a field of the request",
    "messages": "give them as a field of the request",
}


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: StrictBool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true.", param="top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            message = f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {in_json(self.top_logprobs)}."
            raise ApiError(400, message, param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt cannot both be true."
            raise ApiError(400, message, param="continue_final_message")
        for name, instead in _NOT_FOR_TEMPLATES.items():
            if name in (self.chat_template_kwargs or {}):
                message = f"chat_template_kwargs may not hold '{name}'; {instead}."
                raise ApiError(400, message, param="chat_template_kwargs")
        for index, message in enumerate(self.messages):
            _check_message(index, message)
        return self

    def to_sampling(self) -> SamplingParams:
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(max_tokens=max_tokens, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


def _check_message(index: int, message: dict[str, Any]) -> None:
    role = message.get("role")
    if message.get("tool_calls") or message.get("function_call") or role in ("tool", "function"):
        raise ApiError(400, f"messages[{index}]: tools are not supported by this server.", param="messages")
    if message.get("content") is None and role != "assistant":
        raise ApiError(400, f"messages[{index}].content is missing.", param="messages")
