"""Two namespaces are compared by what matters: missing, spare and changed objects are reported, not chance."""

from __future__ import annotations

import copy
import json
from typing import Any

from tests.soak.snapshot import differences, of_namespace

Object = dict[str, Any]


def child(name: str = "demo", port: int = 80, namespace: str = "one", uid: str = "1") -> tuple[str, Object]:
    return "services", {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid,
            "resourceVersion": uid,
            "creationTimestamp": uid,
            "ownerReferences": [{"kind": "LLMDeployment", "name": "demo", "uid": uid}],
        },
        "spec": {"ports": [{"port": port}], "clusterIP": f"10.0.0.{uid}"},
        "status": {"loadBalancer": {"seen": uid}},
    }


def owner(namespace: str = "one", uid: str = "1") -> tuple[str, Object]:
    return "llmdeployments", {
        "metadata": {"name": "demo", "namespace": namespace, "uid": uid},
        "spec": {},
        "status": {
            "url": f"http://demo.{namespace}.svc",
            "rollout": {"updateRevision": "demo-b"},
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": uid}],
        },
    }


def test_what_differs_by_chance_is_not_told() -> None:
    first = of_namespace([child(), owner()])
    second = of_namespace([child(namespace="two", uid="2"), owner(namespace="two", uid="2")])
    assert differences(first, second) == []


def test_a_missing_a_spare_and_a_changed_object_are_told() -> None:
    expected = of_namespace([child(), child("other")])
    found = of_namespace([child(port=81), child("spare")])
    found_differences = differences(expected, found)
    assert "services/other is missing" in found_differences
    assert "services/spare should not be there" in found_differences
    assert any(line == "services/demo: .spec.ports[0].port is 81 and not 80" for line in found_differences)


def test_a_condition_that_differs_is_told() -> None:
    changed = copy.deepcopy(owner())
    changed[1]["status"]["conditions"][0]["status"] = "False"
    assert differences(of_namespace([owner()]), of_namespace([changed]))


def test_pods_are_counted_and_those_that_go_are_not() -> None:
    pod = ("pods", {"metadata": {"name": "demo-x", "namespace": "one"}})
    leaving = ("pods", {"metadata": {"name": "demo-y", "namespace": "one", "deletionTimestamp": "now"}})
    assert of_namespace([pod, leaving])["counted"] == {"pods": 1}
    assert differences(of_namespace([pod]), of_namespace([]))


def test_history_may_be_left_out_but_the_current_revision_never() -> None:
    def revision(name: str, number: int) -> tuple[str, Object]:
        return "controllerrevisions", {"metadata": {"name": name, "namespace": "one"}, "revision": number, "data": {}}

    fresh = of_namespace([owner(), revision("demo-b", 1)], history=False)
    used = of_namespace([owner(), revision("demo-b", 3), revision("demo-a", 2)], history=False)
    assert differences(fresh, used) == []
    assert differences(fresh, of_namespace([owner(), revision("demo-a", 1)], history=False))


def test_configurations_of_kept_records_are_history_and_the_one_that_runs_is_not() -> None:
    def boot(name: str) -> tuple[str, Object]:
        return "configmaps", {"metadata": {"name": name, "namespace": "one"}, "immutable": True, "data": {}}

    volume = {"projected": {"sources": [{"configMap": {"name": "demo-now"}}]}}
    template = {"spec": {"volumes": [volume]}}
    workload = "deployments", {"metadata": {"name": "demo", "namespace": "one"}, "spec": {"template": template}}
    fresh = of_namespace([workload, boot("demo-now")], history=False)
    assert differences(fresh, of_namespace([workload, boot("demo-now"), boot("demo-then")], history=False)) == []
    assert differences(fresh, of_namespace([workload, boot("demo-then")], history=False)) == [
        "configmaps/demo-now is missing"
    ]


def test_what_kubernetes_puts_everywhere_is_nobodys() -> None:
    default = ("serviceaccounts", {"metadata": {"name": "default", "namespace": "one"}})
    assert of_namespace([default]) == {"counted": {}}


def test_a_condition_that_only_one_has_is_named() -> None:
    more = copy.deepcopy(owner())
    more[1]["status"]["conditions"].insert(0, {"type": "PlanOutdated", "status": "True"})
    (found_differences,) = differences(of_namespace([owner()]), of_namespace([more]))
    assert found_differences.startswith("llmdeployments/demo: .status.conditions.PlanOutdated is {")


def test_the_probes_key_follows_from_the_uid_and_is_not_compared() -> None:
    def live(uid: str, level: str = "info") -> tuple[str, Object]:
        text = json.dumps({"log_level": level, "probe_key_digests": [uid]})
        metadata = {"name": "demo-live", "namespace": "one", "uid": uid}
        return "configmaps", {"metadata": metadata, "data": {"live.json": text}}

    assert differences(of_namespace([live("1")]), of_namespace([live("2")])) == []
    assert differences(of_namespace([live("1")]), of_namespace([live("1", "debug")])) != []


def test_what_a_record_was_announced_for_is_history() -> None:
    def record(**annotations: str) -> tuple[str, Object]:
        return "controllerrevisions", {"metadata": {"name": "demo-b", "namespace": "one", "annotations": annotations}}

    journaled = [owner(), record(**{"millstream.dev/journaled": "ReplacingInPlace"})]
    plain = [owner(), record(**{"millstream.dev/journaled": ""})]
    assert differences(of_namespace(plain), of_namespace(journaled)) != []
    assert differences(of_namespace(plain, history=False), of_namespace(journaled, history=False)) == []
