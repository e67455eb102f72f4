"""The HTTP routes; the work is in `service`, `generation` and `responses`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from millstream_runtime import __version__
from millstream_runtime.boot import Phase
from millstream_runtime.server.http.api_errors import beyond_probe, install_error_handlers, require_known_parameters
from millstream_runtime.server.http.body_memory import release_body
from millstream_runtime.server.http.body_routes import BodyRoutes
from millstream_runtime.server.http.cross_origin import CrossOrigin
from millstream_runtime.server.http.disconnect import on_disconnect
from millstream_runtime.server.http.middleware import RequestMiddleware
from millstream_runtime.server.openai.api_document import complete_document
from millstream_runtime.server.openai.generation import Generation
from millstream_runtime.server.openai.probe_limits import is_probe
from millstream_runtime.server.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from millstream_runtime.server.openai.responses import (
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    complete_response,
    sse_events,
)
from millstream_runtime.server.operations.metrics import CONTENT_TYPE
from millstream_runtime.server.operations.readiness import ready_body
from millstream_runtime.server.operations.traces import RequestTraces
from millstream_runtime.server.service import Service


def build_app(service: Service) -> CrossOrigin:
    """Build the ASGI app. No interactive docs (they would load scripts from other sites)."""
    app = FastAPI(
        title="Millstream", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    install_error_handlers(app)
    _add_probes(app, service)
    _add_models(app, service)
    _add_tokenizer(app, service)
    _add_generation(app, service)
    complete_document(app, has_keys=service.api_keys is not None)
    _add_document(app, service)
    routes = BodyRoutes(app, service.body_threads)
    app_with_keys = RequestMiddleware(routes, service.ledger, service.api_keys, service.metrics.http)
    return CrossOrigin(app_with_keys)


def _add_probes(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["probes"])
    async def health() -> Response:
        """200 while this process can work, which includes loading and restarting the engine after a crash."""
        engine = service.engine
        is_unresponsive = service.ledger.phase is Phase.UNRESPONSIVE
        status = "restarting" if engine.is_restarting else "unresponsive" if is_unresponsive else "ok"
        body = {"status": "failed" if engine.given_up else status, "engine_restarts": engine.restarts_total}
        return JSONResponse(body, 503 if engine.given_up else 200)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", tags=["probes"])
    async def ready() -> Response:
        """200 only when Ready; the body always has the phase and the cost of the boot."""
        boot, engine = service.ledger.snapshot(), service.engine
        body = ready_body(
            service.config,
            boot,
            topology=engine.topology,
            memory=engine.memory,
            kernels=engine.kernels,
            linears=engine.linears,
            threads=engine.threads,
            step_times=engine.step_times,
            speculation=engine.stats.speculation if engine.stats is not None else None,
            prompt_pace=engine.stats.prompt_pace if engine.stats is not None else None,
            now_seconds=time.monotonic(),
            api_keys_problem=service.api_keys.problem if service.api_keys is not None else "",
            text=service.text_choices,
        )
        return JSONResponse(body, 200 if boot.phase is Phase.READY else 503)

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", tags=["probes"])
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE)

    @app.head("/load", include_in_schema=False)
    @app.get("/load", tags=["probes"])
    async def load(
        request: Request, since: Annotated[str | None, Query(description="`cursor` of an earlier answer")] = None
    ) -> Response:
        """How busy this replica is, and the tokens of the requests that it answered after the cursor `since`."""
        require_known_parameters(request.query_params, ("since",))
        return Response(service.load.body(since), media_type="application/json")

    @app.head("/version", include_in_schema=False)
    @app.get("/version", tags=["probes"])
    async def version() -> dict[str, str]:
        """The runtime's version."""
        return {"version": __version__}


def _add_models(app: FastAPI, service: Service) -> None:
    def card() -> dict[str, Any]:
        limits = service.engine.model_limits
        return {
            "id": service.config.served_model_name,
            "object": "model",
            "created": service.created_at,
            "owned_by": "millstream",
            "max_model_len": limits.max_model_len if limits is not None else None,
        }

    @app.get("/v1/models", tags=["models"])
    async def list_models() -> dict[str, Any]:
        """The one model of this server. `max_model_len` is null until it is loaded."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model:path}", tags=["models"])
    async def retrieve_model(model: str) -> dict[str, Any]:
        """404 for any other name."""
        service.require_model(model)
        return card()


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", tags=["tokenizer"])
    async def tokenize(body: TokenizeRequest, _: Request) -> Response:
        """The token ids of a prompt, or of a conversation as the chat template renders it."""
        service.require_ready(body.model)
        return Response(await service.prompts.tokenize(body), media_type="application/json")

    @app.post("/detokenize", tags=["tokenizer"])
    async def detokenize(body: DetokenizeRequest, _: Request) -> Response:
        """The text of token ids."""
        service.require_ready(body.model)
        return Response(await service.prompts.detokenize(body), media_type="application/json")


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", tags=["generation"])
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Generate the next turn of a conversation."""
        arrived, tenant = time.monotonic(), tenant_of(request)
        response_format = ChatFormat(service.config.served_model_name)
        return await _answer(
            service, request, body, response_format, body.num_candidates, lambda: service.chat(body, arrived, tenant)
        )

    @app.post("/v1/completions", tags=["generation"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue each prompt."""
        arrived, tenant = time.monotonic(), tenant_of(request)
        if "is_probe" in request.scope["state"] and not is_probe(body):
            raise beyond_probe()
        response_format = CompletionFormat(service.config.served_model_name)
        count = len(body.prompt) * body.num_candidates
        return await _answer(
            service, request, body, response_format, count, lambda: service.completion(body, arrived, tenant)
        )


def _add_document(app: FastAPI, service: Service) -> None:
    async def document(_: Request) -> Response:
        """The API as a schema. The first call takes 0.1 s, which a thread spends."""
        return JSONResponse(await asyncio.get_running_loop().run_in_executor(service.body_threads, app.openapi))

    app.add_route("/openapi.json", document, include_in_schema=False)


def tenant_of(request: Request) -> str:
    """The tenant whose API key came with the request; "" where there are no keys."""
    return str(request.scope["state"].get("tenant", ""))  # `request.state` would be created for this alone


def _request_id(request: Request) -> str:
    return str(request.scope["state"]["request_id"])


async def _answer(
    service: Service,
    request: Request,
    body: ChatCompletionRequest | CompletionRequest,
    response_format: ResponseFormat,
    num_generations: int,
    prepare: Callable[[], Coroutine[Any, Any, Generation]],
) -> Response:
    """Admit, prepare, submit, then stream or wait. However it ends, slots are freed and the engine aborts the rest."""
    service.require_ready(body.model)
    with ExitStack() as stack:
        client = tenant_of(request)
        reservation = stack.enter_context(service.admission.reserve(num_generations, body.count_param, client=client))
        generation = await prepare()
        release_body(request.scope)
        service.admission.require_time()
        if service.traces is not None:
            stack.callback(_trace, service.traces, request, generation)
        stack.callback(generation.close)
        on_ended = partial(service.answered.add, service.engine.boot_id, _request_id(request))
        generation.submit(streams=body.stream, on_choice_ended=reservation.release_one, on_ended=on_ended)
        if body.stream:
            events = sse_events(generation, response_format, body.streamed_usage, _request_id(request))
            return _SseResponse(generation, events, stack.pop_all())
        with on_disconnect(request.scope, generation.cancel):
            parts = await complete_response(generation, response_format)
    return JsonResponse(parts)


def _trace(traces: RequestTraces, request: Request, generation: Generation) -> None:
    route, request_id = str(request.url.path), _request_id(request)
    traces.finished(route, request_id, request.headers, generation.record)


class JsonResponse(Response):
    """A complete answer. Its headers are known, so Starlette need not compute them."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        """`parts`: sent one after another, with a turn for all other clients between two."""
        self.status_code = 200
        self._parts = parts
        length = sum(len(part) for part in parts)
        self.raw_headers = [(b"content-length", b"%d" % length), (b"content-type", b"application/json")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        *parts, last = self._parts
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": last, "more_body": False})


class _SseResponse(Response):
    """Server-sent events. Runs `cleanup` even if the stream never starts."""

    def __init__(self, generation: Generation, events: AsyncIterator[tuple[bytes, bool]], cleanup: ExitStack) -> None:
        self.status_code = 200
        self.raw_headers = [
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"content-type", b"text/event-stream; charset=utf-8"),
        ]
        self._generation = generation
        self._events = events
        self._cleanup = cleanup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        with self._cleanup, on_disconnect(scope, generation.cancel, generation.keep_alive):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for events, is_last in self._events:
                await send({"type": "http.response.body", "body": events, "more_body": not is_last})
