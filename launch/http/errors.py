"""Errors as clients of the OpenAI API expect them: a status code and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
import sys
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from launch.http.adapter_paths import MAX_NAME_CHARS
from plora_jax.adapters.adapter import AdapterError
from plora_jax.engine.errors import (
    AdapterExistsError,
    EngineDeadError,
    GenerationFailedError,
    OverloadedError,
    UnknownAdapterError,
)
from plora_jax.engine.params import RequestError
from plora_jax.tokenizer import ChatError
from plora_jax.wording import shortened

_logger = logging.getLogger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


_UNREADABLE = "There was an error parsing the body"
"""What FastAPI says of a body for which its JSON reader raised anything but an error of syntax."""

_MAX_DIGITS = sys.get_int_max_str_digits()


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status code.
        message: for the client.
        param: the request's field at fault.
        headers: more HTTP headers.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        # A client's own text may be in it, with halves of surrogate pairs, which no answer can hold.
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers or {}

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def model_not_found(name: str) -> ApiError:
    return ApiError(404, f"The model `{shortened(name, MAX_NAME_CHARS)}` does not exist.", param="model")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an exception; one that nobody foresaw is logged and kept from the client."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case ChatError():
            return ApiError(400, str(error), param="messages")
        case UnknownAdapterError():
            return model_not_found(error.name)
        case AdapterExistsError() | AdapterError():
            return ApiError(400, str(error))
        case OverloadedError():
            retry_s = max(1, round(error.retry_after_s))
            return ApiError(429, str(error), headers={"Retry-After": str(retry_s)})
        case EngineDeadError():
            return ApiError(503, str(error))
        case GenerationFailedError():
            return ApiError(500, str(error))
        case HTTPException() if error.detail == _UNREADABLE:
            return ApiError(400, _why_unreadable(error.__cause__))
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        case RequestValidationError():
            return _validation_error(error)
        case _:
            _logger.error("A request failed: %s", error, exc_info=error)
            return ApiError(500, "The server failed at this request; its log says why.")


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error of a route leave in the OpenAI shape."""

    async def handle(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    handled = (ApiError, RequestError, ChatError, UnknownAdapterError, AdapterExistsError, AdapterError)
    for kind in (*handled, OverloadedError, EngineDeadError, GenerationFailedError, HTTPException):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(RequestValidationError, handle)
    app.add_exception_handler(Exception, handle)


def _why_unreadable(cause: BaseException | None) -> str:
    """Why a body could not be read as JSON, where the reader does not say it itself."""
    match cause:
        case UnicodeDecodeError():
            where = f"byte 0x{cause.object[cause.start]:02X} at position {cause.start}"
            return f"The body is not valid JSON: {where} is not valid UTF-8."
        case RecursionError():
            return "The body is not JSON that this server reads: its arrays and objects are nested too deeply."
        case ValueError():
            return f"The body is not JSON that this server reads: a number has over {_MAX_DIGITS} digits."
        case _:
            return "The body could not be read."


def _validation_error(error: RequestValidationError) -> ApiError:
    """One line that names each field at fault once."""
    seen: dict[str, str] = {}
    for detail in error.errors():
        if detail["type"] == "json_invalid":
            reason = detail.get("ctx", {}).get("error", "")
            return ApiError(400, f"The body is not valid JSON: {reason} at character {detail['loc'][-1]}.")
        path = [str(part) for part in detail["loc"][1:]]
        if not path and detail["type"] in ("model_attributes_type", "missing", "dict_type"):
            return ApiError(400, "The body must be a JSON object, sent with `Content-Type: application/json`.")
        message = detail["msg"].removeprefix("Value error, ")
        seen.setdefault(path[0] if path else "", f"{'.'.join(path)}: {message}" if path else message)
    field = next(iter(seen))
    return ApiError(400, "; ".join(seen.values()), param=field or None)
