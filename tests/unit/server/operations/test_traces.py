"""Spans as a collector receives them: a real OTLP sink on a loopback port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.server_thread import PATIENCE_SECONDS, serving

SECRET = "the secret prompt"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def _nothing_is_left_to_send() -> Iterator[None]:
    """The last spans are flushed on a thread that outlives the server; a test must not meet another test's spans."""
    yield
    for thread in threading.enumerate():
        if thread.name == "traces-flush":
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()


@contextmanager
def otlp_sink() -> Iterator[tuple[str, list[bytes]]]:
    """An endpoint, and the bodies that were posted to it."""
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as sink:
        thread = threading.Thread(target=sink.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{sink.server_port}", received
        finally:
            sink.shutdown()
            thread.join()


def spans_of(bodies: list[bytes]) -> list[Any]:
    return [
        span
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def attributes_of(span: Any) -> dict[str, Any]:
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


def test_a_request_is_a_span_with_times_and_counts_and_no_text(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with otlp_sink() as (endpoint, bodies):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with serving(tiny_model) as server:
            server.wait_ready()
            body = {"model": "tiny", "prompt": SECRET, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
            headers = {"X-Request-Id": "ours", "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200
            streamed = {**body, "stream": True, "n": 2, "temperature": 1}
            assert server.post("/v1/completions", streamed).text.endswith("[DONE]\n\n")
            assert server.post("/v1/completions", {**body, "n": 0}).status_code == 400  # refused: nothing was generated
        assert server.failure is None
    first, second = sorted(spans_of(bodies), key=lambda span: span.start_time_unix_nano)
    assert first.name == "/v1/completions"
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    recorded = attributes_of(first)
    assert recorded["gen_ai.request.id"] == "ours"
    assert recorded["gen_ai.request.model"] == "tiny"
    assert recorded["gen_ai.usage.input_tokens"] == len(SECRET)  # one token is one byte
    assert recorded["gen_ai.usage.output_tokens"] == 5
    assert recorded["gen_ai.response.finish_reasons"] == ["length"]
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    within = sum(recorded[f"gen_ai.latency.{part}"] for part in parts)
    assert 0 < within <= recorded["gen_ai.latency.e2e"]
    assert first.end_time_unix_nano - first.start_time_unix_nano >= int(within * 1e9)
    recorded = attributes_of(second)
    assert (recorded["gen_ai.request.n"], recorded["gen_ai.usage.output_tokens"]) == (2, 10)
    page = b"".join(bodies)
    assert SECRET.encode() not in page
    assert answer.json()["choices"][0]["text"].encode() not in page


def test_a_collector_that_is_not_there_is_no_reason_to_fail(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with serving(tiny_model) as server:
        server.wait_ready()
        assert server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2}).status_code == 200
    assert server.failure is None
