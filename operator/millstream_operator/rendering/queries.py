"""PromQL for the pods of one LLMDeployment, by labels that every usual scrape configuration sets.

A PodMonitor (ours, by `podTargetLabels`) and the common scrape job for annotated pods (by `labelmap`) both turn the
pod's label `millstream.dev/deployment` into `millstream_dev_deployment`, and both say `namespace` and `pod`. A cluster
may do both at once, so values are first reduced to one per pod and then summed.
"""

from __future__ import annotations

from millstream_operator.api.llmdeployment import LLMDeployment

DEPLOYMENT_METRIC_LABEL = "millstream_dev_deployment"

# The runtime's own names; a test holds them to what it exports.
READY = "millstream_ready"
HEARTBEAT_AGE_SECONDS = "millstream_heartbeat_age_seconds"
REQUESTS_RUNNING = "vllm:num_requests_running"
REQUESTS_WAITING = "vllm:num_requests_waiting"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"  # 0 to 1, whatever its name says
REQUESTS_FINISHED = "vllm:request_success_total"
PREEMPTIONS = "vllm:num_preemptions_total"
DRAFT_CHECKS = "vllm:spec_decode_num_drafts_total"
DRAFTS_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
DECODES_WITHOUT_DRAFTS = "millstream_spec_decode_skipped_total"


def series(owner: LLMDeployment, metric: str, window: str = "", **matching: str) -> str:
    """A selector of one metric of the owner's pods; `window`, for example `10m`, makes it a range.

    `matching`: regular expressions for further labels.
    """
    labels = f'namespace="{owner.metadata.namespace}",{DEPLOYMENT_METRIC_LABEL}="{owner.name}"'
    labels += "".join(f',{label}=~"{values}"' for label, values in matching.items())
    return f"{metric}{{{labels}}}" + (f"[{window}]" if window else "")


def per_pod(expression: str, label: str = "") -> str:
    """Return one value per pod, and per value of `label` where it is given, also where it is scraped twice."""
    return f"max by (pod{f', {label}' if label else ''}) ({expression})"


def total(expression: str, label: str = "") -> str:
    """Return the sum over the pods, and over `label`; no value, and not 0, where none is known."""
    return f"sum({per_pod(expression, label)})"
