"""How often requests were preempted, as vLLM's histogram. The engine counts: it alone sees preemptions."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import HistogramMetricFamily

BUCKETS = (0, 1, 2, 3, 4, 5, 10, 20)  # vLLM's, and 0: how many were never preempted


def preemption_histogram(labels: Mapping[str, str], ended: Mapping[int, int]) -> HistogramMetricFamily:
    """Return the histogram. `ended`: requests that have ended, by how often each was preempted."""
    family = HistogramMetricFamily(
        "vllm:request_num_preemptions", "How often a request was put back to the queue", labels=[*labels]
    )
    up_to = [(f"{bound}.0", sum(count for times, count in ended.items() if times <= bound)) for bound in BUCKETS]
    buckets = [*up_to, ("+Inf", sum(ended.values()))]
    family.add_metric([*labels.values()], buckets, sum(times * count for times, count in ended.items()))
    return family
