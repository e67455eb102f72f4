"""What is left to administrators: CEL and Python give the same verdict, and what is stored stays."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from millstream_operator.api.load import ManifestError, loads_manifest, parse
from millstream_operator.api.validation.allowed import NOTHING, Allowed
from millstream_operator.api.validation.author_rules import PROFILE_KEY_PATTERN
from millstream_operator.api.validation.ratchets import new_violations
from millstream_operator.api.validation.size_rules import MAX_LONG_ANNOTATIONS, MAX_LONG_VARIABLES, MAX_SPEC_BYTES
from tests.support.llmdeployments import manifest
from tests.support.stored_objects import edited, refused_by_cel

Manifest = dict[str, Any]
VAULT = "container.apparmor.security.beta.kubernetes.io/vault-agent"
PROFILES = (
    VAULT,
    "container.apparmor.security.beta.kubernetes.io/runtime",
    "apparmor.security.beta.kubernetes.io/allowedProfileNames",
    "seccomp.security.alpha.kubernetes.io/pod",
    "container.seccomp.security.alpha.kubernetes.io/runtime",
)
OTHERS = ("sidecar.istio.io/inject", "vault.hashicorp.com/role", "seccomp", "my-apparmor.example.com/x", "x/apparmor.y")


def annotated(**annotations: str) -> Manifest:
    return manifest(podTemplate={"metadata": {"annotations": annotations}})


def with_class(name: str) -> Manifest:
    return manifest(podTemplate={"spec": {"priorityClassName": name}})


def refused_by_python(new: Manifest, allowed: Allowed = NOTHING) -> list[str]:
    return [violation.message for violation in new_violations(parse(new), allowed)]


@pytest.mark.parametrize("key", PROFILES)
def test_a_profile_by_annotation_is_refused_by_its_key_and_with_the_fix(key: str) -> None:
    new = annotated(**{"team": "a", key: "unconfined"})
    (message,) = refused_by_python(new)
    assert refused_by_cel(new) == [message]
    assert message.startswith(f"{key} of podTemplate.metadata.annotations is not accepted")
    for fix in ("Leave it out", "authors.allowedAnnotations"):
        assert fix in message


@pytest.mark.parametrize("key", OTHERS)
def test_another_annotation_is_taken(key: str) -> None:
    assert not re.match(PROFILE_KEY_PATTERN, key)
    new = annotated(**{key: "x"})
    assert refused_by_cel(new) == refused_by_python(new) == []


def test_an_administrator_allows_keys_classes_and_pods_without_a_policy() -> None:
    cases = (
        (annotated(**{VAULT: "unconfined"}), Allowed(annotations=[VAULT])),
        (with_class("system-node-critical"), Allowed(priority_classes=["system-node-critical"])),
        (manifest(network={"mode": "Disabled"}), Allowed(network_mode_disabled=True)),
    )
    for new, allowed in cases:
        assert refused_by_cel(new, allowed=allowed) == refused_by_python(new, allowed) == []
        for others in [NOTHING, *(other for _, other in cases if other is not allowed)]:
            (message,) = refused_by_python(new, others)
            assert refused_by_cel(new, allowed=others) == [message]
    assert refused_by_cel(with_class("system-cluster-critical"), allowed=cases[1][1]) != []


def test_a_class_of_the_system_is_refused_and_others_are_not() -> None:
    (message,) = refused_by_python(with_class("system-cluster-critical"))
    assert refused_by_cel(with_class("system-cluster-critical")) == [message]
    assert message.startswith("system-cluster-critical of podTemplate.spec.priorityClassName is not accepted")
    for name in ("batch", "systems", "system"):
        assert refused_by_cel(with_class(name)) == refused_by_python(with_class(name)) == []


def test_what_is_stored_stays_and_a_worse_value_is_refused() -> None:
    old = manifest(
        network={"mode": "Disabled"},
        podTemplate={
            "metadata": {"annotations": {VAULT: "runtime/default"}},
            "spec": {"priorityClassName": "system-node-critical"},
        },
    )
    assert refused_by_cel(edited(old, lambda spec: spec.update(replicas=2)), old) == []
    assert refused_by_cel(edited(old, lambda spec: spec["network"].update(mode="Managed")), old) == []

    def unconfined(spec: Manifest) -> None:
        spec["podTemplate"]["metadata"]["annotations"][VAULT] = "unconfined"

    def another_class(spec: Manifest) -> None:
        spec["podTemplate"]["spec"]["priorityClassName"] = "system-cluster-critical"

    for change in (unconfined, another_class):
        assert len(refused_by_cel(edited(old, change), old)) == 1
    assert len(refused_by_cel(manifest(network={"mode": "Disabled"}), manifest(network={"mode": "Managed"}))) == 1
    parse(old)  # the operator takes what is stored


def test_a_file_is_checked_as_a_new_object_is() -> None:
    for new, allowed in (
        (with_class("system-node-critical"), Allowed(priority_classes=["system-node-critical"])),
        (manifest(network={"mode": "Disabled"}), Allowed(network_mode_disabled=True)),
    ):
        loads_manifest(yaml.safe_dump(new), allowed=allowed)
        with pytest.raises(ManifestError, match=r"manifest:\d+: spec\."):
            loads_manifest(yaml.safe_dump(new))


def long_annotations(number: int) -> Manifest:
    return annotated(**{f"a{index}": "x" * 513 for index in range(number)}, short="x" * 512)


def long_variables(number: int) -> Manifest:
    env: list[Manifest] = [{"name": f"NCCL_IB_{index}", "value": "x" * 513} for index in range(number)]
    of_secret = {"secretKeyRef": {"name": "a", "key": "b"}}
    env += [{"name": "TZ", "value": "x" * 512}, {"name": "LANG", "valueFrom": of_secret}]
    return manifest(podTemplate={"spec": {"containers": [{"name": "runtime", "env": env}]}})


def test_long_texts_are_counted_and_a_stored_object_may_keep_its_own() -> None:
    for made, most in ((long_annotations, MAX_LONG_ANNOTATIONS), (long_variables, MAX_LONG_VARIABLES)):
        assert refused_by_cel(made(most)) == refused_by_python(made(most)) == []
        (message,) = refused_by_python(made(most + 1))
        assert refused_by_cel(made(most + 1)) == [message]
        assert message.startswith(f"at most {most} ")
        assert refused_by_cel(made(most + 2), made(most + 2)) == refused_by_cel(made(most + 1), made(most + 2)) == []
        assert refused_by_cel(made(most + 3), made(most + 2)) == [message]


def test_a_spec_that_is_too_large_is_refused_with_its_size() -> None:
    values = ["x" * 63] * 8
    terms = [
        {
            "topologyKey": "zone",
            "labelSelector": {
                "matchExpressions": [{"key": f"key{index}", "operator": "In", "values": values} for index in range(8)]
            },
        }
    ] * 8
    small = manifest(podTemplate={"spec": {"affinity": {"podAffinity": _required(terms)}}})
    assert refused_by_python(small) == []
    labels = {"matchLabels": {f"{'k' * 50}{index}": "x" * 63 for index in range(8)}}
    rules = [{"to": [{"podSelector": labels, "namespaceSelector": labels}] * 8, "ports": [{"port": 1}]}] * 8
    large = manifest(network={"egress": rules}, podTemplate=small["spec"]["podTemplate"])
    (message,) = refused_by_python(large)
    size = int(re.findall(r"\d+", message)[0])
    assert size > MAX_SPEC_BYTES
    assert f"at most {MAX_SPEC_BYTES}" in message


def _required(terms: list[Manifest]) -> Manifest:
    return {"requiredDuringSchedulingIgnoredDuringExecution": terms}
