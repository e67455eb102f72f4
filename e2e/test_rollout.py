"""Rollouts on a real Deployment controller: by a surge without a lost request, in place, and back by themselves."""

from __future__ import annotations

import datetime
import time
import urllib.request
from typing import Any

import pytest

from e2e.client_pod import OPEN_LOOP, traffic
from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import condition, is_ready, llmd, pods, read, uid_and_restarts, wait_ready
from e2e.durations import Durations
from e2e.release import Release

ENGINE = {"maxModelLen": 1024, "maxNumSeqs": 4}
NO_MODEL = {"servedName": "demo-chat", "source": {"local": {"path": "no-such-model"}}}
QUIET_SECONDS = 10.0  # long enough for several turns of a loop that must not be there


def rollout(strategy: str) -> Object:
    return {"rollout": {"strategy": strategy, "drainTimeout": "30s"}}


def decisions(deployment: Object) -> list[str]:
    """Types, newest first."""
    return [entry["type"] for entry in (deployment.get("status") or {}).get("decisions") or []]


def every_pod(cluster: Cluster, namespace: str, name: str) -> list[Object]:
    """Those on their way out as well."""
    return cluster.items("pods", "-n", namespace, "-l", f"millstream.dev/deployment={name}")


def only_pod(cluster: Cluster, namespace: str, name: str) -> Object:
    (pod,) = eventually(
        lambda: pods(cluster, namespace, name), lambda found: len(found) == 1, what=f"one pod of {name}"
    )
    return pod


# A spec whose pods cannot get ready. An image that no registry has is the unit tests' business: here the node's mirror
# falls back to an address where no server listens, and a registry that is away may come back.
BAD_CHANGE: dict[str, Any] = {"model": NO_MODEL}


def test_availability_loses_no_request_of_an_open_loop(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd("surge", **rollout("Availability")))
    wait_ready(cluster, namespace, "surge")
    before = only_pod(cluster, namespace, "surge")["metadata"]["name"]
    with traffic(cluster, namespace, "surge", release.operator_image, OPEN_LOOP) as requests:
        with durations.measure("Availability: spec change -> Ready, under open-loop traffic"):
            cluster.apply(namespace, llmd("surge", engine=ENGINE, **rollout("Availability")))
            seen = eventually(
                lambda: read(cluster, namespace, "surge"),
                lambda now: is_ready(now) and now["metadata"]["generation"] == 2,
                what="generation 2 Ready",
                timeout_seconds=120,
            )
        eventually(
            lambda: cluster.find("pod", before, "-n", namespace), lambda pod: pod is None, what="the old pod gone"
        )
        requests.wait_for(20)
        answered, lost = requests.lines(), requests.lost()
    assert not lost
    assert {"ok", "ok stream"} <= set(answered)
    assert seen["status"]["rollout"]["strategy"] == "Availability"
    assert decisions(seen) == []


def test_a_bad_revision_stops_at_one_pod_and_the_old_one_serves_on(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd("stops", replicas=2, **rollout("Availability")))
    wait_ready(cluster, namespace, "stops")
    before = {pod["metadata"]["uid"] for pod in pods(cluster, namespace, "stops")}
    tried: set[str] = set()

    def look() -> Object:
        tried.update(pod["metadata"]["uid"] for pod in every_pod(cluster, namespace, "stops"))
        return read(cluster, namespace, "stops")

    with traffic(cluster, namespace, "stops", release.operator_image, OPEN_LOOP) as requests:
        with durations.measure("Availability: bad model path -> RolloutStopped in the journal"):
            cluster.apply(namespace, llmd("stops", replicas=2, **rollout("Availability"), **BAD_CHANGE))
            eventually(look, lambda now: "RolloutStopped" in decisions(now), what="the decision", timeout_seconds=90)
        end = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < end:
            seen = look()
        requests.wait_for(10)
        assert not requests.lost()
    assert len(tried - before) == 1, "one pod of the new revision, ever"
    assert before <= tried
    assert condition(seen, "Available")["status"] == "True"
    assert condition(seen, "Ready")["status"] == "False"
    assert seen["status"]["rollout"]["phase"] == "Stopped"
    assert decisions(seen).count("RolloutStopped") == 1
    cluster.apply(namespace, llmd("stops", replicas=2, **rollout("Availability")))
    wait_ready(cluster, namespace, "stops")
    eventually(
        lambda: {pod["metadata"]["uid"] for pod in every_pod(cluster, namespace, "stops")},
        lambda now: now == before,
        what="only the pods of before",
    )


def test_resource_aware_says_so_then_drains_then_replaces(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd("inplace", **rollout("ResourceAware")))
    wait_ready(cluster, namespace, "inplace")
    before = only_pod(cluster, namespace, "inplace")
    living: list[int] = []
    drained: list[datetime.datetime] = []

    def look() -> Object:
        found = every_pod(cluster, namespace, "inplace")
        living.append(sum(1 for pod in found if "deletionTimestamp" not in pod["metadata"]))
        for pod in found:
            if pod["metadata"]["uid"] == before["metadata"]["uid"] and "deletionTimestamp" in pod["metadata"]:
                grace = datetime.timedelta(seconds=pod["metadata"]["deletionGracePeriodSeconds"])
                drained.append(datetime.datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]) - grace)
        return read(cluster, namespace, "inplace")

    with durations.measure("ResourceAware: spec change -> Ready"):
        cluster.apply(namespace, llmd("inplace", engine=ENGINE, **rollout("ResourceAware")))
        seen = eventually(
            look,
            lambda now: is_ready(now) and now["metadata"]["generation"] == 2,
            what="generation 2 Ready",
            timeout_seconds=120,
        )
    assert max(living) == 1, "never a pod more than wanted"
    assert drained, "the old pod was drained"
    assert decisions(seen) == ["ReplacingInPlace"]
    decided_at = datetime.datetime.fromisoformat(seen["status"]["decisions"][0]["time"])
    assert decided_at <= min(drained)
    assert seen["status"]["rollout"] | {"currentRevision": "", "updateRevision": ""} == {
        "currentRevision": "",
        "updateRevision": "",
        "availableReplicas": 1,
        "strategy": "ResourceAware",
        "phase": "Complete",
    }
    reasons = {event["reason"] for event in cluster.items("events", "-n", namespace) if event["type"] == "Normal"}
    assert "ReplacingInPlace" in reasons


@pytest.mark.quick
def test_what_fails_in_place_is_rolled_back_and_the_old_spec_restarts_nothing(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd("back", **rollout("ResourceAware")))
    first = wait_ready(cluster, namespace, "back")
    with durations.measure("ResourceAware: bad model path -> rolled back, the old revision answers"):
        cluster.apply(namespace, llmd("back", **rollout("ResourceAware"), **BAD_CHANGE))
        seen = eventually(
            lambda: read(cluster, namespace, "back"),
            lambda now: (
                condition(now, "Ready").get("reason") == "RolledBack"
                and condition(now, "ModelReady").get("status") == "True"
            ),
            what="rolled back and answering",
            timeout_seconds=150,
        )
    assert condition(seen, "Available")["status"] == condition(seen, "Stalled")["status"] == "True"
    assert "no-such-model" in condition(seen, "Ready")["message"]
    assert decisions(seen) == ["RolledBack", "ReplacingInPlace"]
    assert seen["status"]["rollout"]["phase"] == "RolledBack"
    assert seen["status"]["rollout"]["currentRevision"] == first["status"]["rollout"]["currentRevision"]
    serving = uid_and_restarts(only_pod(cluster, namespace, "back"))
    generation = cluster.get("deployment", "back", "-n", namespace)["metadata"]["generation"]
    time.sleep(QUIET_SECONDS)
    assert cluster.get("deployment", "back", "-n", namespace)["metadata"]["generation"] == generation, "no loop"
    cluster.apply(namespace, llmd("back", **rollout("ResourceAware")))
    ready = wait_ready(cluster, namespace, "back", timeout_seconds=60)
    assert ready["status"]["rollout"]["phase"] == "Complete"
    assert uid_and_restarts(only_pod(cluster, namespace, "back")) == serving


def test_heartbeats_and_log_level_change_without_a_restart(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd("live", warmup={"heartbeatInterval": "45s"}))
    wait_ready(cluster, namespace, "live")
    before = uid_and_restarts(only_pod(cluster, namespace, "live"))
    generation = cluster.get("deployment", "live", "-n", namespace)["metadata"]["generation"]

    def metric(name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    with cluster.port_forward(namespace, "service/live", 80) as port:
        assert metric("millstream_heartbeat_interval_seconds") == 45
        with durations.measure("heartbeatInterval changed -> taken over by the running pod"):
            cluster.apply(namespace, llmd("live", warmup={"heartbeatInterval": "1s"}, runtime={"logLevel": "Debug"}))
            eventually(
                lambda: metric("millstream_heartbeat_interval_seconds"),
                lambda now: now == 1,
                what="a heartbeat a second",
                timeout_seconds=150,  # the kubelet looks at its ConfigMaps about once a minute
            )
        assert metric("millstream_live_config_bad") == 0
        eventually(lambda: metric("millstream_heartbeat_age_seconds"), lambda age: age < 3, what="beating")
    seen = wait_ready(cluster, namespace, "live")
    assert seen["status"]["observedGeneration"] == 2
    assert uid_and_restarts(only_pod(cluster, namespace, "live")) == before
    assert cluster.get("deployment", "live", "-n", namespace)["metadata"]["generation"] == generation
