"""Metrics of speculation: vLLM's names where it has them. There are none where speculation is off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from millstream_runtime.engine.request import GovernorReport, SpeculationStats


def speculation_counters(labels: Mapping[str, str], stats: SpeculationStats | None) -> Iterable[Metric]:
    """Yield the counters of one snapshot."""
    if stats is None:
        return
    totals = (
        ("vllm:spec_decode_num_drafts", "Decodes that checked drafts", stats.num_checks),
        ("vllm:spec_decode_num_draft_tokens", "Tokens that were proposed and checked", stats.num_draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens", "Proposed tokens that stood", stats.num_accepted_tokens),
    )
    for name, text, value in totals:
        yield _total(name, text, value, labels)
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
    yield from _governor_metrics(labels, stats.governor)


def _governor_metrics(labels: Mapping[str, str], governor: GovernorReport | None) -> Iterable[Metric]:
    """The goodput of a length is the rate of its tokens over the rate of its seconds."""
    if governor is None:
        return
    tokens, seconds = (
        {str(length): value for length, value in enumerate(values)}
        for values in (governor.tokens_by_length, governor.seconds_by_length)
    )
    text = "of steps of decodes alone, by drafts per decode, rounded up"
    yield _by("millstream_spec_decode_tokens", f"Tokens {text}", "length", tokens, labels)
    yield _by("millstream_spec_decode_seconds", f"Seconds {text}", "length", seconds, labels)
    yield _total(
        "millstream_spec_decode_reading_seconds",
        "Seconds in which the drafter read prompts, which no length's seconds have",
        governor.reading_seconds,
        labels,
    )
    yield _total(
        "millstream_spec_decode_exploration_seconds",
        "Seconds lost to steps that tried another length, reading for them included",
        governor.exploration_seconds,
        labels,
    )
    yield _total("millstream_spec_decode_flips", "Changes between drafting and not drafting", governor.flips, labels)
    gauges = (
        ("millstream_spec_decode_draft_length", "Drafts per decode of the last step", governor.length),
        ("millstream_spec_decode_chosen_draft_length", "Drafts per decode as last chosen", governor.chosen_length),
    )
    for name, text, length in gauges:
        gauge = GaugeMetricFamily(name, text, labels=[*labels])
        gauge.add_metric([*labels.values()], length)
        yield gauge
    mode = GaugeMetricFamily("millstream_spec_decode_governor", "1; the mode of the governor", labels=[*labels, "mode"])
    mode.add_metric([*labels.values(), governor.mode], 1)
    yield mode


def _total(name: str, text: str, value: float, labels: Mapping[str, str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[*labels])
    family.add_metric([*labels.values()], value)
    return family


def _by(
    name: str, text: str, label: str, values: Mapping[str, float], labels: Mapping[str, str]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family
