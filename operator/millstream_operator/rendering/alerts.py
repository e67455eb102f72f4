"""The alerts of one LLMDeployment: each needs a person to act, and says where to look. Pure.

docs/monitoring.md has a paragraph per alert, which a test compares with this list. Times come from the spec where the
spec sets them, so that an alert never fires on what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from millstream_operator.api import duration
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import HEAD_METHODS, Speculation, SpeculationMethod
from millstream_operator.api.rules import DEFAULT_WARMUP_TIMEOUT
from millstream_operator.api.spec import Warmup
from millstream_operator.rendering.queries import (
    DECODES_WITHOUT_DRAFTS,
    DRAFT_CHECKS,
    DRAFTS_ACCEPTED,
    HEARTBEAT_AGE_SECONDS,
    KV_CACHE_USAGE,
    PREEMPTIONS,
    READY,
    REQUESTS_FINISHED,
    REQUESTS_WAITING,
    per_pod,
    series,
    total,
)
from millstream_operator.rendering.runtime_config import DEFAULT_HEARTBEAT_INTERVAL

KV_CACHE_FULL_PERCENT = 95
MISSED_HEARTBEATS = 5
HEARTBEAT_FLOOR_SECONDS = 300
PREEMPTIONS_PERCENT = 10
LEAST_CHECKS_PER_HOUR = 1000  # of a draft, or decodes without one: fewer say little
ACCEPTED_PER_CHECK_PERCENT = 10  # of a check without gain: 1.1 tokens, for the price of at least two
UNDRAFTED_PER_CHECK = 20  # decodes without drafts per check; the rest are the governor's trials


@dataclass(frozen=True, slots=True)
class Alert:
    """`summary` is one line for a phone; `help` says what to do first."""

    name: str
    severity: str  # critical: no request is served. warning: requests will soon fail. info: it costs more than it must
    expression: str
    for_seconds: int
    summary: str
    help: str

    def as_rule(self, owner: LLMDeployment) -> dict[str, Any]:
        where = f"{owner.metadata.namespace}/{owner.name}"
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": f"{self.for_seconds}s",
            "labels": {
                "severity": self.severity,
                "namespace": owner.metadata.namespace,
                "llmdeployment": owner.name,
            },
            "annotations": {
                "summary": f"{where}: {self.summary}",
                "description": self.help,
                "runbook": f"docs/monitoring.md#{self.name.lower()}",
            },
        }


def alerts(owner: LLMDeployment) -> list[Alert]:
    """Return the alerts, the most severe first."""
    return [*_serving(owner), *_load(owner), *_heartbeats(owner), *_speculation(owner)]


def _warmup(owner: LLMDeployment) -> Warmup:
    return owner.spec.warmup or Warmup()


def _serving(owner: LLMDeployment) -> Iterator[Alert]:
    ready = series(owner, READY)
    if owner.spec.replicas > 0:  # no alert for a model that is switched off
        yield Alert(
            "MillstreamNoReadyReplica",
            "critical",
            f"({total(ready)} or vector(0)) == 0",
            300,
            "no replica is ready",
            f"kubectl describe llmd {owner.name} -n {owner.metadata.namespace} has the reason. If it is Ready there, "
            "Prometheus does not scrape its pods.",
        )
    timeout = duration.seconds(_warmup(owner).timeout or DEFAULT_WARMUP_TIMEOUT)
    yield Alert(
        "MillstreamWarmupStuck",
        "warning",
        f"{per_pod(ready)} == 0",
        timeout,
        "pod {{ $labels.pod }} has not become ready within warmup.timeout",
        "kubectl describe llmd names what it waits for; millstream_boot_phase_seconds says in which phase it is.",
    )


def _load(owner: LLMDeployment) -> Iterator[Alert]:
    waiting = f"min_over_time({series(owner, REQUESTS_WAITING, '10m')})"
    trend = f"deriv({series(owner, REQUESTS_WAITING, '10m')})"
    yield Alert(
        "MillstreamQueueGrowing",
        "warning",
        f"{total(waiting)} > 0 and {total(trend)} > 0",
        300,
        "the queue has not been empty for ten minutes, and grows",
        "More requests come than the replicas finish: raise replicas or autoscaling.maxReplicas, or send less.",
    )
    yield Alert(
        "MillstreamKVCacheFull",
        "warning",
        f"{per_pod(series(owner, KV_CACHE_USAGE))} > 0.{KV_CACHE_FULL_PERCENT}",
        600,
        "the KV cache of pod {{ $labels.pod }} is full",
        "Requests wait for room or are preempted: more replicas, shorter engine.maxModelLen, or more GPU memory.",
    )
    preempted = total(f"increase({series(owner, PREEMPTIONS, '15m')})")
    finished = total(f"increase({series(owner, REQUESTS_FINISHED, '15m')})", "finished_reason")
    yield Alert(
        "MillstreamPreemptions",
        "warning",
        f"100 * {preempted} > {PREEMPTIONS_PERCENT} * {finished}",
        900,
        f"more than {PREEMPTIONS_PERCENT} of 100 requests lose their place in the batch and are computed again",
        "The KV cache is too small for this many requests at once: lower engine.maxNumSeqs, or add replicas.",
    )


def _heartbeats(owner: LLMDeployment) -> Iterator[Alert]:
    interval = duration.seconds(_warmup(owner).heartbeat_interval or DEFAULT_HEARTBEAT_INTERVAL)
    if interval == 0:  # switched off: an idle replica then rightly does nothing
        return
    oldest = max(HEARTBEAT_FLOOR_SECONDS, MISSED_HEARTBEATS * interval)
    yield Alert(
        "MillstreamHeartbeatLate",
        "warning",
        f"{per_pod(series(owner, HEARTBEAT_AGE_SECONDS))} > {oldest}",
        60,
        "the engine of pod {{ $labels.pod }} has completed no step for too long",
        "The engine hangs, or the GPU or CPU is taken by another process. The kubelet restarts a pod that is dead; "
        "delete this one if it is not.",
    )


def _speculation(owner: LLMDeployment) -> Iterator[Alert]:
    """Where Auto chose none, the pods have no such metric, and nothing fires."""
    method = (owner.spec.speculation or Speculation()).method
    if method is SpeculationMethod.DISABLED:
        return
    # The cluster cannot tune a head.
    is_head = method in HEAD_METHODS
    other = "name another draft head" if is_head else "tune the draft"
    checks, accepted = (total(f"increase({series(owner, metric, '1h')})") for metric in (DRAFT_CHECKS, DRAFTS_ACCEPTED))
    stopped = series(owner, DECODES_WITHOUT_DRAFTS, "1h", reason="no_gain|drafter_failed")
    undrafted = total(f"increase({stopped})", "reason")
    yield Alert(
        "MillstreamDraftAcceptanceLow",
        "info",
        f"{checks} > {LEAST_CHECKS_PER_HOUR} and {checks} > {undrafted} and "
        f"100 * {accepted} < {ACCEPTED_PER_CHECK_PERCENT} * {checks}",
        3600,
        "drafts are checked, and hardly any stands: speculation costs more than it gains",
        f"speculation.governor.mode Enforce stops such checks. Or {other}, or take speculation.method Disabled.",
    )
    yield Alert(
        "MillstreamSpeculationOff",
        "info",
        f"{undrafted} > {LEAST_CHECKS_PER_HOUR} and {undrafted} > {UNDRAFTED_PER_CHECK} * {checks}",
        6 * 3600,
        "nothing was drafted for six hours, since it gains nothing or the drafter failed",
        f"{'Name another draft head' if is_head else 'Tune the draft on this traffic, name another'}, or take "
        "speculation.method Disabled, which frees its memory.",
    )
