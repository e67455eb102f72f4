"""The status: earned, complete, and never another one for the same world."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import parse
from millstream_operator.api.status import LLMDeploymentStatus
from millstream_operator.diagnosis.conditions import Condition, find, merged
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import NEEDS_A_PERSON, Reason
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.probing.answer import Answer
from millstream_operator.rendering.deployment import deployment as render_deployment
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import Revision, render_revision
from millstream_operator.rollout.workload import rolled_out
from millstream_operator.status.events import event_for
from millstream_operator.status.observation import Observation
from millstream_operator.status.status import status_of, status_of_invalid
from millstream_operator.workloads.deployments import DEPLOYMENTS
from tests.support.fake_cluster import pod_of
from tests.support.llmdeployments import deployment, full_manifest

Manifest = dict[str, Any]
NOW, LATER = "2025-01-01T00:00:00Z", "2025-01-01T00:05:00Z"
OLD_REVISION = "demo-0000000000"


def revision(owner: LLMDeployment) -> Revision:
    return render_revision(owner, plan_from_spec(owner, PlanDefaults("registry.example.com/runtime:1")), PodDefaults())


def workload(owner: LLMDeployment, *, available: int | None = None, **status: Any) -> Manifest:
    """The live Deployment; all replicas available unless given otherwise."""
    live = render_deployment(owner, revision(owner).template)
    count = owner.spec.replicas
    live["metadata"]["generation"] = 1
    live["status"] = {
        "observedGeneration": 1,
        "replicas": count,
        "updatedReplicas": count,
        "readyReplicas": count if available is None else available,
        "availableReplicas": count if available is None else available,
    } | status
    return live


def pod(owner: LLMDeployment, number: int = 0, *, ready: bool = True, **status: Any) -> Manifest:
    return pod_of(f"demo-{number}", revision(owner).template, ready=ready, **status)


def seen(owner: LLMDeployment | None = None, **fields: Any) -> Observation:
    owner = owner or deployment()
    known: dict[str, Any] = {"workload": workload(owner), "answer": Answer()}
    return Observation(owner, revision(owner), **(known | fields))


def condition(status: Manifest, kind: str) -> tuple[str, str] | None:
    found = find(status["conditions"], kind)
    return (found["status"], found["reason"]) if found else None


CRASHED: Manifest = {"containerStatuses": [{"name": "runtime", "state": {"terminated": {"exitCode": 1}}}]}
NO_WEIGHTS: Manifest = {
    "containerStatuses": [
        {
            "name": "runtime",
            "state": {"terminated": {"exitCode": 1, "message": '{"reason": "CheckpointInvalid", "message": "None."}'}},
        }
    ]
}
LATE = {"conditions": [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]}
QUOTA = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpu"}]}
SERVED_BEFORE = {"rollout": {"currentRevision": OLD_REVISION, "updateRevision": OLD_REVISION}}
ONE, NONE = deployment(), deployment(replicas=0)
UNANSWERED = Answer(Diagnosis(Reason.SERVICE_UNREACHABLE, "No answer."))
CONFLICT = Diagnosis(Reason.NAME_CONFLICT, "A Service named demo already exists.")

# name: (what is seen, Ready, Available, ModelReady, Reconciling or Stalled)
WORLDS: dict[str, tuple[Observation, str, str, str, str | None]] = {
    "it works": (seen(), "Ready", "Available", "Answering", None),
    "nothing there yet": (
        seen(workload=None, answer=None),
        "Starting",
        "NoReplicaAvailable",
        "NoReplicaAvailable",
        "Reconciling",
    ),
    "first pods start": (
        seen(workload=workload(ONE, available=0), pods=[pod(ONE, ready=False)], answer=None),
        "Starting",
        "NoReplicaAvailable",
        "NoReplicaAvailable",
        "Reconciling",
    ),
    "a change rolls out": (
        seen(workload=workload(ONE, updatedReplicas=0), answer=None, previous=SERVED_BEFORE),
        "RollingOut",
        "Available",
        "RollingOut",
        "Reconciling",
    ),
    "an old pod is left": (
        seen(workload=workload(ONE, replicas=2), answer=None, previous=SERVED_BEFORE),
        "RollingOut",
        "Available",
        "RollingOut",
        "Reconciling",
    ),
    "the controller has not looked yet": (
        seen(workload=workload(ONE, observedGeneration=0), answer=None, previous=SERVED_BEFORE),
        "RollingOut",
        "Available",
        "RollingOut",
        "Reconciling",
    ),
    "the model is being asked": (seen(answer=None), "AskingModel", "Available", "AskingModel", "Reconciling"),
    "the model does not answer": (
        seen(answer=UNANSWERED),
        "ServiceUnreachable",
        "Available",
        "ServiceUnreachable",
        "Reconciling",
    ),
    "a crash, to be tried again": (
        seen(workload=workload(ONE, available=0), pods=[pod(ONE, ready=False, **CRASHED)], answer=None),
        "RuntimeCrashed",
        "NoReplicaAvailable",
        "NoReplicaAvailable",
        "Reconciling",
    ),
    "no weights: a person is needed": (
        seen(workload=workload(ONE, available=0), pods=[pod(ONE, ready=False, **NO_WEIGHTS)], answer=None),
        "CheckpointInvalid",
        "NoReplicaAvailable",
        "NoReplicaAvailable",
        "Stalled",
    ),
    "too late": (
        seen(workload=workload(ONE, available=0, **LATE), answer=None),
        "ProgressDeadlineExceeded",
        "NoReplicaAvailable",
        "NoReplicaAvailable",
        "Stalled",
    ),
    "a crash, and too late": (
        seen(workload=workload(ONE, available=0, **LATE), pods=[pod(ONE, ready=False, **CRASHED)], answer=None),
        "RuntimeCrashed",
        "NoReplicaAvailable",
        "NoReplicaAvailable",
        "Stalled",
    ),
    "too late, said of an older rollout": (
        seen(workload=workload(ONE, available=0, observedGeneration=0, **LATE), answer=None),
        "Starting",
        "NoReplicaAvailable",
        "NoReplicaAvailable",
        "Reconciling",
    ),
    "pods cannot be made": (
        seen(workload=workload(ONE, available=0, **QUOTA), answer=None),
        "QuotaExceeded",
        "NoReplicaAvailable",
        "NoReplicaAvailable",
        "Reconciling",
    ),
    "a name is taken": (
        seen(workload=None, answer=None, problem=CONFLICT),
        "NameConflict",
        "NoReplicaAvailable",
        "NoReplicaAvailable",
        "Stalled",
    ),
    "nothing is wanted": (
        seen(NONE, workload=workload(NONE), answer=None),
        "ScaledToZero",
        "ScaledToZero",
        "ScaledToZero",
        None,
    ),
    "nothing is wanted, the last pod leaves": (
        seen(NONE, workload=workload(NONE, replicas=1), answer=None, previous=SERVED_BEFORE),
        "RollingOut",
        "ScaledToZero",
        "ScaledToZero",
        "Reconciling",
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_what_is_seen_is_what_is_told(name: str) -> None:
    world, ready, available, model_ready, way = WORLDS[name]
    status = status_of(world, NOW)
    found = {kind: condition(status, kind) for kind in ("Ready", "Available", "ModelReady")}
    assert [(pair or ("", ""))[1] for pair in found.values()] == [ready, available, model_ready]
    assert (found["Ready"] or ("",))[0] == ("True" if ready in ("Ready", "ScaledToZero") else "False")
    assert [kind for kind in ("Reconciling", "Stalled") if condition(status, kind)] == ([way] if way else [])


@pytest.mark.parametrize("name", WORLDS)
def test_kstatus_and_kubectl_wait_understand_it(name: str) -> None:
    """https://github.com/kubernetes-sigs/cli-utils/tree/master/pkg/kstatus: abnormal-true, and never both."""
    status = status_of(WORLDS[name][0], NOW)
    kinds = [one["type"] for one in status["conditions"]]
    assert len(kinds) == len(set(kinds)), "a list-map keyed by type"
    assert not {"Reconciling", "Stalled"} <= set(kinds)
    assert kinds[0] == "Ready"
    for one in status["conditions"]:
        assert one["observedGeneration"] == status["observedGeneration"] == 1
        assert one["message"]
        if one["type"] in ("Reconciling", "Stalled", "NameConflict"):
            assert one["status"] == "True", "there only while true"
    if (condition(status, "Ready") or ("",))[0] == "True":
        assert not {"Reconciling", "Stalled", "NameConflict"} & set(kinds)


@pytest.mark.parametrize("name", WORLDS)
def test_every_status_fits_its_own_schema(name: str) -> None:
    LLMDeploymentStatus.model_validate(status_of(WORLDS[name][0], NOW), strict=False)


@pytest.mark.parametrize("name", WORLDS)
def test_a_second_look_at_the_same_world_says_the_same(name: str) -> None:
    """Writing the status wakes the operator: any difference, and it would never rest."""
    world = WORLDS[name][0]
    first = status_of(world, NOW)
    again = Observation(
        world.owner, world.revision, world.workload, world.pods, world.answer, world.problem,
        previous=first | {"rollout": {**world.previous.get("rollout", {}), **first["rollout"]}},
    )  # fmt: skip
    assert status_of(again, LATER) == first


def test_a_transition_time_moves_with_the_status_and_not_with_the_reason() -> None:
    first = status_of(seen(answer=None), NOW)
    still = status_of(seen(answer=UNANSWERED, previous=first), LATER)
    assert find(still["conditions"], "Ready")["lastTransitionTime"] == NOW
    ready = status_of(seen(previous=still), LATER)
    assert find(ready["conditions"], "Ready")["lastTransitionTime"] == LATER
    assert find(ready["conditions"], "Planned")["lastTransitionTime"] == NOW


def test_counts_that_change_by_themselves_change_no_message() -> None:
    def merged_with(text: str, previous: list[Manifest]) -> list[Manifest]:
        return merged(previous, [Condition("Ready", False, Reason.UNSCHEDULABLE, text)], 1, NOW)

    first = merged_with("No node takes the pod: 0/3 nodes are available.", [])
    assert merged_with("No node takes the pod: 0/4 nodes are available.", first) == first
    assert merged_with("No node takes the pod: a taint.", first) != first
    progress = [Condition("Ready", False, Reason.STARTING, f"{n} of 2 replicas available.") for n in (0, 1)]
    before = merged([], progress[:1], 1, NOW)
    assert merged(before, progress[1:], 1, NOW) != before, "progress is news"


def test_an_unknown_status_is_unknown_and_not_false() -> None:
    assert condition(status_of(seen(answer=None), NOW), "ModelReady") == ("Unknown", "AskingModel")


def test_the_current_revision_is_the_last_one_that_answered() -> None:
    changing = status_of(seen(workload=workload(ONE, updatedReplicas=0), answer=None, previous=SERVED_BEFORE), NOW)
    assert (changing["rollout"]["currentRevision"], changing["rollout"]["updateRevision"]) == (
        OLD_REVISION,
        revision(ONE).name,
    )
    done = status_of(seen(previous=changing), NOW)
    assert done["rollout"]["currentRevision"] == done["rollout"]["updateRevision"] == revision(ONE).name
    assert "currentRevision" not in status_of(seen(workload=None, answer=None), NOW)["rollout"]


def test_an_old_revisions_failing_pod_is_not_the_new_ones_fault() -> None:
    old = pod(ONE, ready=False, **NO_WEIGHTS)
    old["metadata"]["labels"]["millstream.dev/revision"] = "old"
    status = status_of(seen(workload=workload(ONE, replicas=2, updatedReplicas=1), pods=[old], answer=None), NOW)
    assert (condition(status, "Ready") or ("", ""))[1] == "Starting"


def test_pods_of_another_revision_do_not_make_it_rolled_out() -> None:
    live = workload(ONE)
    live["spec"]["template"]["metadata"]["labels"]["millstream.dev/revision"] = "old"
    assert rolled_out(ONE, revision(ONE), DEPLOYMENTS.read(workload(ONE)))
    assert not rolled_out(ONE, revision(ONE), DEPLOYMENTS.read(live))
    assert not rolled_out(ONE, revision(ONE), None)


def test_the_status_names_model_plan_image_and_url() -> None:
    owner = parse(full_manifest())
    status = status_of(seen(owner), NOW)
    assert status["model"] == {"servedName": "chat"}
    assert status["runtime"] == {"image": "registry.example.com/millstream-runtime:1.0"}
    assert status["url"] == "http://demo.team.svc:8080"
    assert status["selector"] == "millstream.dev/deployment=demo,millstream.dev/role=leader"
    assert status["plan"]["engine"]["maxNumSeqs"] == 16
    assert status["plan"]["reasons"]


def test_an_invalid_spec_keeps_what_was_known_of_what_runs() -> None:
    before = status_of(seen(), NOW)
    problem = Diagnosis(Reason.INVALID_SPEC, "spec.replicas is -1.")
    after = status_of_invalid(before, 2, problem, LATER, state=DEPLOYMENTS.read(workload(ONE)))
    assert condition(after, "Ready") == condition(after, "Planned") == ("False", "InvalidSpec")
    assert condition(after, "Stalled") == ("True", "InvalidSpec")
    assert condition(after, "Available") == ("True", "Available")
    assert (after["observedGeneration"], after["plan"]) == (2, before["plan"])
    assert status_of_invalid(after, 2, problem, "2026-01-01T00:00:00Z", state=DEPLOYMENTS.read(workload(ONE))) == after
    died = status_of_invalid(after, 2, problem, LATER, state=DEPLOYMENTS.read(workload(ONE, available=0)))
    assert condition(died, "Available") == ("False", "NoReplicaAvailable"), "what serves is still watched"
    assert (died["replicas"], died["availableReplicas"]) == (1, 0)
    LLMDeploymentStatus.model_validate(after, strict=False)


# Events


def _event(before: Manifest, after: Manifest) -> Manifest | None:
    return event_for(ONE, before, after, NOW)


def test_news_is_an_event_and_steps_on_the_way_are_not() -> None:
    statuses = {name: status_of(world[0], NOW) for name, world in WORLDS.items()}
    event = _event({}, statuses["nothing there yet"])
    assert event is not None
    assert (event["type"], event["reason"]) == ("Normal", "Starting")
    assert event["involvedObject"]["name"] == "demo"
    assert _event(statuses["it works"], statuses["it works"]) is None
    assert _event(statuses["nothing there yet"], statuses["the model is being asked"]) is None


def test_bad_news_is_a_warning() -> None:
    works = status_of(WORLDS["it works"][0], NOW)
    for name in ("no weights: a person is needed", "a crash, to be tried again", "the model does not answer"):
        for before in ({}, works):
            event = _event(before, status_of(WORLDS[name][0], NOW))
            assert event is not None
            assert event["type"] == "Warning", name
    recovered = _event(status_of(WORLDS["the model does not answer"][0], NOW), works)
    assert recovered is not None
    assert recovered["type"] == "Normal"


def test_an_event_fits_the_apis_limit() -> None:
    long = copy.deepcopy(status_of(WORLDS["the model does not answer"][0], NOW))
    long["conditions"][0]["message"] = "x" * 4096
    event = _event({}, long)
    assert event is not None
    assert len(event["message"]) <= 1024


def test_only_what_no_retry_mends_needs_a_person() -> None:
    may_pass = {Reason.IMAGE_PULL_FAILED, Reason.INSUFFICIENT_GPU, Reason.UNSCHEDULABLE, Reason.QUOTA_EXCEEDED}
    assert not NEEDS_A_PERSON & may_pass
    assert len(set(itertools.chain(Reason))) == len(Reason)
