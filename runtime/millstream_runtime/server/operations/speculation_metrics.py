"""Metrics of speculation: vLLM's names where it has them. There are none where speculation is off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily

from millstream_runtime.engine.request import SpeculationStats


def speculation_counters(labels: Mapping[str, str], stats: SpeculationStats | None) -> Iterable[CounterMetricFamily]:
    """Yield the counters of one snapshot."""
    if stats is None:
        return
    totals = (
        ("vllm:spec_decode_num_drafts", "Decodes that checked drafts", stats.num_checks),
        ("vllm:spec_decode_num_draft_tokens", "Tokens that were proposed and checked", stats.num_draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens", "Proposed tokens that stood", stats.num_accepted_tokens),
    )
    for name, text, value in totals:
        family = CounterMetricFamily(name, text, labels=[*labels])
        family.add_metric([*labels.values()], value)
        yield family
    yield _by(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Proposed tokens that stood, by their place among those of a decode",
        "position",
        {str(place): count for place, count in enumerate(stats.accepted_per_position)},
        labels,
    )
    yield _by(
        "millstream_spec_decode_skipped", "Decodes that checked no drafts, by why", "reason", stats.skipped, labels
    )


def _by(name: str, text: str, label: str, values: Mapping[str, int], labels: Mapping[str, str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family
