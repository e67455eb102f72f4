"""What the cluster does not let in is one reason, and a sentence that names who refuses and why."""

from __future__ import annotations

import pytest

from millstream_operator.diagnosis.admission import NOT_JUDGED_YET, admission_refusal, pods_not_created
from millstream_operator.diagnosis.reasons import NEEDS_A_PERSON, Reason

# name: (message of ReplicaFailure, reason, words)
REFUSED: dict[str, tuple[str, Reason, str]] = {
    "quota": (
        'pods "demo-1-x" is forbidden: exceeded quota: gpus, requested: pods=1,requests.nvidia.com/gpu=4, used: '
        "pods=3,requests.nvidia.com/gpu=0, limited: pods=3,requests.nvidia.com/gpu=2",
        Reason.QUOTA_EXCEEDED,
        "The ResourceQuota gpus does not allow the pods (pods: 1 more requested, 3 of 3 used; "
        "requests.nvidia.com/gpu: 4 more requested, 0 of 2 used).",
    ),
    "quota in other words": ("exceeded quota: gpus", Reason.QUOTA_EXCEEDED, "does not allow the pods: exceeded"),
    "quota that wants limits": (
        'pods "demo-1-x" is forbidden: failed quota: cpus: must specify limits.cpu for: runtime',
        Reason.ADMISSION_DENIED,
        "The ResourceQuota cpus admits only pods that specify limits.cpu for: runtime: set it in spec.podTemplate.",
    ),
    "Pod Security": (
        'pods "demo-1-x" is forbidden: violates PodSecurity "restricted:latest": unrestricted capabilities',
        Reason.ADMISSION_DENIED,
        "The namespace's Pod Security level restricted:latest does not admit the pods: unrestricted capabilities.",
    ),
    "policy": (
        "pods \"demo-1-x\" is forbidden: ValidatingAdmissionPolicy 'owners' with binding 'all' denied request: "
        "no owner",
        Reason.ADMISSION_DENIED,
        "The ValidatingAdmissionPolicy owners (binding all) denies the pods: no owner.",
    ),
    "policy without a binding": (
        "pods \"demo-1-x\" is forbidden: ValidatingAdmissionPolicy 'owners' denied request: "
        "failed to configure policy: x",
        Reason.ADMISSION_DENIED,
        "The ValidatingAdmissionPolicy owners denies the pods: failed to configure policy: x.",
    ),
    "webhook": (
        'admission webhook "images.example.com" denied the request: unsigned image',
        Reason.ADMISSION_DENIED,
        "The admission webhook images.example.com denies the pods: unsigned image.",
    ),
    "webhook without a word": (
        'admission webhook "images.example.com" denied the request without explanation',
        Reason.ADMISSION_DENIED,
        "denies the pods: without a reason.",
    ),
    "webhook away": (
        'Internal error occurred: failed calling webhook "images.example.com": failed to call webhook: '
        "connection refused",
        Reason.ADMISSION_UNAVAILABLE,
        "does not answer: failed to call webhook: connection refused.",
    ),
    "LimitRange": (
        'pods "demo-1-x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 4Gi',
        Reason.ADMISSION_DENIED,
        "A LimitRange of the namespace does not admit the pods: maximum memory usage per Container is 1Gi, but limit "
        "is 4Gi.",
    ),
    "something else": ("no PriorityClass with name high was found", Reason.ADMISSION_DENIED, "no PriorityClass"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_pods_are_reported_with_what_refuses_them(name: str) -> None:
    message, reason, words = REFUSED[name]
    found = pods_not_created(message)
    assert found is not None
    assert found.reason is reason
    assert words in found.message
    assert found == pods_not_created(message.replace("demo-1-x", "demo-1-y")), "the pod's name is another at each try"


def test_a_child_is_refused_in_the_same_words() -> None:
    found = admission_refusal(REFUSED["policy"][0], "Deployment demo")
    assert found is not None
    assert found.message == "The ValidatingAdmissionPolicy owners (binding all) denies the Deployment demo: no owner."


DENIED = "deployments.apps \"demo\" is forbidden: ValidatingAdmissionPolicy 'millstream-{0}' with binding '{0}' denied "


def test_a_refusal_by_the_charts_own_policy_is_in_the_users_words() -> None:
    said = "the namespace kube-system is closed to models; create the LLMDeployment in another one"
    found = admission_refusal(DENIED.format("children.policy.millstream.dev") + f"request: {said}", "Deployment demo")
    assert found is not None
    assert found.reason is Reason.ADMISSION_DENIED
    assert found.message == (
        f"Millstream's policy millstream-children.policy.millstream.dev does not admit the Deployment demo: {said}."
    )


@pytest.mark.parametrize("of", ["policy", "binding"])
def test_a_policy_of_the_chart_that_cannot_judge_yet_needs_no_person(of: str) -> None:
    """As in the first minute, when the API server does not know the CRD."""
    said = f"request: failed to configure {of}: no params found for policy binding with `Deny`"
    found = admission_refusal(DENIED.format("namespaces.policy.millstream.dev") + said, "Deployment demo")
    assert found is not None
    assert found.reason is Reason.ADMISSION_UNAVAILABLE
    assert found.cause == NOT_JUDGED_YET
    assert "admissionPolicy.requireLLMDeployment" in found.message, "what an administrator can do if it stays"
    of_others = admission_refusal(DENIED.format("others.example.com") + said, "Deployment demo")
    assert of_others is not None
    assert (of_others.reason, of_others.cause) == (Reason.ADMISSION_DENIED, "")


def test_what_is_no_admission_is_not_taken_for_one() -> None:
    assert admission_refusal('Operation cannot be fulfilled on resourcequotas "gpus"', "Deployment demo") is None
    assert admission_refusal("spec.replicas: Invalid value", "Deployment demo") is None


def test_our_own_missing_service_account_passes_in_a_moment() -> None:
    assert pods_not_created("error looking up service account team/demo: serviceaccount not found") is None


def test_a_webhook_that_is_away_needs_no_person_and_a_denial_does() -> None:
    assert Reason.ADMISSION_DENIED in NEEDS_A_PERSON
    assert Reason.ADMISSION_UNAVAILABLE not in NEEDS_A_PERSON
