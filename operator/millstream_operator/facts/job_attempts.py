"""Decide the next step of work that a Job does for a model, from its attempts and their pods. Pure.

    no Job ............................. start the first attempt
    the pod answered ................... the answer
    the pod, or the Job, failed ........ report the pod's own error; a new attempt after a delay
    under way .......................... report what it waits for; in a later attempt, why the last one failed

Attempts are Jobs. A failed one stays until the next has ended, so that a restart of the operator loses neither its
reason nor the number of attempts. Deleting it starts a new attempt at once.

A container that another party added (a mesh's proxy) may keep a Job running after our own container has failed. The
delay is then counted from the end of that container, and the Job, which holds what its pod asked for, is deleted as
soon as the next attempt exists.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.container_failures import (
    FETCH_MEMORY_FIX,
    KILLED,
    container_waits,
    diagnose_added_containers,
    is_own,
    runtime_report,
)
from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.pod_facts import Pod, condition, is_terminating, seconds_between
from millstream_operator.diagnosis.pod_failures import diagnose_node
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.diagnosis.scheduling import diagnose_scheduling
from millstream_operator.rendering.names import ATTEMPT_LABEL

Manifest = dict[str, Any]
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 10.0, 300.0
# A Job may be complete in the index before its pod is: their watches are two streams.
ANSWER_PATIENCE_SECONDS = 30.0
CONTAINERS = ("initContainers", "containers")


@dataclass(frozen=True, slots=True)
class JobWork:
    """What the attempts do. `what`: the subject of a sentence, such as "The inspection of the model".

    `read`: the answer in a termination message, or why there is none. `exit_codes`: those with which it answers.
    `memory_fix`: what to raise where the kernel killed it.
    """

    container: str
    what: str
    under_way: Diagnosis
    failure: Reason
    read: Callable[[str], Manifest | Diagnosis]
    exit_codes: frozenset[int] = frozenset({0})
    memory_fix: str = ""


@dataclass(frozen=True, slots=True)
class JobStep:
    """`answer`: to store. `start`: the attempt to begin. `problem`: why there is no answer yet."""

    answer: Manifest | None = None
    problem: Diagnosis | None = None
    start: int | None = None
    recheck_seconds: float | None = None
    to_delete: Sequence[Manifest] = field(default=())


@dataclass(frozen=True, slots=True)
class _Succeeded:
    answer: Manifest


@dataclass(frozen=True, slots=True)
class _Failed:
    """`seconds_ago`: None until the Job, or its own container, is known to have failed."""

    problem: Diagnosis
    seconds_ago: float | None


@dataclass(frozen=True, slots=True)
class _Pending:
    problem: Diagnosis | None
    recheck_seconds: float | None = None


def next_job_step(work: JobWork, jobs: Sequence[Manifest], pods: Sequence[Manifest], now: str) -> JobStep:
    """Return the next step. `jobs`: the attempts at this work in its current form; `now` is RFC 3339."""
    attempts = sorted(jobs, key=attempt_of)
    if not attempts:
        return JobStep(problem=work.under_way, start=1)
    *earlier, newest = attempts
    outcome = _attempt_state(work, newest, pods, now)
    if isinstance(outcome, _Succeeded):
        return JobStep(answer=outcome.answer)
    if isinstance(outcome, _Pending):
        return _waiting(work, earlier, outcome, pods, now)
    if outcome.seconds_ago is None:
        return JobStep(problem=outcome.problem, to_delete=earlier)
    left = retry_seconds(attempt_of(newest)) - outcome.seconds_ago
    if left > 0:
        return JobStep(problem=outcome.problem, recheck_seconds=left, to_delete=earlier)
    return JobStep(problem=outcome.problem, start=attempt_of(newest) + 1, to_delete=earlier)


def _waiting(
    work: JobWork, earlier: Sequence[Manifest], newest: _Pending, pods: Sequence[Manifest], now: str
) -> JobStep:
    problem = newest.problem
    if problem is None and earlier:
        before = _attempt_state(work, earlier[-1], pods, now)
        problem = before.problem if isinstance(before, _Failed) else None
    # One that a sidecar keeps running holds what its pod asked for.
    num_kept = 1 if earlier and _has_ended(earlier[-1]) else 0
    to_delete = earlier[: len(earlier) - num_kept]
    return JobStep(problem=problem or work.under_way, recheck_seconds=newest.recheck_seconds, to_delete=to_delete)


def retry_seconds(attempt: int) -> float:
    """Return the seconds between the end of an attempt and the next: doubled each time, up to five minutes."""
    return float(min(FIRST_RETRY_SECONDS * 2 ** min(attempt - 1, 10), LONGEST_RETRY_SECONDS))


def attempt_of(job: Mapping[str, Any]) -> int:
    label = job["metadata"].get("labels", {}).get(ATTEMPT_LABEL, "")
    return int(label) if label.isdecimal() and len(label) < 10 else 1


def mounted_after(claim: Manifest, job: Manifest, pods: Sequence[Manifest]) -> bool:
    """Return whether a Job's pod started when this claim was there already, and not one of the same name before it.

    The Job's own time comes first: the API server's clock gives it, as the claim's, and a node's clock that of a pod.
    """
    made = _created(claim)
    started = [_time(one["status"]["startTime"]) for one in pods if _is_of(one, job) and _has_started(one)]
    return made <= _created(job) or all(made <= one for one in started)


def _attempt_state(work: JobWork, job: Manifest, pods: Sequence[Manifest], now: str) -> _Succeeded | _Failed | _Pending:
    """Return how one attempt ended, or its current state. Its pod has the most detail, so it comes first."""
    seconds_ago = _ended_seconds_ago(job, now)
    for pod in pods:
        if _is_of(pod, job) and (found := _ended(work, pod, seconds_ago, now)) is not None:
            return found
    reported = job.get("status", {}).get("conditions") or []
    job_conditions = {one["type"]: one for one in reported if one["status"] == "True"}
    diagnosed = next((one for pod in pods if _is_of(pod, job) and (one := _blocker(work, pod)) is not None), None)
    if failed := job_conditions.get("Failed"):
        if diagnosed is not None:  # an eviction, or what it waited for until its deadline
            return _Failed(diagnosed, seconds_ago)
        if failed.get("reason") == "BackoffLimitExceeded" and not any(_is_of(pod, job) for pod in pods):
            return _Failed(_deleted(work), seconds_ago)
        said = failed.get("message") or failed.get("reason") or "for an unknown reason"
        return _Failed(Diagnosis(work.failure, f"{work.what} failed: {said}."), seconds_ago)
    if "Complete" in job_conditions:
        left = ANSWER_PATIENCE_SECONDS - (seconds_ago or 0.0)
        if left > 0:
            return _Pending(None, left)
        of_what = f"{work.what[:1].lower()}{work.what[1:]}"
        lost = f"The result of {of_what} is lost: its pod was deleted before the operator read it."
        lost = f"{lost} Another attempt follows."
        return _Failed(Diagnosis(work.failure, lost), seconds_ago)
    return _Pending(diagnosed)


def _ended(work: JobWork, pod: Manifest, seconds_ago: float | None, now: str) -> _Succeeded | _Failed | None:
    """Return the result in a pod of which our own containers have ended; None while they run."""
    # One that keeps running is ended by the kubelet after the others, and that is no failure of the work.
    sidecars = {one["name"] for one in pod["spec"].get("initContainers") or () if one.get("restartPolicy") == "Always"}
    for init in pod.get("status", {}).get("initContainerStatuses") or []:
        ended = init.get("state", {}).get("terminated")
        if ended is not None and ended.get("exitCode") != 0 and init.get("name") not in sidecars:
            return _Failed(_failure(work, pod, ended, of_a_download=True), _since(seconds_ago, ended, now))
    ended = _container(work, pod).get("state", {}).get("terminated")
    if ended is None:
        return None
    if ended.get("exitCode") not in work.exit_codes:
        return _Failed(_failure(work, pod, ended), _since(seconds_ago, ended, now))
    answer = work.read(ended.get("message", ""))
    return _Failed(answer, _since(seconds_ago, ended, now)) if isinstance(answer, Diagnosis) else _Succeeded(answer)


def _since(seconds_ago: float | None, ended: Mapping[str, Any], now: str) -> float | None:
    """Return the seconds since the Job ended, or else since its own container did, by its node's clock and ours."""
    if seconds_ago is not None:
        return seconds_ago
    seconds = seconds_between(ended.get("finishedAt"), now)
    return max(0.0, seconds) if seconds is not None else None


def _failure(work: JobWork, pod: Pod, ended: Mapping[str, Any], *, of_a_download: bool = False) -> Diagnosis:
    """Return why a container failed, in its own words where it has some; then why its node ended it."""
    if (found := runtime_report(ended.get("message", "")) or diagnose_node(pod)) is not None:
        return found
    if ended.get("reason") == "OOMKilled" and work.memory_fix:
        which, fix = ("its download", FETCH_MEMORY_FIX) if of_a_download else ("it", work.memory_fix)
        return Diagnosis(
            Reason.OUT_OF_MEMORY, f"{work.what} was stopped: the kernel killed {which} at its memory limit.", fix
        )
    if ended.get("exitCode") in KILLED and (found := _stopped(work, pod)) is not None:
        return found
    return Diagnosis(work.failure, f"{work.what} ended with exit code {ended.get('exitCode')}.")


def _stopped(work: JobWork, pod: Pod) -> Diagnosis | None:
    """Return who ended a pod that would have gone on: an eviction, as of a drain, or a person."""
    disrupted = condition(pod, "DisruptionTarget")
    if disrupted.get("status") == "True":
        said = disrupted.get("message") or disrupted.get("reason") or ""
        return Diagnosis(Reason.EVICTED, sentence(f"{work.what} was stopped, because its pod was evicted: {said}"))
    return _deleted(work) if is_terminating(pod) else None


def _deleted(work: JobWork) -> Diagnosis:
    return Diagnosis(work.failure, f"{work.what} was stopped: its pod was deleted. Another attempt follows.")


def _blocker(work: JobWork, pod: Pod) -> Diagnosis | None:
    """Return why the pod does not run: its node, the scheduler, or what its downloads or its container wait for."""
    if (found := diagnose_node(pod) or diagnose_scheduling(pod)) is not None:
        return found
    spec = pod.get("spec", {})
    images = {one.get("name"): str(one.get("image", "")) for kind in CONTAINERS for one in spec.get(kind) or ()}
    downloads = pod.get("status", {}).get("initContainerStatuses") or ()
    init = [one for one in downloads if is_own(one, work.container)]
    statuses = [*init, _container(work, pod)]
    waiting = (container_waits(one, images.get(one.get("name"), "")) for one in statuses)
    if (found := next((one for one in waiting if one is not None), None)) is not None:
        return found
    is_running = "running" in _container(work, pod).get("state", {})
    return None if is_running else diagnose_added_containers(pod, work.container)


def _container(work: JobWork, pod: Pod) -> Manifest:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return next((one for one in statuses if one.get("name") == work.container), {})


def _is_of(pod: Manifest, job: Manifest) -> bool:
    references = pod["metadata"].get("ownerReferences") or ()
    return any(reference.get("uid") == job["metadata"].get("uid") for reference in references)


def _ended_seconds_ago(job: Manifest, now: str) -> float | None:
    """Return the seconds since the Job failed or completed, by its clock and ours; None while it runs."""
    job_conditions = job.get("status", {}).get("conditions") or ()
    for kind in ("Failed", "Complete"):
        found = conditions.find(job_conditions, kind)
        if found.get("status") == "True":
            return max(0.0, (_time(now) - _time(found.get("lastTransitionTime", now))).total_seconds())
    return None


def _has_ended(job: Manifest) -> bool:
    reported = job.get("status", {}).get("conditions") or ()
    return any(conditions.find(reported, kind).get("status") == "True" for kind in ("Failed", "Complete"))


def _created(manifest: Manifest) -> datetime.datetime:
    return _time(manifest["metadata"]["creationTimestamp"])


def _has_started(pod: Manifest) -> bool:
    return bool(pod.get("status", {}).get("startTime"))


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)
