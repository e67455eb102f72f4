"""Prometheus metrics under the names that vLLM's dashboards and the Gateway API inference extension read.

User traffic only: warm-up and heartbeats appear in their own two gauges only. The registry belongs to this server and
is not the library's global one, so two servers in one process (tests) do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.engine.request import EngineStats, FinishReason, Prefill
from millstream_runtime.server.engine.client import EngineClient
from millstream_runtime.server.operations.boot_gauges import boot_gauges, kernel_gauges
from millstream_runtime.server.operations.cache_info import cache_config_info
from millstream_runtime.server.operations.http_metrics import HttpMetrics
from millstream_runtime.server.operations.instruments import LoopCounter, LoopHistogram, RecentMean
from millstream_runtime.server.operations.longest_waits import LongestWaits
from millstream_runtime.server.operations.pace_gauges import pace_gauges
from millstream_runtime.server.operations.preemption_histogram import preemption_histogram
from millstream_runtime.server.operations.speculation_metrics import speculation_counters
from millstream_runtime.server.operations.topology_view import topology_gauges

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# From 1 ms (a small model on a GPU) to what a user considers broken.
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


TOKEN_COUNT_BUCKETS = tuple(float(head * 10**power) for power in range(6) for head in (1, 2, 5))
STEP_TOKEN_BUCKETS = tuple(float(1 << power) for power in range(15))


@dataclass(slots=True)
class RequestTimes:
    """Times and counts of one generation; moments are `time.monotonic()`."""

    arrived_at_seconds: float
    num_prompt_tokens: int
    max_tokens: int
    num_generated_tokens: int = 0
    scheduled_at_seconds: float | None = None
    first_token_at_seconds: float | None = None
    last_token_at_seconds: float | None = None


class ServerMetrics:
    """Metrics that requests update, and engine gauges that are read at each scrape."""

    def __init__(
        self, model_name: str, ledger: BootLedger, engine: EngineClient, cache_config: Mapping[str, str] | None = None
    ) -> None:
        """`cache_config`: further labels of `vllm:cache_config_info`."""
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._histograms = {
            name: self._histogram(f"vllm:{name}", text, buckets) for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._recent_itl = RecentMean(self._histograms["inter_token_latency_seconds"])
        self._counters = {name: self._counter(f"vllm:{name}", text) for name, text in COUNTERS.items()}
        success = Counter(
            "vllm:request_success",
            "Finished generations",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        # Every reason exists from the start, so that rates work from the first request on.
        self._success = {
            reason: success.labels(**self._labels, finished_reason=reason.value) for reason in FinishReason
        }
        self.http = HttpMetrics(self._labels, self._registry)
        ProcessCollector(registry=self._registry)
        self._prompt_tokens = {
            name: self._by_source(name, text, sources) for name, (text, sources) in COUNTERS_BY_SOURCE.items()
        }
        self.waits = LongestWaits(self._labels)
        self._registry.register(self.waits)
        self._steps_total = 0
        engine.on_step = self._step
        self._registry.register(_EngineView(self._labels, ledger, engine, cache_config or {}))

    @property
    def labels(self) -> dict[str, str]:
        return dict(self._labels)

    @property
    def recent_itl_seconds(self) -> float | None:
        """The inter-token latency of the last dozens of steps; None before the first."""
        return self._recent_itl.value

    def register(self, collector: Collector) -> None:
        """Add the metrics of another part of this process."""
        self._registry.register(collector)

    def began_to_wait(self, client: str, request_id: str, at_seconds: float) -> None:
        """Record that a generation has no first token yet. `at_seconds`: when its request came."""
        self.waits.begin(client, request_id, at_seconds)

    def ended_waiting(self, client: str, request_id: str) -> None:
        """Record that its first token has come, or none will. Safe to call twice."""
        self.waits.end(client, request_id)

    def first_token(self, times: RequestTimes, at_seconds: float, prefill: Prefill) -> None:
        """Record the first token: the prompt is computed."""
        times.scheduled_at_seconds = prefill.scheduled_at_seconds
        times.first_token_at_seconds = times.last_token_at_seconds = at_seconds
        times.num_generated_tokens = 1
        self._histograms["time_to_first_token_seconds"].observe(at_seconds - times.arrived_at_seconds)
        self._counters["prompt_tokens"].inc(times.num_prompt_tokens)
        self._counters["prompt_tokens_cached"].inc(prefill.num_cached_tokens)
        computed = times.num_prompt_tokens - prefill.num_cached_tokens
        self._histograms["request_prefill_kv_computed_tokens"].observe(computed)
        self._prompt_tokens["prompt_tokens_by_source"]["local_compute"].inc(computed)
        self._prompt_tokens["prompt_tokens_by_source"]["local_cache_hit"].inc(prefill.num_cached_tokens)
        self._prompt_tokens["prompt_tokens_cached_by_source"]["device"].inc(prefill.num_cached_tokens)
        self._counters["generation_tokens"].inc()

    def next_token(self, times: RequestTimes, at_seconds: float) -> None:
        """Record a further token of an answer. Tokens of one step have one interval, as in vLLM."""
        if at_seconds != times.last_token_at_seconds:
            last = times.last_token_at_seconds if times.last_token_at_seconds is not None else at_seconds
            self._histograms["inter_token_latency_seconds"].observe(at_seconds - last)
            times.last_token_at_seconds = at_seconds
        times.num_generated_tokens += 1
        self._counters["generation_tokens"].inc()

    def finished(self, reason: FinishReason, times: RequestTimes, at_seconds: float) -> None:
        """Record the end of a generation. Only complete answers count in the histograms."""
        self._success[reason].inc()
        scheduled, first, last = (
            times.scheduled_at_seconds,
            times.first_token_at_seconds,
            times.last_token_at_seconds,
        )
        if reason in (FinishReason.ABORT, FinishReason.ERROR) or scheduled is None or first is None or last is None:
            return
        observed = {
            "e2e_request_latency_seconds": at_seconds - times.arrived_at_seconds,
            "request_queue_time_seconds": max(0.0, scheduled - times.arrived_at_seconds),
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": last - first,
            "request_inference_time_seconds": last - scheduled,
            "request_prompt_tokens": times.num_prompt_tokens,
            "request_generation_tokens": times.num_generated_tokens,
            "request_params_max_tokens": times.max_tokens,
        }
        if times.num_generated_tokens > 1:
            observed["request_time_per_output_token_seconds"] = (last - first) / (times.num_generated_tokens - 1)
        for name, value in observed.items():
            self._histograms[name].observe(value)

    def answered(self, generated_tokens: Sequence[int]) -> None:
        """Record that all choices of one HTTP request ended."""
        self._histograms["request_params_n"].observe(len(generated_tokens))
        self._histograms["request_max_num_generation_tokens"].observe(max(generated_tokens))

    def exposition(self) -> bytes:
        """The body of `/metrics`."""
        return generate_latest(self._registry)

    def _step(self, stats: EngineStats) -> None:
        if stats.steps_total != self._steps_total and stats.last_step_tokens:
            self._histograms["iteration_tokens_total"].observe(stats.last_step_tokens)
        self._steps_total = stats.steps_total
        self._recent_itl.end_round()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> LoopHistogram:
        histogram = LoopHistogram(name, text, self._labels, buckets)
        self._registry.register(histogram)
        return histogram

    def _by_source(self, name: str, text: str, sources: Sequence[str]) -> dict[str, Counter]:
        counter = Counter(f"vllm:{name}", text, [*self._labels, "source"], registry=self._registry)
        return {source: counter.labels(**self._labels, source=source) for source in sources}

    def _counter(self, name: str, text: str) -> LoopCounter:
        counter = LoopCounter(name, text, self._labels)
        self._registry.register(counter)
        return counter


# vLLM's sources; here every cached token is on the device, and no other machine sends any.
COUNTERS_BY_SOURCE: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_tokens_by_source": (
        "Prompt tokens of users, by where their keys and values came from",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "prompt_tokens_cached_by_source": (
        "Prompt tokens of users found in a cache, by where it is",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of users, computed or found in the prefix cache",
    "prompt_tokens_cached": "Prompt tokens of users found in the prefix cache",
    "generation_tokens": "Tokens generated for users",
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From the request's arrival to its first token", FIRST_TOKEN_BUCKETS),
    "inter_token_latency_seconds": ("Between two tokens of one answer", INTER_TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": ("An answer's mean time a token after its first", INTER_TOKEN_BUCKETS),
    "e2e_request_latency_seconds": ("From the request's arrival to its last token", LATENCY_BUCKETS),
    "request_queue_time_seconds": ("From the request's arrival to its first place in a batch", LATENCY_BUCKETS),
    "request_prefill_time_seconds": ("From the first place in a batch to the first token", LATENCY_BUCKETS),
    "request_decode_time_seconds": ("From the first token to the last", LATENCY_BUCKETS),
    "request_inference_time_seconds": ("From the first place in a batch to the last token", LATENCY_BUCKETS),
    "request_prompt_tokens": ("Tokens of a prompt", TOKEN_COUNT_BUCKETS),
    "request_prefill_kv_computed_tokens": ("Tokens of a prompt that were not in the prefix cache", TOKEN_COUNT_BUCKETS),
    "request_generation_tokens": ("Tokens of an answer", TOKEN_COUNT_BUCKETS),
    "request_max_num_generation_tokens": ("Tokens of the longest answer of one request", TOKEN_COUNT_BUCKETS),
    "request_params_max_tokens": ("The token limit of a request", TOKEN_COUNT_BUCKETS),
    "request_params_n": ("Answers generated for one HTTP request", (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 128.0)),
    "iteration_tokens_total": ("Tokens that one engine step computed for users", STEP_TOKEN_BUCKETS),
}


class _EngineView:
    """Gauges read from the engine's last snapshot and from the boot ledger, at scrape time."""

    def __init__(
        self, labels: dict[str, str], ledger: BootLedger, engine: EngineClient, cache_config: Mapping[str, str]
    ) -> None:
        self._labels = labels
        self._ledger = ledger
        self._engine = engine
        self._cache_config = cache_config

    def collect(self) -> Iterable[Metric]:
        boot = self._ledger.snapshot()
        yield self._gauge("millstream_ready", "1 while the model answers", float(boot.phase is Phase.READY))
        yield from boot_gauges(self._labels, boot, self._engine.memory)
        yield from kernel_gauges(self._labels, self._engine.kernels, self._engine.kernel_lookups)
        restarts = CounterMetricFamily(
            "millstream_engine_restarts", "Engines started again after one had died", labels=[*self._labels]
        )
        restarts.add_metric([*self._labels.values()], self._engine.restarts_total)
        yield restarts
        yield from self._engine_gauges()
        yield from self._heartbeat_gauges()
        yield from topology_gauges(self._labels, self._engine.topology)

    def _engine_gauges(self) -> Iterable[Metric]:
        stats = self._engine.stats
        if stats is None:
            return
        running, waiting = float(stats.num_requests_running), float(stats.num_requests_waiting)
        yield self._gauge("vllm:num_requests_running", "Requests in the batch", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting for a place in the batch", waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", stats.kv_cache_usage)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests waiting, by what for", labels=[*self._labels, "reason"]
        )
        # "deferred" is vLLM's word for requests that wait for something else: a grammar, a remote KV cache.
        for reason, value in (("capacity", waiting), ("deferred", 0.0)):
            reasons.add_metric([*self._labels.values(), reason], value)
        yield reasons
        totals = (
            (
                "vllm:num_preemptions",
                "Requests put back to the queue for want of KV blocks",
                stats.num_preemptions_total,
            ),
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache",
                stats.prefix_cache_queried_tokens_total,
            ),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_cache_hit_tokens_total),
            ("millstream_recomputed_tokens", "Tokens computed again after a preemption", stats.recomputed_tokens_total),
        )
        for name, text, value in totals:
            family = CounterMetricFamily(name, text, labels=[*self._labels])
            family.add_metric([*self._labels.values()], value)
            yield family
        yield from speculation_counters(self._labels, stats.speculation)
        yield from pace_gauges(self._labels, stats.prompt_pace)
        yield preemption_histogram(self._labels, stats.ended_by_preemptions)
        yield cache_config_info(self._labels, self._cache_config, stats, self._engine.memory)

    def _heartbeat_gauges(self) -> Iterable[Metric]:
        readings: tuple[tuple[str, str, Callable[[], float | None]], ...] = (
            (
                "millstream_heartbeat_interval_seconds",
                "Idle time after which a heartbeat comes, as configured now; 0: never",
                lambda: self._engine.heartbeat_interval_seconds,
            ),
            (
                "millstream_heartbeat_age_seconds",
                "Since the last completed engine step, of a user or a heartbeat",
                lambda: self._engine.heartbeat_age_seconds,
            ),
            (
                "millstream_heartbeat_latency_seconds",
                "Duration of the last heartbeat (before the first: of the warm-up)",
                lambda: self._engine.heartbeat_latency_seconds,
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
