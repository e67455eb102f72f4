"""OpenTelemetry: one span per request, sent to `OTEL_EXPORTER_OTLP_ENDPOINT`; without it nothing is imported.

A span has times and token counts, under the names of vLLM and of the semantic conventions for generative AI. It never
contains prompts or answers. It continues the caller's trace (`traceparent`, W3C Trace Context). All other environment
variables of the SDK (headers, sampler, resource) work as documented there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millstream_runtime.engine.request import FinishReason
from millstream_runtime.logs import log
from millstream_runtime.server.operations.metrics import RequestTimes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE_NAME = "millstream"
FLUSH_SECONDS = 2.0  # at exit; a collector that does not answer must not delay the pod's end


class RequestTraces:
    """Spans of finished requests, sent in batches by a thread of the SDK."""

    def __init__(self, model_name: str, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model_name = model_name
        self._provider = provider
        self._tracer = provider.get_tracer("millstream_runtime")
        self._propagator = TraceContextTextMapPropagator()

    @staticmethod
    def from_environment(model_name: str) -> RequestTraces | None:
        """None where no endpoint is set; also where the settings cannot be used, which is logged."""
        if not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
            return None
        try:
            return RequestTraces(model_name, _provider())
        except Exception as error:  # tracing is optional: a wrong variable must not prevent serving
            # Not its message, which quotes values of variables: endpoints and headers may hold secrets.
            log.warning("tracing_off", error=type(error).__name__, message="Check the variables OTEL_*.")
            return None

    def finished(
        self,
        route: str,
        request_id: str,
        headers: Mapping[str, str],
        choices: Sequence[tuple[RequestTimes, FinishReason | None]],
    ) -> None:
        """Record a request that ended in any way; `choices` has at least one."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        arrived = min(times.arrived_at_seconds for times, _ in choices)
        now = time.monotonic()
        span = self._tracer.start_span(
            route,
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=self._attributes(request_id, choices, now),
            start_time=_unix_nanoseconds(arrived, now),
        )
        if any(reason in (None, FinishReason.ABORT, FinishReason.ERROR) for _, reason in choices):
            span.set_status(Status(StatusCode.ERROR, "ended before its answer was complete"))
        span.end(_unix_nanoseconds(now, now))

    def close(self) -> None:
        """Send the remaining spans within FLUSH_SECONDS."""
        flushing = threading.Thread(target=self._provider.shutdown, name="traces-flush", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)

    def _attributes(
        self, request_id: str, choices: Sequence[tuple[RequestTimes, FinishReason | None]], now: float
    ) -> dict[str, Any]:
        times = [one for one, _ in choices]
        arrived = min(one.arrived_at_seconds for one in times)
        attributes: dict[str, Any] = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.id": request_id,
            "gen_ai.request.n": len(choices),
            "gen_ai.request.max_tokens": times[0].max_tokens,
            "gen_ai.usage.input_tokens": times[0].num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(one.num_generated_tokens for one in times),
            "gen_ai.response.finish_reasons": [(reason or FinishReason.ABORT).value for _, reason in choices],
            "gen_ai.latency.e2e": now - arrived,
        }
        scheduled = [one.scheduled_at_seconds for one in times if one.scheduled_at_seconds is not None]
        first = [one.first_token_at_seconds for one in times if one.first_token_at_seconds is not None]
        last = [one.last_token_at_seconds for one in times if one.last_token_at_seconds is not None]
        if scheduled and first and last:
            attributes |= {
                "gen_ai.latency.time_in_queue": max(0.0, min(scheduled) - arrived),
                "gen_ai.latency.time_to_first_token": min(first) - arrived,
                "gen_ai.latency.time_in_model_prefill": min(first) - min(scheduled),
                "gen_ai.latency.time_in_model_decode": max(last) - min(first),
            }
        return attributes


def _provider() -> TracerProvider:
    """A provider of this server, not the process's global one, so that two servers in one process do not mix."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": SERVICE_NAME}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _unix_nanoseconds(at_seconds: float, now: float) -> int:
    """Convert a moment of `time.monotonic()`, whose present is `now`, to wall-clock time."""
    return time.time_ns() - int((now - at_seconds) * 1e9)
