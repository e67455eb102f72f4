"""What bounds the prompts of a step, as gauges and in `/ready`. There is none where time bounds no prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from millstream_runtime.engine.request import PromptPace


def pace_gauges(labels: Mapping[str, str], pace: PromptPace | None) -> Iterable[Metric]:
    """Yield the gauges of one snapshot: what was chosen for the last step that prompts shared."""
    if pace is None:
        return
    gauges = (
        ("millstream_prompt_step_limit_seconds", "How long a step with prompts may last", pace.longest_step_seconds),
        ("millstream_prompt_chunk_limit_tokens", "Tokens of prompts that a step may compute", pace.chunk_tokens),
        ("millstream_decode_step_seconds", "What a step of decodes alone takes, as measured", pace.decode_step_seconds),
        (
            "millstream_prompt_tokens_per_second",
            "Tokens of prompts per second of the time that they add to a step, as measured",
            pace.prompt_tokens_per_second,
        ),
    )
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(name, text, labels=[*labels])
        gauge.add_metric([*labels.values()], value)
        yield gauge


def pace_json(pace: PromptPace) -> dict[str, float]:
    """The same for `/ready`."""
    return {
        "target_itl_milliseconds": round(1e3 * pace.target_itl_seconds),
        "step_limit_milliseconds": round(1e3 * pace.longest_step_seconds, 1),
        "chunk_limit_tokens": pace.chunk_tokens,
        "decode_step_milliseconds": round(1e3 * pace.decode_step_seconds, 1),
        "prompt_tokens_per_second": round(pace.prompt_tokens_per_second),
    }
