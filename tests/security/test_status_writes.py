"""Who may write an LLMDeployment writes no status of it, and a status that somebody has forged decides nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from millstream_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, world
from tests.support.helm_chart import of_kind, render
from tests.support.llmdeployments import manifest

ROOT = Path(__file__).resolve().parents[2]
Manifest = dict[str, Any]
FORGED: Manifest = {
    "observedGeneration": 1,
    "replicas": 7,
    "selector": "app=somebody-else",
    "conditions": [
        {
            "type": kind,
            "status": "True",
            "reason": "Answering",
            "message": "all is well",
            "observedGeneration": 1,
            "lastTransitionTime": "2024-01-01T00:00:00Z",
        }
        for kind in ("Ready", "Planned")
    ],
    "plan": {"image": "evil.example.com/runtime:1", "replicas": 7, "model": "another"},
    "rollout": {"phase": "Complete", "updateRevision": "demo-00000000"},
    "decisions": [{"type": "RolledBack", "reason": "forged", "time": "2024-01-01T00:00:00Z"}],
}


async def settled(stored: Manifest) -> FakeCluster:
    operator = FakeOperator(world(stored), later=lambda _key, _seconds: None)
    await operator.settle()
    return operator.cluster


async def test_a_forged_status_changes_no_pod_and_is_written_over() -> None:
    plain, forged = await settled(manifest()), await settled(manifest() | {"status": FORGED})
    for kind in (DEPLOYMENT, CONFIG_MAP):
        assert [one.get("spec", one.get("data")) for one in forged.all(kind)] == [
            one.get("spec", one.get("data")) for one in plain.all(kind)
        ]
    (found,) = (one["status"] for key, one in forged.objects.items() if key[0] == "LLMDeployment")
    (wanted,) = (one["status"] for key, one in plain.objects.items() if key[0] == "LLMDeployment")
    assert _by_type(found) == _by_type(wanted)
    for field in ("replicas", "selector"):
        assert found[field] == wanted[field], field
    assert wanted["rollout"].items() <= found["rollout"].items()
    assert "evil" not in str(forged.all(DEPLOYMENT))


def _by_type(status: Manifest) -> dict[str, Any]:
    """The conditions without their times: one that was True before keeps its own."""
    return {
        one["type"]: {key: value for key, value in one.items() if key != "lastTransitionTime"}
        for one in status["conditions"]
    }


def test_the_status_is_a_subresource_that_the_chart_gives_to_the_operator_alone() -> None:
    """So a write of the object leaves the status as it is, and needs another right than one of the status."""
    for path in (ROOT / "crds").glob("*.yaml"):
        (version,) = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)["spec"]["versions"]
        assert version["subresources"]["status"] == {}
    documents = render()
    writers = {
        role["metadata"]["name"]
        for kind in ("ClusterRole", "Role")
        for role in of_kind(documents, kind)
        for rule in role["rules"]
        if "llmdeployments/status" in rule["resources"] and {*rule["verbs"]} - {"get", "list", "watch"}
    }
    assert len(writers) == 1
    bound = [one for one in of_kind(documents, "ClusterRoleBinding") if one["roleRef"]["name"] in writers]
    assert [{subject["kind"] for subject in one["subjects"]} for one in bound] == [{"ServiceAccount"}]
    assert {subject["namespace"] for one in bound for subject in one["subjects"]} == {"system"}
