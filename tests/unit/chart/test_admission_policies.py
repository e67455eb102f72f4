"""The chart's admission policies as helm renders them: whom they judge, by which names, and when they are left out.

What they refuse is tried on a real API server: `tests/soak/test_admission_policies.py`.
"""

from __future__ import annotations

import re

import pytest

from millstream_operator.diagnosis.admission import OWN_POLICIES
from millstream_operator.kube.diff import APPLIED_ANNOTATION
from millstream_operator.kube.kinds import HORIZONTAL_POD_AUTOSCALER, OPTIONAL, OWNED
from millstream_operator.rendering.names import DEPLOYMENT_LABEL
from tests.support.helm_chart import (
    CHART,
    IMAGES,
    Document,
    environment,
    helm,
    of_kind,
    operator_of,
    render,
)

POLICY, BINDING = "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
ENABLED = "admissionPolicy.enabled=true"
EVERY = (ENABLED, "admissionPolicy.requireLLMDeployment=true")  # renders all of them
KIND = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"


def policies(*values: str, release: str = "millstream") -> dict[str, Document]:
    """By the word in its name."""
    found = of_kind(render(ENABLED, *values, release=release), POLICY)
    return {one["metadata"]["name"].removesuffix(OWN_POLICIES).rpartition("-")[2]: one for one in found}


def test_the_policies_judge_the_operators_user_alone() -> None:
    for release in ("millstream", "one"):
        documents = render(*EVERY, release=release)
        account = operator_of(documents)["spec"]["template"]["spec"]["serviceAccountName"]
        user = f"request.userInfo.username == 'system:serviceaccount:system:{account}'"
        assert len(of_kind(documents, POLICY)) == 3
        for policy in of_kind(documents, POLICY):
            first, *_ = policy["spec"]["matchConditions"]
            assert first["expression"] == user, policy["metadata"]["name"]


def test_each_policy_denies_and_is_one_that_the_operator_knows_as_the_charts() -> None:
    documents = render(*EVERY)
    bound = {one["spec"]["policyName"]: one["spec"]["validationActions"] for one in of_kind(documents, BINDING)}
    names = [one["metadata"]["name"] for one in of_kind(documents, POLICY)]
    assert bound == {name: ["Deny"] for name in names}
    for policy in of_kind(documents, POLICY):
        assert policy["metadata"]["name"].endswith(OWN_POLICIES)
        assert policy["spec"]["failurePolicy"] == "Fail"
        reasons = {one["reason"] for one in policy["spec"]["validations"]}
        assert reasons == {"Forbidden"}, "another reason is a 422, by which the operator would try a merge patch"


def test_unless_asked_no_policy_waits_until_the_api_server_knows_the_crd() -> None:
    """With a parameter it would refuse all children of the first minute after an install."""
    assert policies().keys() == {"children", "pods"}
    assert not any("paramKind" in one["spec"] for one in policies().values())
    assert policies(*EVERY)["namespaces"]["spec"]["paramKind"]["kind"] == "LLMDeployment"


def test_the_kinds_that_it_may_write_are_those_that_the_operator_owns() -> None:
    variables = {one["name"]: one["expression"] for one in policies()["children"]["spec"]["variables"]}
    allowed = set(re.findall(r"'([\w.]*/\w+)'", variables["isKnown"]))
    owned = {f"{kind.group}/{kind.plural}" for kind in (*OWNED, HORIZONTAL_POD_AUTOSCALER, *OPTIONAL)}
    assert allowed == owned
    rules = policies(*EVERY)["namespaces"]["spec"]["matchConstraints"]["resourceRules"]
    named = {f"{group}/{resource}" for rule in rules for group in rule["apiGroups"] for resource in rule["resources"]}
    assert owned <= named


def test_what_is_exempt_by_name_is_what_the_operator_is_told() -> None:
    for release in ("millstream", "one"):
        documents = render(ENABLED, release=release)
        told = environment(documents)
        children = policies(release=release)["children"]["spec"]
        conditions = {one["name"]: one["expression"] for one in children["matchConditions"]}
        names = {
            "it-is-not-its-own-lease": told["MILLSTREAM_LEASE_NAME"],
            "it-is-not-its-own-record": f"{told['MILLSTREAM_LEASE_NAME']}-calibration",
            "it-is-not-its-own-secret": told["MILLSTREAM_PROBE_KEY_SECRET"],
        }
        for condition, name in names.items():
            assert f"request.name == '{name}'" in conditions[condition]
            assert "request.namespace == 'system'" in conditions[condition]


def test_an_orphan_is_known_by_the_operators_own_label_and_mark() -> None:
    variables = {one["name"]: one["expression"] for one in policies()["children"]["spec"]["variables"]}
    for word in (DEPLOYMENT_LABEL, APPLIED_ANNOTATION):
        assert f"'{word}'" in variables["wasOrphan"]


def rendered_kinds(*api_versions: str) -> set[str]:
    """Kinds of the chart for a cluster that serves these."""
    sets = [word for value in (*IMAGES, ENABLED) for word in ("--set", value)]
    served = [word for one in api_versions for word in ("--api-versions", one)]
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", *sets, *served)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^kind: (\w+)$", done.stdout, flags=re.MULTILINE))


def test_they_are_left_out_where_the_api_server_has_no_such_kind() -> None:
    assert POLICY in rendered_kinds(), "without a cluster helm knows no kinds: the chart's least Kubernetes has it"
    assert POLICY in rendered_kinds("v1/Pod", KIND)
    assert not {POLICY, BINDING} & rendered_kinds("v1/Pod")


def test_they_are_off_by_default_and_a_value_adds_them_and_changes_nothing_else() -> None:
    documents, without = render(*EVERY), render()
    assert {one["kind"] for one in documents if one not in without} == {POLICY, BINDING}
    assert [one for one in documents if one in without] == without == render("admissionPolicy.enabled=false")


@pytest.mark.parametrize(
    "value",
    [
        "admissionPolicy.allowedNamespaces=[\"a'] || true || 'a' in ['\"]",
        "admissionPolicy.namespaceLabels.a=\"' || true || '\"",
        'admissionPolicy.mode="Audit"',
        'admissionPolicy.enabled="maybe"',
    ],
)
def test_a_value_that_would_change_the_meaning_of_a_rule_is_refused(value: str) -> None:
    sets = [word for image in IMAGES for word in ("--set", image)]
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", *sets, "--set-json", value)
    assert done.returncode != 0
    assert "admissionPolicy" in done.stderr
