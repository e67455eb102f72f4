"""Autoscaling on the real API server: /scale, its own HPA controller, and the real schemas of KEDA and Prometheus.

No adapter and no Prometheus run here, so the HPA is moved by its bounds, which it keeps without any metric.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import condition, is_ready, llmd, pods, read, uid_and_restarts, wait_ready
from e2e.durations import Durations
from e2e.optional_crds import FILES, optional_crds, remove
from e2e.release import ManagedRelease, Release
from e2e.shared_things import SharedThing
from e2e.stream_pod import streams

# The operator looks for kinds now and then, with jitter, and believes that one is gone when it was missing twice.
A_LOOK_SECONDS = 60.0
TWO_LOOKS_SECONDS = 90.0


def scale_of(cluster: Cluster, namespace: str, name: str) -> Object:
    path = f"/apis/millstream.dev/v1alpha1/namespaces/{namespace}/llmdeployments/{name}/scale"
    found: Object = json.loads(cluster.kubectl("get", "--raw", path))
    return found


def said(cluster: Cluster, namespace: str, name: str, kind: str) -> tuple[str, str]:
    found = condition(read(cluster, namespace, name), kind)
    return found.get("status", ""), found.get("reason", "")


def wait_said(
    cluster: Cluster, namespace: str, name: str, kind: str, wanted: tuple[str, str], timeout_seconds: float = 180.0
) -> None:
    eventually(
        lambda: said(cluster, namespace, name, kind),
        lambda now: now == wanted,
        what=f"{kind} {wanted}",
        timeout_seconds=timeout_seconds,
    )


def hpa_conditions(cluster: Cluster, namespace: str, name: str) -> dict[str, tuple[str, str]]:
    found = cluster.get("hpa", name, "-n", namespace)
    return {c["type"]: (c["status"], c["reason"]) for c in found.get("status", {}).get("conditions") or []}


def test_the_scale_subresource_says_what_autoscalers_read(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    cluster.apply(namespace, llmd("read"))
    wait_ready(cluster, namespace, "read")
    scale = scale_of(cluster, namespace, "read")
    assert scale["spec"] == {"replicas": 1}, "the server's default is there although it was not set"
    assert scale["status"]["replicas"] == 1
    found = cluster.items("pods", "-n", namespace, "-l", scale["status"]["selector"])
    assert [pod["metadata"]["name"] for pod in found] == [
        pod["metadata"]["name"] for pod in pods(cluster, namespace, "read")
    ]


def test_the_hpa_controller_scales_the_llmdeployment_and_says_what_it_lacks(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd("scaled", autoscaling={"maxReplicas": 3}))
    wait_ready(cluster, namespace, "scaled")
    seen = eventually(
        lambda: hpa_conditions(cluster, namespace, "scaled"),
        lambda now: "ScalingActive" in now,
        what="a word of the HPA controller",
        timeout_seconds=90,
    )
    assert seen["AbleToScale"][0] == "True", "it reads our /scale"
    assert seen["ScalingActive"] == ("False", "FailedGetPodsMetric"), "there is no adapter in this cluster"
    wait_said(cluster, namespace, "scaled", "Autoscaled", ("False", "MetricsUnavailable"))
    assert "custom metrics" in condition(read(cluster, namespace, "scaled"), "Autoscaled")["message"]
    assert is_ready(read(cluster, namespace, "scaled")), "what scales it does not make it unready"

    revisions = len(cluster.items("controllerrevision", "-n", namespace))
    with durations.measure("autoscaling.minReplicas 1 -> 2, both ready"):
        cluster.apply(namespace, llmd("scaled", autoscaling={"minReplicas": 2, "maxReplicas": 3}))
        eventually(
            lambda: read(cluster, namespace, "scaled"),
            lambda now: now["spec"]["replicas"] == 2 and now["status"].get("readyReplicas") == 2,
            what="two replicas, set by the HPA",
            timeout_seconds=180,
        )
    wait_ready(cluster, namespace, "scaled")
    assert len(cluster.items("controllerrevision", "-n", namespace)) == revisions, "no new plan"
    metadata = cluster.get("llmd", "scaled", "-n", namespace, "--show-managed-fields")["metadata"]
    managers = {
        entry["manager"]
        for entry in metadata["managedFields"]
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    }
    assert not any(manager.startswith("millstream") for manager in managers), f"the spec is not ours: {managers}"


def test_a_replica_that_is_scaled_away_cuts_no_stream(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd("drained", replicas=2))
    wait_ready(cluster, namespace, "drained")
    eventually(
        lambda: read(cluster, namespace, "drained")["status"].get("readyReplicas"), lambda n: n == 2, what="two ready"
    )
    with streams(cluster, namespace, "drained", release.operator_image, at_once=4) as open_streams:
        with durations.measure("scale 2 -> 1 under streams, the pod gone"):
            cluster.kubectl("scale", "llmd/drained", "-n", namespace, "--replicas=1")
            eventually(
                lambda: cluster.items("pods", "-n", namespace, "-l", "millstream.dev/deployment=drained"),
                lambda found: len(found) == 1,
                what="one pod left",
                timeout_seconds=150,
            )
        open_streams.wait_for(4)
        lost = [line for line in open_streams.ended() if line != "ok"]
    assert not lost


def test_somebody_elses_autoscaler_is_left_alone(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    target = {"apiVersion": "millstream.dev/v1alpha1", "kind": "LLMDeployment", "name": "taken"}
    theirs = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "taken"},
        "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 2},
    }
    cluster.apply(namespace, theirs)
    cluster.apply(namespace, llmd("taken", autoscaling={"maxReplicas": 7}))
    wait_said(cluster, namespace, "taken", "Autoscaled", ("False", "NameConflict"))
    wait_ready(cluster, namespace, "taken")
    assert cluster.get("hpa", "taken", "-n", namespace)["spec"]["maxReplicas"] == 2
    cluster.kubectl("delete", "hpa", "taken", "-n", namespace)
    eventually(
        lambda: cluster.find("hpa", "taken", "-n", namespace),
        lambda found: found is not None and found["spec"]["maxReplicas"] == 7,
        what="our own",
        timeout_seconds=90,  # such a conflict is looked at again every 30 seconds
    )


@pytest.fixture
def with_prometheus(managed_release: ManagedRelease) -> Iterator[None]:
    """Give the operator the address of Prometheus; undo it afterwards."""
    address = "monitoring.prometheusURL=http://prometheus.monitoring.svc:9090"
    managed_release.install(address, "monitoring.labels.release=e2e")
    yield
    managed_release.install()


def companions(cluster: Cluster, namespace: str, kinds: str) -> set[str]:
    return {item["kind"] for item in cluster.items(kinds, "-n", namespace)}


@pytest.mark.shared(SharedThing.RELEASE, SharedThing.CRDS)
@pytest.mark.timeout(600)
def test_kinds_of_other_projects_come_and_go(
    cluster: Cluster,
    release: Release,
    with_prometheus: None,
    warm_image: None,
    namespace: str,
    durations: Durations,
) -> None:
    monitoring = {"mode": "Auto", "labels": {"team": "search"}}
    cluster.apply(namespace, llmd("watched", autoscaling={"maxReplicas": 2}, monitoring=monitoring))
    wait_ready(cluster, namespace, "watched")
    wait_said(cluster, namespace, "watched", "Monitored", ("False", "MonitoringUnavailable"))
    assert companions(cluster, namespace, "hpa") == {"HorizontalPodAutoscaler"}
    (pod,) = pods(cluster, namespace, "watched")
    with optional_crds(cluster):
        with durations.measure("CRDs of KEDA and Prometheus installed -> their objects are there"):
            every = ",".join([*FILES, "horizontalpodautoscalers"])
            eventually(
                lambda: companions(cluster, namespace, every),
                lambda found: found == {"ScaledObject", "PodMonitor", "PrometheusRule"},
                what="a ScaledObject in place of the HPA, a PodMonitor and a PrometheusRule",
                timeout_seconds=A_LOOK_SECONDS,
            )
        wait_said(cluster, namespace, "watched", "Monitored", ("True", "Monitored"))
        monitor = cluster.get("podmonitor", "watched", "-n", namespace)
        assert {"release": "e2e", "team": "search"}.items() <= monitor["metadata"]["labels"].items()
        rule = cluster.get("prometheusrule", "watched", "-n", namespace)
        assert "MillstreamNoReadyReplica" in [one["alert"] for one in rule["spec"]["groups"][0]["rules"]]

        cluster.kubectl("delete", "podmonitor", "watched", "-n", namespace)
        with durations.measure("deleted PodMonitor is back"):
            eventually(
                lambda: cluster.find("podmonitor", "watched", "-n", namespace),
                lambda found: found is not None,
                what="the PodMonitor again",
                timeout_seconds=A_LOOK_SECONDS,
            )
        for name in FILES:
            remove(cluster, name)
        with durations.measure("CRDs deleted -> said, and an HPA again"):
            wait_said(cluster, namespace, "watched", "Monitored", ("False", "MonitoringUnavailable"), TWO_LOOKS_SECONDS)
            eventually(
                lambda: companions(cluster, namespace, "hpa"),
                lambda found: found == {"HorizontalPodAutoscaler"},
                what="an HPA again",
                timeout_seconds=TWO_LOOKS_SECONDS,
            )
    assert is_ready(read(cluster, namespace, "watched")), "nothing fails"
    (after,) = pods(cluster, namespace, "watched")
    assert after["metadata"]["uid"] == pod["metadata"]["uid"]
    decision_types = [one["type"] for one in read(cluster, namespace, "watched")["status"]["decisions"]]
    assert decision_types.count("AutoscalerChosen") == 3
    restarts = [uid_and_restarts(pod)[1] for pod in release.pods()]
    assert set(restarts) == {0}, "no operator restarted for it"


def test_the_operator_may_do_what_it_needs_and_no_more(cluster: Cluster, release: Release) -> None:
    account = f"system:serviceaccount:{release.namespace}:{release.name}"

    def may(verb: str, resource: str, subresource: str = "") -> bool:
        """Asked of the API server itself: kubectl knows no resource whose CRD is not there."""
        plural, _, group = resource.partition(".")
        asked = {"verb": verb, "resource": plural, "group": group, "subresource": subresource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": account, "groups": ["system:serviceaccounts"], "resourceAttributes": asked},
        }
        answer = cluster.kubectl("create", "-o", "json", "-f", "-", stdin=json.dumps(review))
        return bool(json.loads(answer)["status"]["allowed"])

    for resource in ("horizontalpodautoscalers.autoscaling", "scaledobjects.keda.sh", *list(FILES)[1:]):
        assert may("patch", resource), resource
        assert not may("update", resource), resource
        assert not may("deletecollection", resource), resource
    for verb, resource in (
        ("list", "customresourcedefinitions.apiextensions.k8s.io"),
        ("create", "triggerauthentications.keda.sh"),
        ("create", "servicemonitors.monitoring.coreos.com"),
    ):
        assert not may(verb, resource), f"{verb} {resource}"
    for verb in ("get", "update", "patch"):
        assert not may(verb, "llmdeployments.millstream.dev", "scale"), f"{verb} scale: that is the autoscaler's"
    assert may("patch", "llmdeployments.millstream.dev", "status"), "the question itself is understood"
