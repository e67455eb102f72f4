"""Dispatch of the routes that take a body, without FastAPI's overhead, which is much of a request's time.

    POST /v1/chat/completions ──▶ read and validate the body ──▶ the endpoint ──▶ its response
    all else ──▶ FastAPI: probes, unknown routes, wrong methods, /openapi.json

FastAPI still declares these routes, so its document lists them and an unknown method gets its 405. What is skipped is
its work per request: seven layers of middleware, two exit stacks, a search through all routes, dependencies, and a
second validation of the model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from millstream_runtime.rust_panics import panics_as_errors
from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_errors import ApiError, answer_to_a_bug, from_status
from millstream_runtime.server.http.body_memory import BodyMemory
from millstream_runtime.server.http.body_parsing import model_of_request
from millstream_runtime.server.http.disconnect import ClientDisconnectedError
from millstream_runtime.server.http.failure_log import log_failure

CLIENT_CLOSED_REQUEST = 499  # nginx's code; the client does not see it

Endpoint = Callable[[Any, Request], Awaitable[Response]]


class BodyRoutes:
    """ASGI app. Every route of `app` with a body has an endpoint that takes (the validated body, the request)."""

    def __init__(self, app: FastAPI, threads: Executor) -> None:
        """`threads` parse large bodies."""
        self._app = app
        memory = BodyMemory(limits.MAX_LARGE_BODIES_BYTES)
        self._routes = {
            (method, route.path): _BodyRoute(route, threads, memory)
            for route in app.routes
            if isinstance(route, APIRoute) and route.body_field is not None
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        await (route or self._app)(scope, receive, send)


class _BodyRoute:
    """One route as an ASGI app. Its errors become the same responses as FastAPI's (`install_error_handlers`)."""

    def __init__(self, route: APIRoute, threads: Executor, memory: BodyMemory) -> None:
        assert route.body_field is not None  # noqa: S101 - the caller looked
        self._route = route
        self._endpoint: Endpoint = route.endpoint
        self._model: type[BaseModel] = route.body_field.field_info.annotation  # type: ignore[assignment]
        self._threads = threads
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self._route
        try:
            with panics_as_errors, self._memory.of_one(scope) as held:
                body = await model_of_request(self._model, scope, receive, self._threads, held)
                response = await self._endpoint(body, Request(scope, receive))
        except ApiError as error:
            log_failure(scope["state"]["request_id"], error)
            response = error.response()
        except HTTPException as error:
            response = from_status(error.status_code).response()
        except ClientDisconnectedError:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception:
            await answer_to_a_bug()(scope, receive, send)
            raise  # logged by the middleware
        await response(scope, receive, send)
