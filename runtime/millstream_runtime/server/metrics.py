"""Prometheus metrics under the names that vLLM's dashboards and the Gateway API inference extension read.

User traffic only: warm-up and heartbeats have their own two gauges and touch nothing else. The registry is this
process's own object, not the library's global one, so two servers in one process (tests) do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.metrics_core import CounterMetricFamily

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.engine.request import FinishReason
from millstream_runtime.server.engine_loop import EngineLoop

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# From 1 ms, where a small model on a GPU lives, to what a person calls broken.
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
LATENCY_BUCKETS = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    60.0,
    120.0,
    240.0,
    480.0,
)


class ServerMetrics:
    """What the requests observe, and a view on the engine that is read at each scrape."""

    def __init__(self, model_name: str, ledger: BootLedger, engine_loop: EngineLoop) -> None:
        self._registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, [*labels], buckets=buckets, registry=self._registry)
            return family.labels(**labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, [*labels], registry=self._registry).labels(**labels)

        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From the request's arrival to its first token", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of one answer", INTER_TOKEN_BUCKETS
        )
        self._latency = histogram(
            "vllm:e2e_request_latency_seconds", "From the request's arrival to its last token", LATENCY_BUCKETS
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens computed for users")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated for users")
        success = Counter(
            "vllm:request_success",
            "Finished generations",
            [*labels, "finished_reason"],
            registry=self._registry,
        )
        # Every reason exists from the start, so that rates work from the first request on.
        self._success = {reason: success.labels(**labels, finished_reason=reason.value) for reason in FinishReason}
        self._registry.register(_EngineView(labels, ledger, engine_loop))

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        self._first_token.observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc()

    def next_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)
        self._generation_tokens.inc()

    def finished(self, reason: FinishReason, seconds: float) -> None:
        self._success[reason].inc()
        if reason is not FinishReason.ABORT:
            self._latency.observe(seconds)

    def exposition(self) -> bytes:
        """The page of `/metrics`."""
        return generate_latest(self._registry)


class _EngineView:
    """Gauges read from the engine's last snapshot and from the boot ledger, at scrape time."""

    def __init__(self, labels: dict[str, str], ledger: BootLedger, engine_loop: EngineLoop) -> None:
        self._labels = labels
        self._ledger = ledger
        self._engine_loop = engine_loop

    def collect(self) -> Iterable[Metric]:
        boot = self._ledger.snapshot()
        yield self._gauge("millstream_ready", "1 while the model answers", float(boot.phase is Phase.READY))
        seconds = GaugeMetricFamily(
            "millstream_boot_phase_seconds", "Seconds spent in each phase of the boot", labels=[*self._labels, "phase"]
        )
        for phase, spent in boot.seconds.items():
            seconds.add_metric([*self._labels.values(), phase.value], spent)
        yield seconds
        yield from self._engine_gauges()
        yield from self._heartbeat_gauges()

    def _engine_gauges(self) -> Iterable[Metric]:
        stats = self._engine_loop.stats
        if stats is None:
            return
        running, waiting = float(stats.num_requests_running), float(stats.num_requests_waiting)
        yield self._gauge("vllm:num_requests_running", "Requests in the batch", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting for a place in the batch", waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", stats.kv_cache_usage)
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions", "Requests put back to the queue for want of KV blocks", labels=[*self._labels]
        )
        preemptions.add_metric([*self._labels.values()], stats.num_preemptions_total)
        yield preemptions

    def _heartbeat_gauges(self) -> Iterable[Metric]:
        readings: tuple[tuple[str, str, Callable[[], float | None]], ...] = (
            (
                "millstream_heartbeat_age_seconds",
                "Since the last completed engine step, of a user or a heartbeat",
                lambda: self._engine_loop.heartbeat_age_seconds,
            ),
            (
                "millstream_heartbeat_latency_seconds",
                "Duration of the last heartbeat (before the first: of the warm-up)",
                lambda: self._engine_loop.heartbeat_latency_seconds,
            ),
        )
        for name, text, read in readings:
            value = read()
            if value is not None:
                yield self._gauge(name, text, value)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family
