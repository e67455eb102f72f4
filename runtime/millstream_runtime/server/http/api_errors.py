"""OpenAI error objects, and the conversion of every failure to one: a clear sentence, no internal details."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from millstream_runtime.server.http.limits import MAX_BODY_BYTES, RETRY_AFTER_SECONDS

# What to say where pydantic would list the branches of a union.
EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of lists of token ids",
    "stop": "a string or a list of strings",
}


class ApiError(Exception):
    """A response other than 200. `message` is sent to the client as it is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type_: str = "invalid_request_error",
        retry_after_seconds: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type_
        self._headers = dict(headers or {})
        if retry_after_seconds is not None:
            self._headers["Retry-After"] = str(retry_after_seconds)

    def body(self) -> dict[str, Any]:
        """`{"error": {message, type, param, code}}`, also the payload of an SSE error event."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return dict(self._headers)

    def response(self) -> Response:
        # ASCII, so that a lone surrogate quoted from the request cannot break the encoding of the answer.
        return Response(json.dumps(self.body()), self.status, self.headers(), "application/json")


def unavailable(message: str, code: str) -> ApiError:
    """503: the client should try again, here or at another replica."""
    return ApiError(503, message, type_="server_error", code=code, retry_after_seconds=RETRY_AFTER_SECONDS)


def engine_failed() -> ApiError:
    return unavailable("The engine stopped and the server is restarting; try again.", "engine_failed")


def internal_error() -> ApiError:
    return ApiError(500, "Internal server error.", type_="server_error", code="internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Make every failure of `app` an OpenAI error object."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)  # noqa: S101 - starlette routes by type
        return error.response()

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        return from_validation(error.errors()).response()

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        response = from_status(error.status_code).response()
        response.headers.update(error.headers or {})
        return response

    async def on_bug(_: Request, __: Exception) -> Response:
        return internal_error().response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)


def from_status(status: int) -> ApiError:
    """The error for a status that the framework sets: unknown route, wrong method, unreadable body."""
    if status == 404:
        return ApiError(404, "There is no such route; see /openapi.json.", code="unknown_url")
    if status == 405:
        return ApiError(405, "This route does not support that HTTP method.", code="method_not_allowed")
    if status == 413:
        return ApiError(413, f"The request body is larger than {MAX_BODY_BYTES} bytes.", code="request_too_large")
    if status == 400:
        return ApiError(400, "The request body is not valid JSON.", code="invalid_json")
    return ApiError(status, "The request could not be handled.")


def invalid_json(detail: str) -> ApiError:
    """400 with the parser's own message in `detail`."""
    return ApiError(400, f"The request body is not valid JSON: {detail}.", code="invalid_json")


def not_an_object() -> ApiError:
    """400 for a body that is missing, not an object, or not declared as JSON."""
    return ApiError(400, "The request body must be a JSON object (Content-Type: application/json).")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first error of pydantic, as a sentence that names the parameter."""
    first = errors[0]
    kind, context = str(first["type"]), first.get("ctx") or {}
    path = [str(part) for part in first["loc"][1:]]
    if kind in ("unsupported_parameter", "conflicting_parameters"):
        return ApiError(400, str(first["msg"]), param=context.get("param"), code=kind)
    if not path and kind == "too_many_fields":
        return ApiError(400, f"The request body: {first['msg']}.", code="invalid_value")
    if not path:
        return not_an_object()
    if kind == "extra_forbidden":
        name = ".".join(path)
        return ApiError(400, f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
    if kind == "missing":
        name = ".".join(path)
        return ApiError(400, f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    if path[0] in EXPECTED and kind != "invalid_value":
        return ApiError(400, f"'{path[0]}' must be {EXPECTED[path[0]]}.", param=path[0], code="invalid_value")
    name = ".".join(path)
    message = str(first["msg"])
    got = f"; got {_shown(first['input'])}" if "input" in first and kind != "invalid_value" else ""
    return ApiError(
        400, f"Invalid '{name}': {message[:1].lower()}{message[1:]}{got}.", param=name, code="invalid_value"
    )


def _shown(value: object) -> str:
    """A short value as the client wrote it; only the type of long ones and containers."""
    if isinstance(value, str | int | float | bool) and len(str(value)) <= 60:
        return repr(value)
    return "a value of type " + type(value).__name__
