"""What whoever has the operator's token can do in a real cluster: by its roles, and by the chart's admission policies.

The requests are made as the operator's user. Nothing is stored: each one that would pass is a dry run.
"""

from __future__ import annotations

import json
import re

import pytest

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import condition, llmd, read
from e2e.release import Release
from e2e.shared_things import LEFTOVER_LABEL, LEFTOVER_VALUE, SharedThing
from millstream_operator.diagnosis.admission import OWN_POLICIES
from tests.soak.foreign_objects import (
    ANOTHER_ACCOUNT,
    NOT_OURS,
    NOT_RESTRICTED,
    changed,
    deployment,
    job,
    owned,
    pod_template,
)
from tests.support.helm_chart import render


@pytest.fixture
def judged(cluster: Cluster, release: Release) -> None:
    """The chart's default is no policy: on a release without them there is nothing to see."""
    installed = cluster.kubectl("get", "validatingadmissionpolicies", "-o", "name")
    if f"{release.name}-children{OWN_POLICIES}" not in installed:
        pytest.skip("the release was installed without admissionPolicy.enabled=true")


def as_operator(cluster: Cluster, release: Release, namespace: str, verb: str, manifest: Object) -> str:
    """What is said against the request; empty where it would be carried out."""
    account = f"--as=system:serviceaccount:{release.namespace}:{release.name}"
    command = ["kubectl", verb, "-f", "-", "-n", namespace, "--dry-run=server", account]
    command += ["--server-side", "--force-conflicts"] if verb == "apply" else []
    done = cluster.run(*command, stdin=json.dumps(manifest), check=False)
    return done.stderr.strip() or "refused" if done.returncode else ""


@pytest.mark.quick
def test_a_child_of_an_llmdeployment_may_be_made(cluster: Cluster, release: Release, namespace: str) -> None:
    for child in (deployment(pod_template()), job(pod_template())):
        assert as_operator(cluster, release, namespace, "apply", owned(child)) == ""


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize("whose", NOT_OURS)
def test_an_object_of_nobody_of_ours_may_not(cluster: Cluster, release: Release, namespace: str, whose: str) -> None:
    child = deployment(pod_template())
    child["metadata"]["ownerReferences"] = NOT_OURS[whose]
    assert f"children{OWN_POLICIES}" in as_operator(cluster, release, namespace, "apply", child)


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize("how", ["hostNetwork", "hostPath", "privileged", "root", *ANOTHER_ACCOUNT])
def test_pods_that_are_not_restricted_may_not(cluster: Cluster, release: Release, namespace: str, how: str) -> None:
    template = changed({**NOT_RESTRICTED, **ANOTHER_ACCOUNT}[how])
    assert f"pods{OWN_POLICIES}" in as_operator(cluster, release, namespace, "apply", owned(deployment(template)))


@pytest.mark.usefixtures("judged")
def test_a_closed_namespace_gets_no_child(cluster: Cluster, release: Release, namespace: str) -> None:
    child = owned(deployment(pod_template()))
    for closed in ("kube-system", release.namespace):
        said = as_operator(cluster, release, closed, "apply", child)
        assert f"the namespace {closed} is closed to models" in said


@pytest.mark.usefixtures("judged")
def test_an_object_of_somebody_else_stays_as_it_is(cluster: Cluster, release: Release, namespace: str) -> None:
    cluster.apply(namespace, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "theirs"}})
    account = f"--as=system:serviceaccount:{release.namespace}:{release.name}"
    place = ["configmap", "theirs", "-n", namespace, account]
    change = ["--type=merge", "--patch", '{"data":{"a":"b"}}']
    assert OWN_POLICIES in cluster.refused("patch", *place, *change)
    assert OWN_POLICIES in cluster.refused("delete", *place)


@pytest.mark.usefixtures("judged")
@pytest.mark.shared(SharedThing.OTHER_OBJECTS)
def test_a_user_reads_why_a_closed_namespace_has_no_model(cluster: Cluster, release: Release) -> None:
    name, closed = "misplaced", "kube-public"
    model = llmd(name, replicas=0)
    model["metadata"]["labels"] = {LEFTOVER_LABEL: LEFTOVER_VALUE}
    cluster.apply(closed, model)
    try:
        seen = eventually(
            lambda: read(cluster, closed, name),
            lambda now: condition(now, "Ready").get("reason") == "AdmissionDenied",
            what="refused",
        )
        assert f"the namespace {closed} is closed to models" in condition(seen, "Ready")["message"]
        assert condition(seen, "Stalled")["reason"] == "AdmissionDenied"
    finally:
        cluster.kubectl("delete", "llmd", name, "-n", closed)


def granted_by_the_chart() -> set[tuple[str, str]]:
    """(verb, resource) of the ClusterRoles that the chart binds to the operator in every namespace."""
    documents = render()
    bound = {one["roleRef"]["name"] for one in documents if one["kind"] == "ClusterRoleBinding"}
    roles = [one for one in documents if one["kind"] == "ClusterRole" and one["metadata"]["name"] in bound]
    rules = [rule for role in roles for rule in role["rules"]]
    return {
        (verb, _with_group(resource, group))
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def _with_group(resource: str, group: str) -> str:
    """As kubectl prints it: `llmdeployments.millstream.dev/status`."""
    name, slash, below = resource.partition("/")
    return f"{name}.{group}{slash}{below}" if group else resource


def rights_of(cluster: Cluster, namespace: str, account: str) -> set[tuple[str, str]]:
    """(verb, resource) as `kubectl auth can-i --list` prints them; paths that are no resources are left out."""
    listed = cluster.kubectl("auth", "can-i", "--list", "-n", namespace, f"--as={account}", "--no-headers")
    rows = re.findall(r"^(\S+)\s+\[\]\s+\[\]\s+\[([^\]]*)\]", listed, flags=re.MULTILINE)
    return {(verb, resource) for resource, verbs in rows for verb in verbs.split()}


def test_the_list_of_its_rights_is_the_charts(cluster: Cluster, release: Release, namespace: str) -> None:
    """The policies let this question pass. What every account may do is no right of the chart."""
    account = f"system:serviceaccount:{release.namespace}:{release.name}"
    everybodys = rights_of(cluster, namespace, f"system:serviceaccount:{namespace}:nobody")
    assert rights_of(cluster, namespace, account) - everybodys == granted_by_the_chart()
