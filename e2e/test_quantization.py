"""A model is quantized in the cluster and judged before it serves; one that got worse never replaces what serves.

One is worse in one slice alone. The documents to judge by come late, the operator is killed while a Job judges, and the
pod that quantizes is evicted.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import MODEL, condition, is_ready, llmd, pods, read, uid_and_restarts, wait_ready
from e2e.durations import Durations
from e2e.node_volume import STORAGE_CLASS, node_volume
from e2e.release import ManagedRelease, Release
from e2e.shared_things import SharedThing

HELD_OUT = Path(__file__).resolve().parent.parent / "models" / "held_out.jsonl"
NAME = "quantized"
JOBS_SECONDS = 600.0  # a Job waits for the images, the volume and two noisy cores
# The small draft, which has seen no code, keeps them in chats (mean KL 0.3) and breaks them in code (mean KL 2).
LIMITS = {
    "maxMeanKL": "1",
    "maxP99KL": "3",
    "minTop1AgreementPercent": 50,
    "maxFlipPercent": 20,
    "maxPerplexityRatio": "2",
}


def documents() -> Object:
    """Every second chat to calibrate with; the others and all code to judge by."""
    lines = HELD_OUT.read_text(encoding="utf-8").splitlines()
    chats, code = ([line for line in lines if json.loads(line)["slice"] == name] for name in ("chat", "code"))
    data = {"calibration.jsonl": "\n".join(chats[::2]), "held_out.jsonl": "\n".join(chats[1::2] + code)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "documents"}, "data": data}


def dataset(key: str) -> Object:
    return {"configMapRef": {"name": "documents", "key": key}}


def gate(**fields: object) -> Object:
    return {"dataset": dataset("held_out.jsonl"), **LIMITS, **fields}


def worse() -> Object:
    """The small draft in the place of the model: it has the same vocabulary, and other answers."""
    model = {"servedName": MODEL, "source": {"local": {"path": "demo-draft"}}}
    return llmd(NAME, model=model, quantization={"qualityGate": gate(base={"local": {"path": MODEL}})})


def made() -> Object:
    cache = {"size": "1Gi", "storageClassName": STORAGE_CLASS}
    model = {"servedName": MODEL, "source": {"local": {"path": MODEL}}, "cache": cache}
    quantization = {"method": "AWQ", "calibration": dataset("calibration.jsonl"), "qualityGate": gate()}
    return llmd(NAME, model=model, quantization=quantization)


def decision(deployment: Object, kind: str) -> str:
    """The newest entry of a type in the journal."""
    return next((one["message"] for one in deployment["status"].get("decisions", []) if one["type"] == kind), "")


def bytes_of(message: str) -> list[float]:
    """The megabytes that a person reads in an entry of the journal."""
    return [float(number) for number in re.findall(r"([\d.]+) MB", message)]


def wait_for_pod_of_job(cluster: Cluster, namespace: str) -> str:
    """Wait until the container of a Job's pod runs; its name."""

    def running() -> list[str]:
        found = cluster.items("pods", "-n", namespace, "-l", "batch.kubernetes.io/job-name")
        return [pod["metadata"]["name"] for pod in found if pod["status"]["phase"] == "Running"]

    (name,) = eventually(running, lambda names: len(names) == 1, what="a Job's pod", timeout_seconds=JOBS_SECONDS)
    return name


def evict_pod_of_job(cluster: Cluster, namespace: str) -> None:
    """Evict the pod that quantizes, once its container runs, as `kubectl drain` does."""
    name = wait_for_pod_of_job(cluster, namespace)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
    cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


@pytest.mark.shared(SharedThing.OPERATOR)
@pytest.mark.timeout(1800)
def test_a_worse_model_is_refused_while_the_old_pod_serves_though_the_operator_is_killed_meanwhile(
    cluster: Cluster, managed_release: ManagedRelease, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd(NAME))
    wait_ready(cluster, namespace, NAME)
    (before,) = pods(cluster, namespace, NAME)

    cluster.apply(namespace, worse())
    missing = eventually(
        lambda: condition(read(cluster, namespace, NAME), "ModelReady"),
        lambda found: found.get("reason") == "InvalidConfig",
        what="the documents missed",
        timeout_seconds=JOBS_SECONDS,
    )
    assert "key held_out.jsonl of ConfigMap documents (quantization.qualityGate" in missing["message"]
    with durations.measure("documents there -> a worse model's QualityGateFailed"):
        cluster.apply(namespace, documents())
        wait_for_pod_of_job(cluster, namespace)
        managed_release.kill()
        refused = eventually(
            lambda: read(cluster, namespace, NAME),
            lambda one: condition(one, "ModelReady").get("reason") == "QualityGateFailed",
            what="QualityGateFailed",
            timeout_seconds=JOBS_SECONDS,
        )
    assert "code: mean_kl" in condition(refused, "ModelReady")["message"]
    assert "chat:" not in condition(refused, "ModelReady")["message"], "it is as good as the limits ask for in chats"
    assert condition(refused, "Available")["status"] == "True"
    (kept,) = pods(cluster, namespace, NAME)
    assert uid_and_restarts(kept) == uid_and_restarts(before)
    eventually(lambda: cluster.items("jobs", "-n", namespace), lambda jobs: not jobs, what="no Job left")


@pytest.mark.timeout(1800)
def test_a_quantized_model_is_made_gated_and_served_though_its_pod_is_evicted(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, documents(), llmd(NAME))
    wait_ready(cluster, namespace, NAME)
    with node_volume(cluster, namespace, f"{NAME}-model-cache", release.runtime_image):
        with durations.measure("16-bit source -> quantized, gated, Ready"):
            cluster.apply(namespace, made())
            evict_pod_of_job(cluster, namespace)
            ready = eventually(
                lambda: read(cluster, namespace, NAME), is_ready, what="Ready", timeout_seconds=JOBS_SECONDS
            )
        assert "The quality gate passed: chat: mean KL" in condition(ready, "ModelReady")["message"]
        assert ready["status"]["plan"]["quantization"] == "AWQ"
        measured, predicted = bytes_of(decision(ready, "ModelQuantized"))
        assert abs(predicted - measured) <= 0.01 * measured
        assert decision(ready, "QualityGatePassed")
        eventually(lambda: cluster.items("jobs", "-n", namespace), lambda jobs: not jobs, what="no Job left")
        cluster.kubectl("delete", "llmd", NAME, "-n", namespace, "--wait=true")
