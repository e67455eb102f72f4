"""/openapi.json: what FastAPI knows of the requests, and here what it does not: every status and body of the answers.

FastAPI would promise a 422 for each wrong request, and say nothing of errors, streams and keys.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from millstream_runtime.server.http.api_keys import OPEN_PATHS
from millstream_runtime.server.openai import response_schemas as answers

JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"
Bodies = dict[str, type[BaseModel] | None]  # by content type; None: plain text

ANSWERS: dict[tuple[str, str], Bodies] = {
    ("get", "/health"): {JSON: answers.Health},
    ("get", "/ready"): {JSON: answers.Readiness},
    ("get", "/metrics"): {PLAIN: None},
    ("get", "/load"): {JSON: answers.LoadState},
    ("get", "/version"): {JSON: answers.Version},
    ("get", "/v1/models"): {JSON: answers.ModelList},
    ("get", "/v1/models/{model}"): {JSON: answers.ModelCard},
    ("post", "/tokenize"): {JSON: answers.Tokens},
    ("post", "/detokenize"): {JSON: answers.Text},
    ("post", "/v1/chat/completions"): {JSON: answers.ChatCompletion, EVENTS: answers.ChatCompletionChunk},
    ("post", "/v1/completions"): {JSON: answers.Completion, EVENTS: answers.Completion},
}
ERRORS = {
    400: "the request is wrong; `param` names the field",
    401: "no valid API key",
    403: "the key of the operator's probe, with another request than a probe",
    404: "another model than the served one",
    408: "the request did not arrive in time",
    413: "the body is too large",
    429: "the queue is full; `Retry-After` says when to try again",
    500: "a failure of the server",
    503: "loading, restarting, shutting down or too busy; `Retry-After` says when to try again",
}
ERRORS_OF_BODIES = (400, 404, 408, 413, 500, 503)
PROBES = ("/health", "/ready")  # answer 503 with the same body as 200


def complete_document(app: FastAPI, *, has_keys: bool) -> None:
    """Make `app.openapi()` say what the routes answer. `has_keys`: requests need an API key.

    It is made once: that takes 0.1 s.
    """
    generate = app.openapi

    def document() -> dict[str, Any]:
        found = generate()
        refs, definitions = _schemas()
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas.update(definitions)
        for path, operations in found["paths"].items():
            for method, operation in operations.items():
                operation["responses"] = _responses(method, path, refs, has_keys)
                if has_keys and path not in OPEN_PATHS:
                    operation["security"] = [{"apiKey": []}]
        if has_keys:
            found["components"]["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
        return found

    app.openapi = cache(document)  # type: ignore[method-assign]


def _schemas() -> tuple[dict[type[BaseModel], Any], dict[str, Any]]:
    """A reference to each type of answer, and the definitions that they need."""
    models: list[type[BaseModel]] = [answers.ErrorBody]
    models += [model for bodies in ANSWERS.values() for model in bodies.values() if model is not None]
    by_model, document = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    return {model: by_model[model, "validation"] for model in models}, document["$defs"]


def _responses(method: str, path: str, refs: dict[type[BaseModel], Any], has_keys: bool) -> dict[str, Any]:
    def content(bodies: Bodies) -> dict[str, Any]:
        return {
            kind: {"schema": refs[model] if model is not None else {"type": "string"}} for kind, model in bodies.items()
        }

    bodies = ANSWERS[method, path]
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content(bodies)}}
    if path in PROBES:
        responses["503"] = {"description": "not now", "content": content(bodies)}
    for status in _errors(method, path, has_keys):
        responses[str(status)] = {"description": ERRORS[status], "content": content({JSON: answers.ErrorBody})}
    return responses


def _errors(method: str, path: str, has_keys: bool) -> list[int]:
    statuses = {401, 403} if has_keys and path not in OPEN_PATHS else set()
    if path not in OPEN_PATHS:
        statuses.add(503)  # too many connections
    if method == "post":
        statuses |= {*ERRORS_OF_BODIES}
    if path.endswith("completions"):
        statuses.add(429)
    if path == "/load":
        statuses.add(400)
    if path.endswith("{model}"):
        statuses.add(404)
    return sorted(statuses)
