"""`runtime.allowedEnv` adds names to the CRD's rule about environment variables, and changes nothing else of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.api.crd import custom_resource_definition
from millstream_operator.api.validation.environment_rules import environment_ratchets
from tests.support.helm_chart import CHART, IMAGES, Document, helm, of_kind, render

ADDED = ["TORCH_LOGS", "CUDA_LAUNCH_BLOCKING"]


def spec_rules(crd: Document) -> list[dict[str, Any]]:
    (version,) = crd["spec"]["versions"]
    rules: list[dict[str, Any]] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["x-kubernetes-validations"]
    return rules


def refused(*values: str) -> str:
    sets = [word for value in (*IMAGES, *values) for word in (("--set-json" if "[" in value else "--set"), value)]
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", *sets)
    assert done.returncode != 0
    return done.stderr


def test_without_it_the_crd_is_that_of_the_types() -> None:
    (crd,) = of_kind(render("crds.keep=false"), "CustomResourceDefinition")
    assert crd == custom_resource_definition()


def test_names_are_added_to_the_rule_and_to_its_message() -> None:
    (crd,) = of_kind(render("crds.keep=false", f"runtime.allowedEnv={json.dumps(ADDED)}"), "CustomResourceDefinition")
    before, after = spec_rules(custom_resource_definition()), spec_rules(crd)
    changed = [rule for rule in after if rule not in before]
    (ratchet, _) = environment_ratchets(ADDED)
    assert [(rule["rule"], rule["messageExpression"]) for rule in changed] == [(ratchet.cel, ratchet.message_cel)]
    for rules in (before, after):
        rules[:] = [rule for rule in rules if "messageExpression" not in rule]
    assert before == after


@pytest.mark.parametrize(
    "names", [["TORCH_*"], ["A", "A"], ["1A"], ["A'] || true || ['"], ["VLLM_X"], ["MILLSTREAM_X"], ["A" * 257], [""]]
)
def test_what_is_no_name_or_would_do_nothing_is_refused(names: list[str]) -> None:
    assert "allowedEnv" in refused(f"runtime.allowedEnv={json.dumps(names)}")


def test_where_another_tool_has_the_crd_it_is_refused() -> None:
    said = refused("crds.enabled=false", f"runtime.allowedEnv={json.dumps(ADDED)}")
    assert "crds.enabled is false" in said
