"""The operator's own metrics, for Prometheus: what it does, what waits, what goes wrong, and who leads.

The registry is this process's own object, not the library's global one. Counters count where things happen; gauges
(the queue, the watches, leadership, the LLMDeployments) are read at each scrape. Only the leader exports
`llmdeployments`, so that a sum over the replicas counts each one once.
"""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millstream_operator.diagnosis.conditions import READY, find
from millstream_operator.queue.work_queue import Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "millstream_operator"
# From a reconcile with nothing to do, to one that waits for several slow answers.
RECONCILE_BUCKETS_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class OperatorMetrics:
    """The counters. A RequestObserver of ClusterClient; its `reconciled` is the queue's observer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

        self._reconciles = counter("reconciles", "Reconciles by how they ended.", "result")
        self._duration = Histogram(
            f"{PREFIX}_reconcile_duration_seconds",
            "How long a reconcile took.",
            buckets=RECONCILE_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._retries = counter("retries", "Reconciles that are tried again after a back-off.")
        self._writes = counter("writes", "Write requests sent, the Lease's own included.", "kind", "verb")
        self._errors = counter("api_errors", "Requests that failed, by HTTP status, or unreachable.", "code")
        for result in Result:
            self._reconciles.labels(result)

    def reconciled(self, result: Result, seconds: float) -> None:
        self._reconciles.labels(result).inc()
        self._duration.observe(seconds)
        if result in (Result.RETRY, Result.ERROR):
            self._retries.inc()

    def write(self, verb: str, what: str) -> None:
        self._writes.labels(what, verb).inc()

    def error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def exposition(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self.registry)


@dataclass(frozen=True, slots=True)
class StateCollector(Collector):
    """The gauges, read at each scrape."""

    queue_depth: Callable[[], Mapping[str, int]]  # by state
    queue_age_seconds: Callable[[], float]
    watch_age_seconds: Callable[[], Mapping[str, float]]  # by kind
    leading: Callable[[], bool]
    llmdeployments: Callable[[], Iterable[dict[str, Any]]]
    events_waiting: Callable[[], int] = lambda: 0
    inventory_known: Callable[[], bool] = lambda: False
    catalog_valid: Callable[[], bool] = lambda: True
    managed_by_another: Callable[[], int] = lambda: 0

    def collect(self) -> Iterable[Metric]:
        depth = GaugeMetricFamily(
            f"{PREFIX}_queue_depth", "Keys in the work queue: due, delayed or running.", labels=["state"]
        )
        for state, count in self.queue_depth().items():
            depth.add_metric([state], count)
        yield depth
        yield GaugeMetricFamily(
            f"{PREFIX}_queue_oldest_age_seconds", "How long the oldest due key waits.", self.queue_age_seconds()
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_events_waiting", "Kubernetes Events that are still to be written.", float(self.events_waiting())
        )
        fresh = GaugeMetricFamily(
            f"{PREFIX}_watch_freshness_seconds",
            "Since the watch brought something, or a whole listing found that it missed nothing.",
            labels=["kind"],
        )
        for kind, seconds in self.watch_age_seconds().items():
            fresh.add_metric([kind], seconds)
        yield fresh
        leading = self.leading()
        yield GaugeMetricFamily(f"{PREFIX}_leader", "1 on the replica that may write.", float(leading))
        yield GaugeMetricFamily(
            f"{PREFIX}_inventory_known", "1 while the cluster's GPUs are known to plans.", float(self.inventory_known())
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_gpu_catalog_valid",
            "0 while the file of own GPU prices cannot be used, and the last good one is.",
            float(self.catalog_valid()),
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_managed_by_another",
            "LLMDeployments that another release manages; this one writes nothing to them.",
            float(self.managed_by_another() if leading else 0),
        )
        yield self._deployments() if leading else _deployments_family()

    def _deployments(self) -> Metric:
        family = _deployments_family()
        counted: Counted[tuple[str, str]] = Counted()
        for manifest in self.llmdeployments():
            ready = find((manifest.get("status") or {}).get("conditions") or (), READY)
            counted[ready.get("status", "Unknown"), ready.get("reason", "")] += 1
        for (ready_status, reason), count in sorted(counted.items()):
            family.add_metric([ready_status, reason], count)
        return family


def _deployments_family() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        f"{PREFIX}_llmdeployments", "LLMDeployments by Ready's status and reason.", labels=["ready", "reason"]
    )
