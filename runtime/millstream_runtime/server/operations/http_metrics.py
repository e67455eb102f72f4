"""Requests by route, under the names that vLLM takes from `prometheus-fastapi-instrumentator`. Probes do not count."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
PROBES = frozenset({"/health", "/ready", "/metrics", "/load", "/version"})  # as in vLLM: a board shows what users ask
DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class HttpMetrics:
    """`http_requests_total` and `http_request_duration_seconds`."""

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        self._labels = dict(labels)
        self._requests = Counter(
            "http_requests",
            "Answers by route and class of status",
            [*labels, "handler", "method", "status"],
            registry=registry,
        )
        self._durations = Histogram(
            "http_request_duration_seconds",
            "From the request's arrival to the end of its answer",
            [*labels, "handler", "method"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        # Finding a child by its labels costs more than counting.
        self._counters: dict[tuple[str, str, str], Counter] = {}
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def began(self, method: str, route: str, status: int) -> None:
        """Record the start of a response. `status` is kept as its class: 2xx, 4xx, 5xx."""
        if route in PROBES:
            return
        key = (route, _known(method), f"{status // 100}xx")
        counter = self._counters.get(key)
        if counter is None:
            names = dict(zip(("handler", "method", "status"), key, strict=True))
            counter = self._counters[key] = self._requests.labels(**self._labels, **names)
        counter.inc()

    def ended(self, method: str, route: str, seconds: float) -> None:
        """Record how long a request took."""
        if route in PROBES:
            return
        key = (route, _known(method))
        histogram = self._histograms.get(key)
        if histogram is None:
            names = dict(zip(("handler", "method"), key, strict=True))
            histogram = self._histograms[key] = self._durations.labels(**self._labels, **names)
        histogram.observe(seconds)


def _known(method: str) -> str:
    """A method that a client makes up would be a label of unbounded cardinality."""
    return method if method in HTTP_METHODS else "other"
