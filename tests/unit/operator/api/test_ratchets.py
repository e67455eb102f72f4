"""Rules for what is new: the API server refuses a new object, and leaves a stored one serve, scale and be edited.

CEL and Python give the same verdict on the same cases, but for what the API server cannot ask.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from millstream_operator.api.crd import custom_resource_definition
from millstream_operator.api.load import ManifestError, loads_manifest, parse
from millstream_operator.api.validation.ratchets import RATCHETS, new_violations
from tests.support.llmdeployments import manifest
from tests.support.stored_objects import edited, refused_by_cel

Manifest = dict[str, Any]
KEYS = {"apiKeysSecretRef": {"name": "keys", "key": "all"}}


def env(*names: str) -> Manifest:
    return {"spec": {"containers": [{"name": "runtime", "env": [{"name": name, "value": "x"} for name in names]}]}}


def resources(kind: str, requests: Manifest, limits: Manifest) -> Manifest:
    name = {"containers": "runtime", "initContainers": "fetch-model"}[kind]
    return {"spec": {kind: [{"name": name, "resources": {"requests": requests, "limits": limits}}]}}


def cached(mode: str | None, most: int) -> Manifest:
    cache = {"size": "20Gi"} | ({"accessMode": mode} if mode is not None else {})
    model = {"source": {"huggingFace": {"repository": "org/model"}}, "cache": cache}
    return {"model": model, "autoscaling": {"maxReplicas": most}}


ACCEPTED: dict[str, Manifest] = {
    "a Service inside": {"service": {"type": "ClusterIP"}},
    "the default": {},
    "another port": {"service": {"port": 8080}},
    "keys": {"service": {"type": "LoadBalancer"}, "auth": KEYS},
    "no keys, said": {"service": {"type": "NodePort"}, "auth": {"mode": "Disabled"}},
    "a request of the limit": {"podTemplate": resources("containers", {"memory": "4Gi"}, {"memory": "4096Mi"})},
    "a request within the limit": {"podTemplate": resources("initContainers", {"cpu": "250m"}, {"cpu": 1})},
    "a request and a limit of others": {"podTemplate": resources("containers", {"memory": "8Gi"}, {"cpu": "1"})},
    "a volume of all nodes": cached("ReadWriteMany", 4),
    "a volume of the default": cached(None, 4),
    "a volume of one node for one replica": cached("ReadWriteOnce", 1),
    "room for a token of the answer": {"engine": {"maxModelLen": 2}},
    "a mirror of the hub": {"podTemplate": env("HF_ENDPOINT", "HTTPS_PROXY")},
}
REFUSED: dict[str, tuple[Any, str]] = {
    "a node port": ({"service": {"type": "NodePort"}}, "auth.apiKeysSecretRef"),
    "a load balancer": ({"service": {"type": "LoadBalancer"}, "auth": {}}, "auth.mode: Disabled"),
    "no room for an answer": ({"engine": {"maxModelLen": 1}}, "spec.engine.maxModelLen is 1; it must be at least 2"),
    "more memory": (
        {"podTemplate": resources("containers", {"memory": "8Gi"}, {"memory": "4Gi"})},
        'resources is {"requests.memory": "8Gi", "limits.memory": "4Gi"}; it must not request more memory',
    ),
    "more cores": ({"podTemplate": resources("containers", {"cpu": 2}, {"cpu": "1500m"})}, "lower requests.cpu"),
    "more memory of another suffix": (
        {"podTemplate": resources("containers", {"memory": "1.5Gi"}, {"memory": "1.5G"})},
        "raise limits.memory",
    ),
    "more disk to download": (
        {"podTemplate": resources("initContainers", {"ephemeral-storage": "3Gi"}, {"ephemeral-storage": "2Gi"})},
        '{"requests.ephemeral-storage": "3Gi", "limits.ephemeral-storage": "2Gi"}; it must',
    ),
    "an autoscaler and a volume of one node": (cached("ReadWriteOnce", 2), "autoscaling.maxReplicas is more than 1"),
    "an autoscaler and a volume of one pod": (cached("ReadWriteOncePod", 2), "Set it to ReadWriteMany"),
    "a variable of the loader": (
        {"podTemplate": env("TZ", "LD_PRELOAD")},
        "LD_PRELOAD of podTemplate.spec.containers[].env is not accepted",
    ),
    "a variable of another server": ({"podTemplate": env("VLLM_API_KEY")}, "give auth.apiKeysSecretRef"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_says_who_may_ask_is_accepted(name: str) -> None:
    stored = manifest(**ACCEPTED[name])
    assert refused_by_cel(stored) == []
    assert [*new_violations(parse(stored))] == []
    loads_manifest(yaml.safe_dump(stored))


@pytest.mark.parametrize("name", REFUSED)
def test_a_new_object_is_refused_by_the_api_server_and_by_validate(name: str) -> None:
    spec, said = REFUSED[name]
    stored = manifest(**spec)
    (violation,) = new_violations(parse(stored))
    of_files_alone = {ratchet.message for ratchet in RATCHETS if ratchet.cel is None}
    assert refused_by_cel(stored) == ([] if violation.message in of_files_alone else [violation.message])
    with pytest.raises(ManifestError, match="spec") as caught:
        loads_manifest(yaml.safe_dump(stored))
    assert said in str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_stored_object_can_be_read_scaled_and_edited(name: str) -> None:
    spec, _ = REFUSED[name]
    old = manifest(**spec)
    assert parse(old).spec.replicas == 1
    for change in (
        lambda spec: spec.update(replicas=5),
        lambda spec: spec.setdefault("engine", {}).update(maxNumSeqs=4),
        lambda spec: spec.setdefault("service", {}).update(port=8080),
        lambda spec: spec.setdefault("podTemplate", {}).update(metadata={"labels": {"team": "a"}}),
    ):
        new = edited(old, change)
        assert refused_by_cel(new, old) == []


def test_what_a_stored_object_adds_is_new() -> None:
    old = manifest(service={"type": "NodePort"}, podTemplate=env("HOME"))
    more = {
        "another way out": lambda spec: spec["service"].update(type="LoadBalancer"),
        "another variable": lambda spec: spec["podTemplate"].update(env("HOME", "PATH")),
    }
    for change in more.values():
        assert len(refused_by_cel(edited(old, change), old)) == 1


def test_keys_cannot_be_taken_from_a_service_that_is_exposed() -> None:
    old = manifest(service={"type": "NodePort"}, auth=KEYS)
    assert refused_by_cel(edited(old, lambda spec: spec.pop("auth")), old) != []
    assert refused_by_cel(edited(old, lambda spec: spec.update(auth={"mode": "Disabled"})), old) == []
    inside = manifest()
    assert refused_by_cel(edited(inside, lambda spec: spec.update(service={"type": "NodePort"})), inside) != []


def test_the_crd_asks_them_of_new_objects_too() -> None:
    """Without `optionalOldSelf` the API server would ask a rule that names `oldSelf` of updates only."""
    text = yaml.safe_dump(custom_resource_definition())
    assert text.count("optionalOldSelf: true") == sum(ratchet.cel is not None for ratchet in RATCHETS)
