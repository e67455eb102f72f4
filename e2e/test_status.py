"""The status on a real cluster: warm-up, conditions, `describe`, and each refusal by its one reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import condition, is_ready, llmd, pods, read, wait_ready
from e2e.kstatus import verdicts
from e2e.release import Release
from e2e.shared_things import LEFTOVER_LABEL, LEFTOVER_VALUE, SharedThing

# Slow enough to be looked at while it warms up.
SLOW = {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"cpu": "100m", "memory": "2Gi"}}
PHASES = ("Scheduling", "Starting", "LoadingWeights", "SizingKVCache", "WarmingUp", "Ready")
READY_REASON = '{.status.conditions[?(@.type=="Ready")].reason}'


def with_resources(name: str, resources: Object) -> Object:
    """As `llmd`, with other resources of the container."""
    return llmd(name, podTemplate={"spec": {"containers": [{"name": "runtime", "resources": resources}]}})


def wait_reason(cluster: Cluster, namespace: str, name: str, reason: str, timeout_seconds: float = 180.0) -> Object:
    """Wait until Ready has that reason."""
    return eventually(
        lambda: read(cluster, namespace, name),
        lambda now: condition(now, "Ready").get("reason") == reason,
        what=reason,
        timeout_seconds=timeout_seconds,
    )


def test_a_warm_up_is_told_by_its_phases_and_ends_in_ready(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    cluster.apply(namespace, with_resources("slow", SLOW))
    phases: list[str] = []

    def look() -> Object:
        now = read(cluster, namespace, "slow")
        phase = (now.get("status", {}).get("warmup") or {}).get("phase")
        if phase and phase not in phases:
            phases.append(phase)
        return now

    seen = eventually(look, is_ready, what="slow Ready", timeout_seconds=420)
    known = [phase for phase in phases if phase in PHASES]
    assert known == sorted(known, key=PHASES.index), "a warm-up goes forward"
    assert {"LoadingWeights", "SizingKVCache", "WarmingUp"} & set(phases), f"no pod was asked: {phases}"
    assert seen["status"]["warmup"]["seconds"] > 0, "the next warm-up is estimated by this one"
    for kind in ("PodsScheduled", "WarmedUp", "ModelReady", "Available"):
        assert condition(seen, kind)["status"] == "True"


def test_kubectl_wait_and_kstatus_read_a_served_model_right(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    cluster.apply(namespace, llmd("awaited"))
    wishes = ("condition=Ready", "condition=PodsScheduled", "jsonpath={.status.warmup.phase}=Ready")
    for wish in (*wishes, f"jsonpath={READY_REASON}=Ready"):
        cluster.kubectl("wait", "llmd/awaited", "-n", namespace, f"--for={wish}", "--timeout=180s")
    assert verdicts([read(cluster, namespace, "awaited")]) == ["Current"]
    cluster.kubectl("scale", "llmd/awaited", "-n", namespace, "--replicas=0")
    zero = f"--for=jsonpath={READY_REASON}=ScaledToZero"
    cluster.kubectl("wait", "llmd/awaited", "-n", namespace, zero, "--timeout=60s")


def test_describe_tells_a_healthy_and_a_failing_one_apart(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    missing = {"source": {"local": {"path": "no-such-model"}}}
    cluster.apply(namespace, llmd("healthy"), llmd("failing", model=missing))
    wait_ready(cluster, namespace, "healthy")
    wait_reason(cluster, namespace, "failing", "CheckpointInvalid")
    healthy = cluster.kubectl("describe", "llmd", "healthy", "-n", namespace)
    assert f"The model answers at http://healthy.{namespace}.svc." in healthy
    failing = eventually(
        lambda: cluster.kubectl("describe", "llmd", "failing", "-n", namespace),
        lambda observed: "CheckpointInvalid" in observed.split("Events:")[1],
        what="the news in the Events, too",
    )
    assert "no-such-model" in failing
    header, *rows = cluster.kubectl("get", "llmd", "-n", namespace).splitlines()
    assert header.split() == ["NAME", "READY", "REASON", "REPLICAS", "PLAN", "URL", "AGE"]
    assert {row.split()[0]: row.split()[1:3] for row in rows} == {
        "failing": ["False", "CheckpointInvalid"],
        "healthy": ["True", "Ready"],
    }
    assert verdicts([read(cluster, namespace, name) for name in ("healthy", "failing")]) == ["Current", "Failed"]


def test_what_no_node_has_is_named_with_the_number_of_nodes(cluster: Cluster, release: Release, namespace: str) -> None:
    cluster.apply(namespace, with_resources("huge", {"requests": {"cpu": "400"}, "limits": {"cpu": "400"}}))
    seen = wait_reason(cluster, namespace, "huge", "Unschedulable")
    assert "without 400 free CPU" in condition(seen, "Ready")["message"]
    assert condition(seen, "PodsScheduled")["reason"] == "Unschedulable"
    assert seen["status"]["warmup"]["phase"] == "Scheduling"
    assert verdicts([seen]) == ["InProgress"]


def test_a_claim_that_does_not_exist_is_named(cluster: Cluster, release: Release, namespace: str) -> None:
    source = {"source": {"persistentVolumeClaim": {"claimName": "weights", "path": "demo"}}}
    cluster.apply(namespace, llmd("unclaimed", model=source))
    seen = wait_reason(cluster, namespace, "unclaimed", "VolumePending")
    assert "The PersistentVolumeClaim weights does not exist" in condition(seen, "Ready")["message"]


def test_a_quota_is_told_with_what_is_asked_and_allowed_and_passes_by_itself(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    quota: Object = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "no-pods"}}
    cluster.apply(namespace, quota | {"spec": {"hard": {"pods": "0"}}})
    eventually(
        lambda: cluster.get("resourcequota", "no-pods", "-n", namespace),
        lambda now: "used" in now.get("status", {}),
        what="the quota in force",
    )
    cluster.apply(namespace, llmd("squeezed"))
    seen = wait_reason(cluster, namespace, "squeezed", "QuotaExceeded", timeout_seconds=180)
    said = "The ResourceQuota no-pods does not allow the pods (pods: 1 more requested, 0 of 0 used)"
    assert said in condition(seen, "Ready")["message"]
    assert condition(seen, "Stalled") == {}
    cluster.kubectl("delete", "resourcequota", "no-pods", "-n", namespace)
    wait_ready(cluster, namespace, "squeezed", timeout_seconds=400)  # the ReplicaSet controller backs off by itself


def policy_objects(name: str, namespace: str) -> tuple[Object, Object]:
    """A ValidatingAdmissionPolicy, with its binding, that lets only pods with the label `team` into the namespace."""
    rule: Object = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    base: Object = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "metadata": {"name": name, "labels": {LEFTOVER_LABEL: LEFTOVER_VALUE}},
    }
    expression = "has(object.metadata.labels) && 'team' in object.metadata.labels"
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "resourceRules": [rule],
        },
        "validations": [{"expression": expression, "message": "a pod needs the label team"}],
    }
    binding = {"policyName": name, "validationActions": ["Deny"]}
    return (
        base | {"kind": "ValidatingAdmissionPolicy", "spec": spec},
        base | {"kind": "ValidatingAdmissionPolicyBinding", "spec": binding},
    )


def harmless_pod() -> Object:
    """One that the namespace's Pod Security level admits, so that what denies it is the policy."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "probe", "image": "x", "securityContext": security}
    pod_security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": [container], "securityContext": pod_security}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec}


@pytest.mark.shared(SharedThing.ADMISSION_POLICIES)
def test_a_policy_that_denies_the_pods_is_named(
    cluster: Cluster, release: Release, namespace: str, request: pytest.FixtureRequest
) -> None:
    name = f"{namespace}-owners"
    kinds = ("validatingadmissionpolicybinding", "validatingadmissionpolicy")
    request.addfinalizer(lambda: [cluster.run("kubectl", "delete", kind, name, check=False) for kind in kinds])
    for manifest in policy_objects(name, namespace):
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    probe = ("kubectl", "create", "-f", "-", "-n", namespace, "--dry-run=server")
    eventually(  # the API server takes a policy up after a moment
        lambda: cluster.run(*probe, stdin=json.dumps(harmless_pod()), check=False).stderr,
        lambda said: name in said,
        what="the policy in force",
    )
    cluster.apply(namespace, llmd("denied"))
    seen = wait_reason(cluster, namespace, "denied", "AdmissionDenied")
    message = condition(seen, "Ready")["message"]
    assert f"The ValidatingAdmissionPolicy {name}" in message
    assert "a pod needs the label team" in message
    assert condition(seen, "Stalled")["reason"] == "AdmissionDenied"
    assert verdicts([seen]) == ["Failed"]


def restarts(cluster: Cluster, namespace: str, name: str) -> int:
    """Of the pod that was restarted most often."""
    observed = [one for pod in pods(cluster, namespace, name) for one in pod["status"].get("containerStatuses", ())]
    return max((one["restartCount"] for one in observed), default=0)


def test_a_crash_loop_is_told_once_and_not_at_every_round(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    """A limit that not even the process fits in: the kernel kills it, or the runtime says so itself."""
    tight = {"requests": {"cpu": "50m", "memory": "160Mi"}, "limits": {"memory": "160Mi"}}
    cluster.apply(namespace, with_resources("tight", tight))
    wait_reason(cluster, namespace, "tight", "OutOfMemory", timeout_seconds=120)

    observed: list[Object] = []

    def rounds() -> int:
        status = read(cluster, namespace, "tight")["status"]
        now = {"conditions": status["conditions"], "warmup": status["warmup"]}
        if not observed or observed[-1] != now:
            observed.append(now)
        return restarts(cluster, namespace, "tight")

    eventually(rounds, lambda count: count >= 1, what="a restart", timeout_seconds=120)
    observed.clear()
    eventually(rounds, lambda count: count >= 3, what="three restarts", timeout_seconds=180)
    assert all(one["conditions"] == observed[0]["conditions"] for one in observed)
    # Whether it comes as far as to say that it failed is up to the kernel; it is said once.
    assert len(observed) <= 2, observed


def test_another_managers_hold_on_a_child_is_taken_back(cluster: Cluster, release: Release, namespace: str) -> None:
    """Two field managers want the same field: ours wins, and neither spins."""
    cluster.apply(namespace, llmd("contested", replicas=0))
    eventually(lambda: cluster.find("service", "contested", "-n", namespace), bool, what="the Service")
    selector = cluster.get("service", "contested", "-n", namespace)["spec"]["selector"] | {"app": "theirs"}
    theirs: Object = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "contested"}}
    place = ["-n", namespace, "--server-side", "--force-conflicts", "--field-manager=somebody"]
    cluster.kubectl("apply", *place, "-f", "-", stdin=json.dumps(theirs | {"spec": {"selector": selector}}))
    eventually(
        lambda: cluster.get("service", "contested", "-n", namespace)["spec"]["selector"],
        lambda now: "app" not in now,
        what="our selector",
        timeout_seconds=180,
    )


def test_a_namespace_goes_with_everything_in_it(cluster: Cluster, release: Release, namespace: str) -> None:
    cluster.apply(namespace, llmd("doomed", replicas=0))
    eventually(lambda: cluster.find("service", "doomed", "-n", namespace), bool, what="the children")
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    found: Any = eventually(
        lambda: cluster.find("namespace", namespace),
        lambda now: now is None,
        what="the namespace gone, with no object created again in it",
        timeout_seconds=120,
    )
    assert found is None
