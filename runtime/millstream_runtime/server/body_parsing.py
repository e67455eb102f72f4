"""Large request bodies are parsed and checked in a thread, so that they delay nobody else (class CVE-2025-62426).

    small body   json.loads and the model's checks on the event loop: a thread would cost more than they do
    large body   both in the one thread for bodies; the loop answers probes and streams meanwhile

A thread shares the interpreter with the loop, so it must not hold it in one piece for long. What could do so is capped
before: the size of a body, the fields of an object, and a list with wrong items ends at the first (`FailFast`), or a
million errors would be written down to show one. json's parser itself is one piece: 0.1 s for a million token ids. One
thread: a second large body waits, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from millstream_runtime.server.api_errors import BodyRefusedError, from_validation

LARGE_BODY_BYTES = 64 << 10


def read_body(model: type[BaseModel], body: bytes) -> BaseModel:
    """What FastAPI would make of the same body.

    Raises:
        json.JSONDecodeError: it is not JSON.
        BodyRefusedError: it is not a `model`.
    """
    data = json.loads(body)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise BodyRefusedError(from_validation([{**first, "loc": ("body", *first["loc"])}])) from None


class _LargeBodyRequest(Request):
    """`json()` gives the checked model: FastAPI's own check of an instance is that it is one."""

    model: type[BaseModel]
    threads: Executor

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= LARGE_BODY_BYTES:
            return await super().json()
        return await asyncio.get_running_loop().run_in_executor(self.threads, read_body, self.model, body)


def body_route(threads: Executor) -> type[APIRoute]:
    """The class of routes whose large bodies `threads` parse."""

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]

            async def with_body(request: Request) -> Response:
                wrapped = _LargeBodyRequest(request.scope, request.receive)
                wrapped.model, wrapped.threads = model, threads
                return await handle(wrapped)

            return with_body

    return BodyRoute
