"""`authors` adds to the lists of the CRD's rules, and the operator has a PriorityClass of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.api.crd import custom_resource_definition
from millstream_operator.api.validation.allowed import Allowed
from millstream_operator.api.validation.author_rules import author_ratchets
from tests.support.helm_chart import CHART, IMAGES, Document, helm, of_kind, render

VAULT = "container.apparmor.security.beta.kubernetes.io/vault-agent"
ALL = (
    f"authors.allowedAnnotations={json.dumps([VAULT])}",
    'authors.allowedPriorityClasses=["system-node-critical"]',
    "authors.networkModeDisabled=Allowed",
)


def rules_of(crd: Document) -> list[dict[str, Any]]:
    """All rules below the schema, in its order."""
    found: list[dict[str, Any]] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            found.extend(node.get("x-kubernetes-validations", ()))
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(crd["spec"])
    return found


def changed_rules(*values: str) -> list[tuple[str, str | None]]:
    (crd,) = of_kind(render("crds.keep=false", *values), "CustomResourceDefinition")
    before, after = rules_of(custom_resource_definition()), rules_of(crd)
    assert len(before) == len(after)
    return [(new["rule"], new.get("messageExpression")) for old, new in zip(before, after, strict=True) if old != new]


def test_each_value_changes_its_rule_and_no_other() -> None:
    allowed = Allowed(annotations=[VAULT], priority_classes=["system-node-critical"], network_mode_disabled=True)
    wanted = [(ratchet.cel, ratchet.message_cel) for ratchet in author_ratchets(allowed)]
    assert sorted(changed_rules(*ALL), key=str) == sorted(wanted, key=str)
    assert changed_rules() == []
    for value, rule in zip(ALL, wanted, strict=True):
        assert changed_rules(value) == [rule]


def test_where_no_policy_is_the_default_of_all_a_spec_may_say_so() -> None:
    (rule,) = changed_rules("network.mode=Disabled")
    assert rule == (author_ratchets(Allowed(network_mode_disabled=True))[2].cel, None)


@pytest.mark.parametrize(
    "value",
    [
        'authors.allowedAnnotations=["sidecar.istio.io/inject"]',
        'authors.allowedAnnotations=["seccomp.x/a\'] || true"]',
        'authors.allowedPriorityClasses=["high"]',
        'authors.allowedPriorityClasses=["system-*"]',
        "authors.networkModeDisabled=Maybe",
    ],
)
def test_what_would_change_nothing_or_anything_is_refused(value: str) -> None:
    flag = "--set-json" if "[" in value else "--set"
    sets = [word for image in IMAGES for word in ("--set", image)]
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", *sets, flag, value)
    assert done.returncode != 0
    assert "authors" in done.stderr


@pytest.mark.parametrize("value", ALL)
def test_where_another_tool_has_the_crd_it_is_refused(value: str) -> None:
    flag = "--set-json" if "[" in value else "--set"
    sets = [word for one in (*IMAGES, "crds.enabled=false") for word in ("--set", one)]
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", *sets, flag, value)
    assert done.returncode != 0
    assert "crds.enabled is false" in done.stderr


def class_of_the_operator(*values: str) -> tuple[str | None, list[Document]]:
    documents = render(*values)
    (operator,) = of_kind(documents, "Deployment")
    return operator["spec"]["template"]["spec"].get("priorityClassName"), of_kind(documents, "PriorityClass")


def test_the_operator_has_a_priority_class_that_evicts_nobody() -> None:
    name, (made,) = class_of_the_operator()
    assert name == made["metadata"]["name"] == "millstream-operator"
    assert made["preemptionPolicy"] == "Never"
    assert made["globalDefault"] is False
    assert 0 < made["value"] <= 1_000_000_000, "the greatest that Kubernetes leaves to users"
    name, (made,) = class_of_the_operator("operator.priorityClass.name=control", "operator.priorityClass.value=7")
    assert (name, made["metadata"]["name"], made["value"]) == ("control", "control", 7)


def test_a_class_that_exists_is_named_and_not_made() -> None:
    assert class_of_the_operator("operator.priorityClassName=mine") == ("mine", [])
    assert class_of_the_operator("operator.priorityClass.mode=Disabled") == (None, [])
