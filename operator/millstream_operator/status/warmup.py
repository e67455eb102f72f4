"""`status.warmup`: where the slowest pod of the wanted revision is, and when it will be ready. Pure.

    Scheduling -> Downloading -> Starting -> LoadingWeights -> SizingKVCache -> WarmingUp -> Ready
    └ the pod's own conditions ┘            └──────────── the runtime's /ready ────────────┘

The time is absolute, so that waiting changes nothing, and is rewritten only when it moves by more than a fifth of what
remains. A pod that is restarted again and again keeps the furthest phase that it reached: its reason changes the
status, its restarts do not.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from millstream_operator.diagnosis import pod_facts
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.probing.boot_report import READY, RUNTIME_PHASES, STARTING, PodReport
from millstream_operator.status.observation import Observation

Manifest = dict[str, Any]

SCHEDULING, DOWNLOADING = "Scheduling", "Downloading"
PHASES = (SCHEDULING, DOWNLOADING, *RUNTIME_PHASES, READY)
MOVED_SHARE = 0.2
LEAST_MOVE_SECONDS = 5.0


def warming_up(observation: Observation) -> list[Manifest]:
    """The pods that run the wanted revision's runtime and are not ready yet."""
    return [pod for pod in loading(observation.own_pods) if _runs(pod_facts.runtime_status(pod))]


def loading(pods: Iterable[Manifest]) -> list[Manifest]:
    """The pods to ask for a report: they download a model or warm up. While they advance, they are not late."""
    return [
        pod
        for pod in pods
        if pod_facts.is_leader(pod)
        and not pod_facts.is_terminating(pod)
        and not pod_facts.is_ready(pod)
        and (any(map(_runs, _containers(pod))) or _is_in_between(pod))
    ]


def _containers(pod: Manifest) -> list[Manifest]:
    """The statuses of what a pod runs, in its order."""
    return [*pod_facts.download_statuses(pod), pod_facts.runtime_status(pod)]


def _is_in_between(pod: Manifest) -> bool:
    """A download is complete, and the kubelet has not started what comes next."""
    ended = (one.get("state", {}).get("terminated", {}) for one in pod_facts.download_statuses(pod))
    fetched = any(one.get("exitCode") == 0 for one in ended)
    waiting = pod_facts.runtime_status(pod).get("state", {}).get("waiting", {}).get("reason")
    return fetched and waiting in ("PodInitializing", "ContainerCreating")


def _runs(container: Mapping[str, Any]) -> bool:
    return "running" in container.get("state", {})


def warmup_status(observation: Observation, blocker: Diagnosis | None, now: str) -> Manifest | None:
    """Return the field as it is written; None where no pod is wanted or could be created."""
    before: Manifest = observation.previous.get("warmup") or {}
    took = _seconds_taken(observation, before)
    kept = {"seconds": took} if took is not None else {}
    if observation.owner.spec.replicas == 0 or observation.problem is not None:
        return kept or None
    phase = _phase(observation, before, blocker)
    if phase == READY or blocker is not None:
        return {"phase": phase} | kept
    expected = _expected(observation, took, now)
    time = _steady(before.get("estimatedReadyTime") if _is_same_rollout(observation) else None, expected, now)
    return {"phase": phase} | ({"estimatedReadyTime": time} if time else {}) | kept


def stalled(observation: Observation) -> Diagnosis | None:
    """A pod that answers and makes no progress, before the kubelet restarts it."""
    for pod in warming_up(observation):
        report = observation.reports.get(pod["metadata"].get("uid", ""))
        if report is not None and report.is_stalled:
            return Diagnosis(
                Reason.WARMUP_STALLED,
                f"The warm-up makes no progress in phase {report.boot.phase}; when warmup.timeout is over, the kubelet "
                "restarts the pod. Give it more CPU or a faster disk, or raise warmup.timeout if it only needs longer.",
            )
    return None


def last_phase(observation: Observation) -> str | None:
    """Where this rollout was seen last, of the runtime's own phases."""
    phase = (observation.previous.get("warmup") or {}).get("phase") if _is_same_rollout(observation) else None
    return phase if phase is not None and phase not in (SCHEDULING, DOWNLOADING, READY) else None


def _phase(observation: Observation, before: Mapping[str, Any], blocker: Diagnosis | None) -> str:
    if observation.rolled_out:
        return READY
    replicas = [one for one in observation.own_replicas if not one.is_terminating]
    living = [pod for one in replicas for pod in one.pods]
    phases = [_phase_of(pod, observation.reports) for pod in living]
    missing = sum(one.is_whole for one in replicas) < observation.owner.spec.replicas
    slowest = min([*phases, SCHEDULING] if missing else phases, key=_rank, default=SCHEDULING)
    known: str | None = before.get("phase")
    restarted = any(pod_facts.runtime_status(pod).get("restartCount", 0) for pod in living)
    if known is None or known == READY or not _is_same_rollout(observation) or not (restarted or blocker is not None):
        return slowest
    return max(known, slowest, key=_rank)


def _phase_of(pod: Manifest, reports: Mapping[str, PodReport]) -> str:
    if pod_facts.is_ready(pod):
        return READY
    if not pod_facts.is_scheduled(pod):
        return SCHEDULING
    if not pod_facts.init_containers_are_done(pod):
        return DOWNLOADING
    report = reports.get(pod["metadata"].get("uid", ""))
    if report is None or "running" not in pod_facts.runtime_status(pod).get("state", {}):
        return STARTING
    return report.boot.phase


def _rank(phase: str) -> float:
    return float(PHASES.index(phase)) if phase in PHASES else PHASES.index(READY) - 0.5


def _is_same_rollout(observation: Observation) -> bool:
    return bool(observation.previous.get("rollout", {}).get("updateRevision") == observation.revision.name)


def _seconds_taken(observation: Observation, before: Mapping[str, Any]) -> int | None:
    """What a warm-up took: measured once per revision, by the pod that answered; until then, what the last one took."""
    known: int | None = before.get("seconds")
    measured = observation.previous.get("rollout", {}).get("currentRevision") == observation.revision.name
    if (
        (known is not None and measured)
        or observation.is_rolled_back
        or observation.answer is None
        or observation.answer.boot is None
    ):
        return known
    return round(observation.answer.boot.total_seconds) or known


def _expected(observation: Observation, took: int | None, now: str) -> datetime.datetime | None:
    """When the last pod will be ready: by its own estimate, else by how long the last warm-up took."""
    expected = []
    for pod in warming_up(observation):
        report = observation.reports.get(pod["metadata"].get("uid", ""))
        started = pod_facts.parse_time(pod_facts.runtime_status(pod)["state"]["running"].get("startedAt"))
        looked = pod_facts.parse_time(now)
        if report is not None and report.boot.eta_seconds is not None and looked is not None:
            expected.append(looked + datetime.timedelta(seconds=report.boot.eta_seconds))
        elif took and started is not None:
            expected.append(started + datetime.timedelta(seconds=took))
    return max(expected, default=None)


def _steady(known: str | None, expected: datetime.datetime | None, now: str) -> str | None:
    """The time that the status has, unless it moved by more than a fifth of what remains."""
    before, looked = pod_facts.parse_time(known), pod_facts.parse_time(now)
    if expected is None or looked is None:
        return known if before is not None and looked is not None and before > looked else None
    remaining = max((expected - looked).total_seconds(), 0.0)
    allowed = max(MOVED_SHARE * remaining, LEAST_MOVE_SECONDS)
    if known is not None and before is not None and abs((expected - before).total_seconds()) <= allowed:
        return known
    return expected.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
