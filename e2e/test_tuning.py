"""A draft is tuned in the cluster while it serves, and the tuned one replaces it once more of its drafts stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import MODEL, boot_config, condition, is_ready, llmd, pods, read, uid_and_restarts, wait_ready
from e2e.durations import Durations
from e2e.node_volume import STORAGE_CLASS, node_volume
from e2e.release import Release
from e2e.test_speculation import NAME, answer

CODE = Path(__file__).parent
PIECES, PIECE_CHARACTERS = 60, 600
DRAFT = "/models/demo-draft"
JOB_SECONDS = 1200.0  # a Job waits for the images, the volume and two noisy cores
FEW = {"steps": 30, "sequenceTokens": 96, "maxAnswerTokens": 32}


def documents() -> Object:
    """Code, which the draft has never seen: pieces of these tests. A line of the second file is no document."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(CODE.glob("*.py")))
    pieces = [text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)][:PIECES]
    lines = [json.dumps({"text": piece, "slice": "code"}) for piece in pieces]
    data = {"traffic.jsonl": "\n".join(lines), "broken.jsonl": "\n".join([*lines[:30], "no document"])}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "traffic"}, "data": data}


def pair(key: str) -> Object:
    """The demo model with its draft, which is tuned on a file of the ConfigMap."""
    cache = {"size": "1Gi", "storageClassName": STORAGE_CLASS}
    model = {"servedName": MODEL, "source": {"local": {"path": MODEL}}, "cache": cache}
    tuning = {"dataset": {"configMapRef": {"name": "traffic", "key": key}}, **FEW}
    speculation = {"draftModel": {"source": {"local": {"path": "demo-draft"}}}, "tuning": tuning}
    return llmd(NAME, model=model, speculation=speculation)


@pytest.mark.timeout(2700)
def test_a_draft_is_tuned_while_it_serves_and_the_better_one_is_rolled_out(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, documents())
    with node_volume(cluster, namespace, f"{NAME}-model-cache", release.runtime_image):
        cluster.apply(namespace, pair("broken.jsonl"))
        wait_ready(cluster, namespace, NAME)
        (before,) = pods(cluster, namespace, NAME)
        assert boot_config(cluster, namespace, before["spec"])["draft_model"] == DRAFT
        refused = eventually(
            lambda: condition(read(cluster, namespace, NAME), "DraftTuned"),
            lambda found: found.get("reason") == "InvalidConfig",
            what="the line refused",
            timeout_seconds=JOB_SECONDS,
        )
        assert "ine 31" in refused["message"]
        assert is_ready(read(cluster, namespace, NAME))
        said, _ = answer(cluster, namespace)

        with durations.measure("draft -> tuned, better, rolled out"):
            cluster.apply(namespace, pair("traffic.jsonl"))
            promoted = eventually(
                lambda: read(cluster, namespace, NAME),
                lambda one: condition(one, "DraftTuned").get("status") == "True" and is_ready(one),
                what="the tuned draft",
                timeout_seconds=JOB_SECONDS,
            )
            (after,) = pods(cluster, namespace, NAME)
        assert uid_and_restarts(after) != uid_and_restarts(before)
        tuned = boot_config(cluster, namespace, after["spec"])["draft_model"]
        assert tuned.startswith("/models/tuned/draft-")
        assert "code: " in condition(promoted, "DraftTuned")["message"]
        journal = [one["type"] for one in reversed(promoted["status"]["decisions"])]
        assert journal[-2:] == ["DraftTuningStarted", "TunedDraftPromoted"]
        assert answer(cluster, namespace)[0] == said, "another draft changes no token"
        eventually(lambda: cluster.items("jobs", "-n", namespace), lambda jobs: not jobs, what="no Job left")
        cluster.kubectl("delete", "llmd", NAME, "-n", namespace, "--wait=true")
