"""OpenAI error objects, and the conversion of every failure to one: a clear sentence, no internal details."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from millstream_runtime.server.http.limits import (
    LARGE_BODY_SECONDS,
    MAX_BODY_BYTES,
    MAX_PROBE_PROMPT,
    RETRY_AFTER_SECONDS,
)

# What to say where pydantic would list the branches of a union.
EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of lists of token ids",
    "stop": "a string or a list of strings",
}
UNIONS = ("prompt",)
# JSON's words for the types of pydantic's errors.
WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
BOUNDS = {"greater_than_equal": "at least {ge}", "less_than_equal": "at most {le}", "less_than": "below {lt}"}
# Errors of this package's own validators, which name the field themselves.
NAMED_BY_VALIDATORS = {
    "conflicting_parameters": "{msg}",
    "unknown_parameter": "Unknown parameter: '{name}'.",
    "unsupported_parameter": "'{name}' is supported by this server only as {accepted}; leave it out.",
}
# Of published chat templates; hosted APIs take them as parameters.
TEMPLATE_VARIABLES = ("enable_thinking", "preserve_thinking", "thinking", "thinking_budget")
TEMPLATE_HINT = "Variables of the chat template go into 'chat_template_kwargs' of a chat."
Range = tuple[float, float]  # the least and the most
MESSAGE_WANTED = 'an object such as {"role": "user", "content": "Hello"}'


REASON_HEADER = "x-millstream-reason"  # repeats the code: a proxy retries by status and headers, it reads no body


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
        return {**self._headers, REASON_HEADER: self.code} if self.code is not None else dict(self._headers)

    def response(self) -> Response:
        # ASCII, so that a lone surrogate quoted from the request cannot break the encoding of the answer.
        return Response(json.dumps(self.body()), self.status, self.headers(), "application/json")


def unavailable(message: str, code: str) -> ApiError:
    """503: the client should try again, here or at another replica."""
    return ApiError(503, message, type_="server_error", code=code, retry_after_seconds=RETRY_AFTER_SECONDS)


def too_many_connections(most: int) -> ApiError:
    """503 for a request beyond the cap on connections."""
    return ApiError(
        503,
        f"The server answers {most} requests, as many as it may; try again.",
        type_="server_error",
        code="too_many_connections",
        retry_after_seconds=RETRY_AFTER_SECONDS,
        headers={"Connection": "close"},
    )


def too_many_large_bodies() -> ApiError:
    """503 for a body for which there is no memory, while others are being read."""
    return unavailable("The server reads as many large request bodies as it may; try again.", "too_many_large_bodies")


def late_large_body() -> ApiError:
    """503 for a body that comes slowly, and whose memory another one needs."""
    message = (
        f"The server needs the memory of this request's body, which has been arriving for more than "
        f"{LARGE_BODY_SECONDS:g} s, for other requests; try again."
    )
    return unavailable(message, "too_many_large_bodies")


def tokenizer_busy() -> ApiError:
    """503 for a prompt that has waited as long as it may for those before it."""
    return unavailable("The server is busy tokenising other prompts; try again.", "tokenizer_busy")


def tokenizer_failed() -> ApiError:
    """500 for a text or tokens on which the model's tokenizer fails, as with a pattern that tries too many ways."""
    message = "The model's tokenizer fails on this input; change or shorten it."
    return ApiError(500, message, type_="server_error", code="tokenizer_failed")


def engine_failed() -> ApiError:
    return unavailable("The engine stopped and the server is restarting; try again.", "engine_failed")


def out_of_memory() -> ApiError:
    return unavailable(
        "The server ran out of memory while it computed this request; try again, with a shorter prompt if it fails "
        "again.",
        "out_of_memory",
    )


def internal_error() -> ApiError:
    return ApiError(500, "Internal server error.", type_="server_error", code="internal_error")


def answer_to_a_bug() -> Response:
    """500 for an exception that goes on to uvicorn, which closes the connection behind the answer."""
    response = internal_error().response()
    response.headers["Connection"] = "close"  # or the client would send its next request into a closed connection
    return response


def install_error_handlers(app: FastAPI) -> None:
    """Make every failure of `app` an OpenAI error object."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)  # noqa: S101 - starlette routes by type
        return error.response()

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        return from_validation(error.errors()).response()

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        response = from_status(error.status_code).response()
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = _allowed_methods(app, request.scope)
        return response

    async def on_bug(_: Request, __: Exception) -> Response:
        return answer_to_a_bug()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)


def _allowed_methods(app: FastAPI, scope: Scope) -> str:
    """All methods of the path: the framework names those of one route, and GET and HEAD are two."""
    routes = (one for one in app.routes if isinstance(one, Route) and one.matches(scope)[0] is not Match.NONE)
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


def from_status(status: int) -> ApiError:
    """The error for a status that the framework sets: unknown route, wrong method, unreadable body."""
    if status == 404:
        return ApiError(404, "There is no such route; see /openapi.json.", code="unknown_url")
    if status == 405:
        return ApiError(405, "This route does not support that HTTP method.", code="method_not_allowed")
    if status == 408:
        return ApiError(408, "The request did not arrive in time.", code="request_timeout")
    if status == 413:
        message = f"The request body is larger than {MAX_BODY_BYTES} bytes."
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
    if status == 400:
        return ApiError(400, "The request body is not valid JSON.", code="invalid_json")
    return ApiError(status, "The request could not be handled.", code="invalid_request")


def require_known_parameters(given: QueryParams, known: Sequence[str]) -> None:
    """Raises ApiError: a parameter of the URL that the route does not know, or one that is there twice."""
    for name in given:
        if name not in known:
            takes = " and ".join(f"'{one}'" for one in known)
            message = f"Unknown parameter of the URL: {shown_value(name)}; this route takes {takes}."
            raise ApiError(400, message, param=name[:80], code="unknown_parameter")
        if len(given.getlist(name)) > 1:
            message = f"'{name}' is given {len(given.getlist(name))} times in the URL; give it once."
            raise ApiError(400, message, param=name, code="invalid_value")


def beyond_probe() -> ApiError:
    """403 for the key of the operator's probe, where a user's is needed."""
    return ApiError(
        403,
        "This API key is that of the operator's probe. It is valid for GET /v1/models, and for POST /v1/completions "
        f"with one prompt of at most {MAX_PROBE_PROMPT} characters or tokens, 'max_tokens' 1 and 'n' 1. Send a key of "
        "the Secret that spec.auth.apiKeysSecretRef names.",
        code="probe_key_limited",
    )


def invalid_json(detail: str) -> ApiError:
    """400 with the parser's own message in `detail`."""
    return ApiError(400, f"The request body is not valid JSON: {detail}.", code="invalid_json")


def encoded_body(encoding: str) -> ApiError:
    """400 for a body that is no JSON because it is compressed."""
    message = f"The request body has the Content-Encoding {encoding[:80]!r}, which this server does not decode."
    return ApiError(400, message, code="invalid_json")


def not_declared_as_json(content_type: str) -> ApiError:
    """400 for another Content-Type; `content_type` "": none was sent."""
    sent = f"The request's Content-Type is {content_type[:80]!r}" if content_type else "The request has no Content-Type"
    message = f"{sent}; send a JSON object, with Content-Type: application/json."
    return ApiError(400, message, code="invalid_json")


def not_an_object() -> ApiError:
    """400 for a body that is missing or not an object."""
    message = "The request body must be a JSON object (Content-Type: application/json)."
    return ApiError(400, message, code="invalid_json")


def from_validation(errors: Sequence[Mapping[str, Any]], allowed: Range | None = None) -> ApiError:
    """The first error of pydantic, as a sentence that names the parameter. `allowed`: the range of its field."""
    first = errors[0]
    kind, context = str(first["type"]), first.get("ctx") or {}
    path = [str(part) for part in first["loc"][1:]]
    if kind in NAMED_BY_VALIDATORS:
        name = ".".join([*path, str(context["param"])[:80]])
        message = NAMED_BY_VALIDATORS[kind].format(name=name, msg=first["msg"], **context)
        return ApiError(400, message, param=name, code=kind)
    if not path and kind == "too_many_fields":
        return ApiError(400, f"The request body: {first['msg']}.", code="invalid_value")
    if kind == "string_unicode":  # pydantic tells it of the name of a field
        return ApiError(400, "A parameter's name has a lone surrogate, which is not a character.", code="invalid_value")
    if not path:
        return not_an_object()
    if kind == "extra_forbidden":
        name = ".".join([*path[:-1], path[-1][:80]])
        hint = f" {TEMPLATE_HINT}" if name in TEMPLATE_VARIABLES else ""
        return ApiError(400, f"Unknown parameter: '{name}'.{hint}", param=name, code="unknown_parameter")
    if kind == "missing":
        name = ".".join(path)
        return ApiError(400, f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    if kind in ("too_long", "too_short") and (len(path) == 1 or path[0] not in EXPECTED):
        name = ".".join(path)
        return ApiError(400, _wrong_length(name, first), param=name, code="invalid_value")
    takes_a_string_alone = kind == "string_type" and len(path) == 1  # as /tokenize does
    if path[0] in EXPECTED and kind != "invalid_value" and not takes_a_string_alone:
        return ApiError(400, f"'{path[0]}' must be {EXPECTED[path[0]]}.", param=path[0], code="invalid_value")
    name = path[0] if path[0] in UNIONS else ".".join(path)  # pydantic puts the branch of a union into the path
    message = str(first["msg"]).replace("Input should be", "it must be", 1)
    if kind in WANTED:
        message = f"it must be {_wanted(kind, path)}"
    if kind in BOUNDS:
        message = f"it must be {_bounds(kind, context, allowed if len(path) == 1 else None)}"
    got = f"; got {shown_value(first['input'])}" if "input" in first and kind != "invalid_value" else ""
    return ApiError(
        400, f"Invalid '{name}': {message[:1].lower()}{message[1:]}{got}.", param=name, code="invalid_value"
    )


def _wanted(kind: str, path: Sequence[str]) -> str:
    is_message = kind == "model_type" and len(path) == 2 and path[0] == "messages"
    return MESSAGE_WANTED if is_message else WANTED[kind]


def _bounds(kind: str, context: Mapping[str, Any], allowed: Range | None) -> str:
    return BOUNDS[kind].format_map(context) if allowed is None else f"from {allowed[0]} to {allowed[1]}"


def _wrong_length(name: str, error: Mapping[str, Any]) -> str:
    """A sentence without pydantic's "after validation". No field has another minimum than 1."""
    most, given = (error.get("ctx") or {}).get("max_length"), error.get("input")
    if most is None:
        return f"Invalid '{name}': it is empty."
    unit = "characters" if isinstance(given, str) else "entries"
    has = f", and has {len(given)}" if isinstance(given, str | list) else ""
    return f"Invalid '{name}': it may have at most {most} {unit}{has}."


def shown_value(value: object) -> str:
    """Return a short value as the client wrote it; only what it is, of long ones and containers."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return repr(value) if len(str(value)) <= 60 else f"a long {'string' if isinstance(value, str) else 'number'}"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "an object" if isinstance(value, dict) else "null"
