"""Parse a request's body into a validated model; large ones in a thread, so that they delay no other request
(compare CVE-2025-62426).

    small body   json.loads and validation on the event loop: a thread would cost more than they do
    large body   both in the one thread for bodies; the loop answers probes and streams meanwhile

A thread shares the interpreter with the loop, so it must not hold it for long at a time. What could do so is capped
first: the size of a body, the fields of an object, the prompts of a request, and a list with wrong items fails at the
first (`FailFast`), or a million errors would be collected to show one. json's parser does not release the interpreter:
0.1 s for a million token ids. There is one thread: a second large body waits, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from functools import cache

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from millstream_runtime.server.http.api_errors import (
    ApiError,
    Range,
    encoded_body,
    from_validation,
    invalid_json,
    not_an_object,
    not_declared_as_json,
)
from millstream_runtime.server.http.body_memory import HeldBody
from millstream_runtime.server.http.disconnect import ClientDisconnectedError
from millstream_runtime.server.http.limits import LARGE_BODY_BYTES


async def model_of_request(
    model: type[BaseModel], scope: Scope, receive: Receive, threads: Executor, held: HeldBody
) -> BaseModel:
    """Read the body as a `model`; `threads` parse it if it is large.

    Raises:
        ApiError: it is not JSON, not declared as JSON, or not a `model`; or there is no memory for it.
        ClientDisconnectedError: the client disconnected before the end of the body.
        HTTPException: 413, from a `receive` that enforces the body cap.
    """
    body = await _whole_body(receive, held)
    content_type = _header(scope["headers"], b"content-type")
    if not body:
        raise not_an_object()
    if not _is_json(content_type):
        raise not_declared_as_json(content_type)
    try:
        if len(body) <= LARGE_BODY_BYTES:
            return read_body(model, body)
        return await asyncio.get_running_loop().run_in_executor(threads, read_body, model, body)
    except ApiError as error:
        if error.code == "invalid_json" and (encoding := _header(scope["headers"], b"content-encoding")):
            raise encoded_body(encoding) from None
        raise


def read_body(model: type[BaseModel], body: bytes | bytearray) -> BaseModel:
    """Parse and validate.

    Raises:
        ApiError: it is not JSON, or not a `model`.
    """
    try:
        data = json.loads(body)
    except json.JSONDecodeError as error:
        raise invalid_json(f"{error.msg.removesuffix(' at')} at character {error.pos}") from None
    except UnicodeDecodeError:
        raise invalid_json("it is not UTF-8") from None
    except RecursionError:
        raise invalid_json("its lists or objects are nested too deeply") from None
    except ValueError:
        raise invalid_json("a number has too many digits") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        raise from_validation([{**first, "loc": ("body", *first["loc"])}], ranges_of(model).get(name)) from None


@cache  # by model alone: the names of fields are the client's, and each schema takes the event loop 8 ms
def ranges_of(model: type[BaseModel]) -> Mapping[str, Range]:
    """The least and the most of each field that is a number, from the model's own schema."""
    fields = model.model_json_schema()["properties"].items()
    return {
        name: (branch["minimum"], branch["maximum"])
        for name, field in fields
        for branch in (field, *field.get("anyOf", ()))
        if "minimum" in branch and "maximum" in branch
    }


async def _whole_body(receive: Receive, held: HeldBody) -> bytes | bytearray:
    """In one buffer: of a body that comes in pieces of two bytes, each piece would take as much as fifty bytes."""
    body = bytearray()
    with held.arriving():
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            piece: bytes = message.get("body", b"")
            held.count(len(piece))
            if not message.get("more_body", False) and not body:
                return piece
            body += piece
            if not message.get("more_body", False):
                return body


def _header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in headers if name == wanted), "")


def _is_json(content_type: str) -> bool:
    """`application/json` or `application/…+json`: a page of another origin cannot send either unasked (CSRF)."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
