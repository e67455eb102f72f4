"""Admission and connections as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from millstream_runtime.server.http.connection_table import CloseReason, ConnectionTable
from millstream_runtime.server.operations.admission import Admission


class ServerGauges:
    """A collector of prometheus_client; reads the counts at each scrape."""

    def __init__(self, labels: Mapping[str, str], admission: Admission, connections: ConnectionTable) -> None:
        self._labels = dict(labels)
        self._admission = admission
        self._connections = connections

    def collect(self) -> Iterable[Metric]:
        admission, connections = self._admission, self._connections
        yield self._gauge("millstream_admission_in_use", "Generations that run or wait", admission.in_flight)
        yield self._gauge(
            "millstream_admission_capacity", "Generations that may run or wait together", admission.capacity
        )
        yield self._gauge(
            "millstream_answers_undelivered", "Requests whose answer is not complete", admission.undelivered
        )
        yield self._gauge(
            "millstream_http_connections_limit", "Open connections at most", connections.limits.max_connections
        )
        by_state = GaugeMetricFamily(
            "millstream_http_connections",
            "Open connections: waiting for a complete request, or busy with one",
            labels=[*self._labels, "state"],
        )
        for state, count in (("waiting", connections.num_waiting), ("busy", connections.num_busy)):
            by_state.add_metric([*self._labels.values(), state], count)
        yield by_state
        closed = CounterMetricFamily(
            "millstream_http_connections_closed",
            "Connections that the server closed because of their client, or because there were too many",
            labels=[*self._labels, "reason"],
        )
        for reason in CloseReason:
            closed.add_metric([*self._labels.values(), reason.value], connections.closed[reason])
        yield closed
        refused = CounterMetricFamily(
            "vllm:admission_rejections", "Requests that found the queue full", labels=[*self._labels, "reason"]
        )
        # vLLM's reasons; the queue here has no bound in tokens.
        for limit, number in (("max_num_queued_reqs", admission.num_refused), ("max_num_queued_tokens", 0)):
            refused.add_metric([*self._labels.values(), limit], number)
        yield refused

    def _gauge(self, name: str, text: str, value: int) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family
