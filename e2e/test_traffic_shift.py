"""Traffic shifts in stages from a model in 16 bits to the same one in four; one restart of a candidate is no verdict.

Minutes: `make e2e-long`.
"""

from __future__ import annotations

from typing import Any

import pytest

from e2e.client_pod import OPEN_LOOP, traffic
from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import MODEL, boot_config, is_ready, llmd, pods, read, wait_ready
from e2e.durations import Durations
from e2e.node_volume import STORAGE_CLASS, node_volume
from e2e.release import Release
from e2e.test_quantization import dataset, decision, documents, gate

NAME = "shifted"
REPLICAS = 2
EVIDENCE_TIMEOUT = "5m"  # two cores with three pods and a client may be slower than the evidence needs
STAGE_SECONDS = 600.0
CACHE = {"cache": {"size": "1Gi", "storageClassName": STORAGE_CLASS}}
LOCAL = {"servedName": MODEL, "source": {"local": {"path": MODEL}}}
END_MODEL = "import os, signal; os.kill(1, signal.SIGTERM)"


def in_16_bits() -> Object:
    return llmd(NAME, model=LOCAL, replicas=REPLICAS, rollout={"strategy": "Availability"})


def quantized(method: str) -> Object:
    made = {"method": method, "calibration": dataset("calibration.jsonl"), "qualityGate": gate()}
    rollout = {"strategy": "Availability", "evidenceTimeout": EVIDENCE_TIMEOUT}
    return llmd(NAME, model=LOCAL | CACHE, replicas=REPLICAS, rollout=rollout, quantization=made)


def journal(deployment: Object) -> list[str]:
    """The types of the decisions, oldest first."""
    return [one["type"] for one in reversed(deployment["status"].get("decisions") or [])]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_traffic_shifts_in_stages_to_a_quantized_model_and_a_candidate_survives_a_restart(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    seen: list[int] = []  # pods of the new model

    def model_of(pod: Object) -> Any:
        return boot_config(cluster, namespace, pod["spec"])["model"]

    def ready_with(prefix: str) -> list[Object]:
        """The pods that are ready and load a folder with this beginning."""
        found = [pod for pod in pods(cluster, namespace, NAME) if model_of(pod).startswith(prefix)]
        return [pod for pod in found if all(one["ready"] for one in pod["status"].get("containerStatuses") or [{}])]

    def look(prefix: str) -> Object:
        seen.append(len(ready_with(prefix)))
        return read(cluster, namespace, NAME)

    cluster.apply(namespace, documents())
    cluster.apply(namespace, in_16_bits())
    wait_ready(cluster, namespace, NAME)
    with (
        node_volume(cluster, namespace, f"{NAME}-model-cache", release.runtime_image),
        traffic(cluster, namespace, NAME, release.operator_image, OPEN_LOOP) as requests,
    ):
        with durations.measure("16 bits -> AWQ made, gated, shifted in stages"):
            cluster.apply(namespace, quantized("AWQ"))
            shifted = eventually(
                lambda: look("/models/quantized/awq-"), is_ready, what="AWQ serves", timeout_seconds=4 * STAGE_SECONDS
            )
        assert journal(shifted)[-4:] == ["QualityGatePassed", "TrafficShiftStarted", "TrafficShifted", "TrafficShifted"]
        assert f"1, 2 of {REPLICAS} replicas" in decision(shifted, "TrafficShiftStarted")
        assert "errors in 0 of" in decision(shifted, "TrafficShifted")
        assert 1 in seen, "one pod of the new model came first"
        assert seen == sorted(seen)
        kept = {pod["metadata"]["uid"] for pod in pods(cluster, namespace, NAME)}

        with durations.measure("AWQ -> RTN, whose pod ends once under traffic -> back by the spec"):
            cluster.apply(namespace, quantized("RTN"))
            (worse,) = eventually(
                lambda: ready_with("/models/quantized/rtn-"),
                lambda found: len(found) == 1 and "TrafficShiftStarted" in journal(read(cluster, namespace, NAME))[-1:],
                what="one pod of the candidate",
                timeout_seconds=2 * STAGE_SECONDS,
            )
            end = (
                "exec",
                "-n",
                namespace,
                worse["metadata"]["name"],
                "-c",
                "runtime",
                "--",
                "python3",
                "-c",
                END_MODEL,
            )
            cluster.kubectl(*end)
            eventually(
                lambda: ready_with("/models/quantized/rtn-"),
                lambda found: any(one["status"]["containerStatuses"][0]["restartCount"] for one in found),
                what="the candidate serves again",
                timeout_seconds=STAGE_SECONDS,
            )
            shifting = read(cluster, namespace, NAME)
            assert shifting["status"]["rollout"]["phase"] == "Progressing", "one restart is no verdict"
            assert "of about" in shifting["status"]["rollout"]["evidence"]
            cluster.apply(namespace, quantized("AWQ"))
        eventually(
            lambda: {pod["metadata"]["uid"] for pod in pods(cluster, namespace, NAME)},
            lambda now: now == kept,
            what="only the pods of before",
        )
        assert not requests.lost(), requests.lost()[:5]
        cluster.kubectl("delete", "llmd", NAME, "-n", namespace, "--wait=true")
