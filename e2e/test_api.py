"""What the API server serves: columns, descriptions, examples, and refusals that name the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import MODEL, Served, condition, llmd, read
from e2e.release import Release
from e2e.shared_things import SharedThing
from e2e.stored_objects import dry_run, is_applied, without_new_rules

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.yaml"))


def test_get_shows_the_columns(cluster: Cluster, served: Served) -> None:
    header, row = cluster.kubectl("get", "llmd", served.name, "-n", served.namespace).splitlines()
    assert header.split() == ["NAME", "READY", "REASON", "REPLICAS", "PLAN", "URL", "AGE"]
    assert row.split()[1:4] == ["True", "Ready", "1"]
    wide, _ = cluster.kubectl("get", "llmd", served.name, "-n", served.namespace, "-o", "wide").splitlines()
    assert {"MODEL", "AVAILABLE", "WARM-UP", "MESSAGE"} <= set(wide.split())


def test_every_field_is_explained(cluster: Cluster, release: Release) -> None:
    crd = cluster.get("crd", "llmdeployments.millstream.dev")
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    silent = [path for part in ("spec", "status") for path in undescribed(schema[part], part)]
    assert not silent
    shown = cluster.kubectl("explain", "llmd.spec", "--recursive")
    assert all(field in shown for field in ("servedName", "maxNumBatchedTokens", "heartbeatInterval", "podTemplate"))


def undescribed(schema: Object, path: str) -> Iterator[str]:
    if not schema.get("description"):
        yield path
    for name, child in schema.get("properties", {}).items():
        yield from undescribed(child, f"{path}.{name}")
    items = schema.get("items", {})
    for name, child in items.get("properties", {}).items():
        yield from undescribed(child, f"{path}[].{name}")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_accepted(cluster: Cluster, release: Release, namespace: str, example: Path) -> None:
    said = cluster.kubectl("apply", "-n", namespace, "--dry-run=server", "-f", str(example))
    assert "(server dry run)" in said


def with_spec(path: str, value: Any) -> Object:
    """A good LLMDeployment with one field changed; `path` is dotted."""
    deployment = copy.deepcopy(llmd("wrong"))
    *parents, last = path.split(".")
    place = deployment["spec"]
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return deployment


REFUSED = {
    "unknown field": (with_spec("engine.maxModelLength", 1024), "maxModelLength"),
    "wrong enum": (with_spec("accelerator.type", "TPU"), "spec.accelerator.type"),
    "negative": (with_spec("replicas", -1), "spec.replicas"),
    "wrong type": (with_spec("engine.maxNumSeqs", "many"), "spec.engine.maxNumSeqs"),
    "not a duration": (with_spec("warmup.timeout", "soon"), "spec.warmup.timeout"),
    "no source": (with_spec("model.source", {}), "spec.model.source"),
    "path that climbs": (with_spec("model.source.local.path", "../etc"), "spec.model.source.local.path"),
    "open to everyone": (with_spec("service.type", "NodePort"), "auth.apiKeysSecretRef"),
    "another HOME": (
        with_spec("podTemplate.spec.containers", [{"name": "runtime", "env": [{"name": "HOME", "value": "/root"}]}]),
        "HOME of podTemplate.spec.containers[].env",
    ),
    "name that no Service could have": (llmd("1-wrong"), "metadata.name"),
    "name too long": (llmd("w" * 53), "metadata.name"),
    "model missing": (
        {**llmd("wrong"), "spec": {"accelerator": {"type": "CPU"}}},
        "spec.model",
    ),
}


QUICK = ("unknown field", "open to everyone")  # the API server's own word, and a rule of ours


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.quick] if kind in QUICK else []) for kind in REFUSED]
)
def test_a_wrong_spec_is_refused_by_the_name_of_its_field(
    cluster: Cluster, release: Release, namespace: str, kind: str
) -> None:
    deployment, field = REFUSED[kind]
    said = cluster.refused("apply", "-n", namespace, "-f", "-", stdin=json.dumps(deployment))
    assert field in said or field.removeprefix("metadata.") in said, said
    assert not cluster.items("llmd", "-n", namespace)


def test_two_sources_are_refused(cluster: Cluster, release: Release, namespace: str) -> None:
    two = with_spec("model.source", {"local": {"path": MODEL}, "huggingFace": {"repository": "org/name"}})
    said = cluster.refused("apply", "-n", namespace, "-f", "-", stdin=json.dumps(two))
    assert "spec.model.source" in said


@pytest.mark.quick
def test_the_status_names_what_runs(cluster: Cluster, release: Release, served: Served) -> None:
    status = read(cluster, served.namespace, served.name)["status"]
    assert status["url"] == f"http://{served.name}.{served.namespace}.svc"
    assert status["runtime"]["image"] == release.runtime_image
    assert status["plan"]["tensorParallelSize"] == 1
    assert (status["replicas"], status["readyReplicas"]) == (1, 1)


def test_helm_test_passes(cluster: Cluster, release: Release) -> None:
    done = cluster.run("helm", "test", release.name, "-n", release.namespace, "--timeout", "120s")
    assert "Succeeded" in done.stdout


@pytest.mark.shared(SharedThing.CRDS)
def test_a_service_that_was_exposed_before_the_rule_is_scaled_and_edited(
    cluster: Cluster, release: Release, namespace: str
) -> None:
    """Stored while the CRD had no such rule, as by an earlier version: the rule holds for what is new alone."""
    exposed = with_spec("service.type", "NodePort")
    exposed["spec"]["replicas"] = 0
    with without_new_rules(cluster):
        eventually(lambda: is_applied(cluster, namespace, exposed), bool, what="stored without the rule")
    newer = exposed | {"metadata": {"name": "newer"}}
    eventually(
        lambda: "auth.apiKeysSecretRef" in dry_run(cluster, namespace, newer).stderr, bool, what="refused by the rule"
    )
    cluster.kubectl("scale", "llmd", "wrong", "-n", namespace, "--replicas=0")
    _patch(cluster, namespace, {"engine": {"maxNumSeqs": 3}})
    found = eventually(
        lambda: condition(read(cluster, namespace, "wrong"), "Unauthenticated"),
        lambda seen: seen.get("status") == "True",
        what="the condition, so the status is written too",
    )
    assert found["reason"] == "ExposedWithoutAuthentication"
    _patch(cluster, namespace, {"auth": DISABLED})
    refused = cluster.refused("patch", "llmd", "wrong", "-n", namespace, "--type=merge", "-p", '{"spec":{"auth":null}}')
    assert "auth.apiKeysSecretRef" in refused


def _patch(cluster: Cluster, namespace: str, spec: Object) -> None:
    cluster.kubectl("patch", "llmd", "wrong", "-n", namespace, "--type=merge", "-p", json.dumps({"spec": spec}))


DISABLED = {"mode": "Disabled"}
