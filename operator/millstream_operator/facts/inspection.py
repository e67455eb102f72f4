"""Decide the next step of an inspection from its Jobs and their pods. Pure.

    no Job ............................. start the first attempt
    the pod answered ................... store the answer
    the pod, or the Job, failed ........ report the pod's own error; a new attempt after a delay
    under way .......................... report what it waits for; in a later attempt, why the last one failed

Attempts are Jobs. A failed one stays until the next has ended, so that a restart of the operator loses neither its
reason nor the number of attempts. Deleting it starts a new attempt at once.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.spec import Accelerator, AcceleratorType
from millstream_operator.api.workload import Workload
from millstream_operator.catalog.config_fields import ConfigError, UnsupportedModelError
from millstream_operator.catalog.inspected_model import UnknownAnswerError, read_answer, read_inspected
from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.container_failures import container_waits, runtime_report
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.pod_facts import Pod
from millstream_operator.diagnosis.pod_failures import diagnose_node
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.diagnosis.scheduling import diagnose_scheduling
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.requires import draft_source, source_kind
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.inspect_job import Subject
from millstream_operator.rendering.names import ATTEMPT_LABEL, INSPECT_CONTAINER
from millstream_runtime.config import CAPABILITIES, Capabilities

Manifest = dict[str, Any]
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 10.0, 300.0
# A Job may be complete in the index before its pod is: their watches are two streams.
ANSWER_PATIENCE_SECONDS = 30.0
# Requirements of a plan that facts alone can meet.
WANTS_FACTS = frozenset({"inventory", "modelShape", "configMapRef"})


@dataclass(frozen=True, slots=True)
class InspectionStep:
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
    """`seconds_ago`: None until the Job itself has failed."""

    problem: Diagnosis
    seconds_ago: float | None


@dataclass(frozen=True, slots=True)
class _Pending:
    problem: Diagnosis | None
    recheck_seconds: float | None = None


def subjects(owner: LLMDeployment, defaults: PlanDefaults, runtime: Capabilities = CAPABILITIES) -> dict[str, Subject]:
    """Return what must be inspected before a plan can be made: `model`, `draft`, both or nothing.

    Nothing is inspected for a plan that the runtime cannot run with any model, since it will be refused. A folder in
    the runtime image is inspected only where the plan depends on it: a small model on a CPU starts at once.
    """
    if set(plan_from_spec(owner, defaults, Facts(runtime=runtime)).requires) - WANTS_FACTS:
        return {}
    found: dict[str, Subject] = {}
    model, draft = owner.spec.model, draft_source(owner.spec)
    if model.config_map_ref is not None or source_kind(model.source) != "local" or _depends_on_the_model(owner):
        found["model"] = Subject(model.source, model.config_map_ref)
    if draft is not None and ("model" in found or source_kind(draft) != "local"):
        found["draft"] = Subject(draft)
    return found


def _depends_on_the_model(owner: LLMDeployment) -> bool:
    spec = owner.spec
    load = spec.workload or Workload()
    numbers = (load.input_tokens, load.output_tokens, load.requests_per_minute, load.concurrency)
    on_gpu = (spec.accelerator or Accelerator()).type is not AcceleratorType.CPU
    return on_gpu or spec.objectives is not None or spec.budget is not None or any(n is not None for n in numbers)


def next_step(subject: Subject, jobs: Sequence[Manifest], pods: Sequence[Manifest], now: str) -> InspectionStep:
    """Return the next step. `jobs`: the attempts at this subject in its current form; `now` is RFC 3339."""
    attempts = sorted(jobs, key=attempt_of)
    if not attempts:
        return InspectionStep(problem=Diagnosis(Reason.INSPECTING, f"Reading the model's shape: {subject}."), start=1)
    *earlier, newest = attempts
    outcome = _attempt_state(newest, pods, now)
    if isinstance(outcome, _Succeeded):
        return InspectionStep(answer=outcome.answer)
    if isinstance(outcome, _Pending):
        return _waiting(subject, earlier, outcome, pods, now)
    if outcome.seconds_ago is None:
        return InspectionStep(problem=outcome.problem, to_delete=earlier)
    left = retry_seconds(attempt_of(newest)) - outcome.seconds_ago
    if left > 0:
        return InspectionStep(problem=outcome.problem, recheck_seconds=left, to_delete=earlier)
    return InspectionStep(problem=outcome.problem, start=attempt_of(newest) + 1, to_delete=earlier)


def _waiting(
    subject: Subject, earlier: Sequence[Manifest], newest: _Pending, pods: Sequence[Manifest], now: str
) -> InspectionStep:
    problem = newest.problem
    if problem is None and earlier:
        before = _attempt_state(earlier[-1], pods, now)
        problem = before.problem if isinstance(before, _Failed) else None
    problem = problem or Diagnosis(Reason.INSPECTING, f"Reading the model's shape: {subject}.")
    return InspectionStep(problem=problem, recheck_seconds=newest.recheck_seconds, to_delete=earlier[:-1])


def retry_seconds(attempt: int) -> float:
    """Return the seconds between the end of an attempt and the next: doubled each time, up to five minutes."""
    return float(min(FIRST_RETRY_SECONDS * 2 ** min(attempt - 1, 10), LONGEST_RETRY_SECONDS))


def attempt_of(job: Mapping[str, Any]) -> int:
    label = job["metadata"].get("labels", {}).get(ATTEMPT_LABEL, "")
    return int(label) if label.isdecimal() and len(label) < 10 else 1


def _attempt_state(job: Manifest, pods: Sequence[Manifest], now: str) -> _Succeeded | _Failed | _Pending:
    """Return how one attempt ended, or its current state. Its pod has the most detail, so it comes first."""
    seconds_ago = _ended_seconds_ago(job, now)
    for pod in pods:
        if _is_of(pod, job) and (found := _ended(pod, seconds_ago)) is not None:
            return found
    reported = job.get("status", {}).get("conditions") or []
    job_conditions = {one["type"]: one for one in reported if one["status"] == "True"}
    diagnosed = next((one for pod in pods if _is_of(pod, job) and (one := _blocker(pod)) is not None), None)
    if failed := job_conditions.get("Failed"):
        if diagnosed is not None:  # an eviction, or what it waited for until its deadline
            return _Failed(diagnosed, seconds_ago)
        said = failed.get("message") or failed.get("reason") or "for an unknown reason"
        return _Failed(Diagnosis(Reason.DOWNLOAD_FAILED, f"The inspection of the model failed: {said}."), seconds_ago)
    if "Complete" in job_conditions:
        left = ANSWER_PATIENCE_SECONDS - (seconds_ago or 0.0)
        if left > 0:
            return _Pending(None, left)
        lost = "The result of the model's inspection is lost: its pod was deleted before the operator read it."
        return _Failed(Diagnosis(Reason.DOWNLOAD_FAILED, lost), seconds_ago)
    return _Pending(diagnosed)


def _ended(pod: Manifest, seconds_ago: float | None) -> _Succeeded | _Failed | None:
    """Return the result in a pod that has ended; None while it runs."""
    ended = _container(pod).get("state", {}).get("terminated")
    if ended is None:
        return None
    message = ended.get("message", "")
    if ended.get("exitCode") != 0:
        problem = runtime_report(message) or Diagnosis(
            Reason.DOWNLOAD_FAILED, f"The inspection of the model ended with exit code {ended.get('exitCode')}."
        )
        return _Failed(problem, seconds_ago)
    try:
        answer = read_answer(message)
        read_inspected(answer)
    except UnknownAnswerError as error:
        return _Failed(Diagnosis(Reason.INVALID_CONFIG, str(error)), seconds_ago)
    except UnsupportedModelError as error:
        return _Failed(Diagnosis(Reason.UNSUPPORTED_BY_RUNTIME, str(error)), seconds_ago)
    except ConfigError as error:
        return _Failed(Diagnosis(Reason.CHECKPOINT_INVALID, str(error)), seconds_ago)
    return _Succeeded(answer)


def _blocker(pod: Pod) -> Diagnosis | None:
    """Return why the pod does not run: its node, the scheduler, or what its container waits for."""
    containers = pod.get("spec", {}).get("containers") or []
    image = next((str(one.get("image", "")) for one in containers if one.get("name") == INSPECT_CONTAINER), "")
    return diagnose_node(pod) or diagnose_scheduling(pod) or container_waits(_container(pod), image)


def _container(pod: Pod) -> Manifest:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return next((one for one in statuses if one.get("name") == INSPECT_CONTAINER), {})


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


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)
