"""A test of the first lane cannot touch what all tests share: the command is refused with the mark that it needs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import cluster_scoped_kinds
from e2e.guard import Guard, SharedThingError
from e2e.shared_things import LEFTOVER_LABEL, LEFTOVER_VALUE, SharedThing

E2E = Path(__file__).resolve().parents[3] / "e2e"
MINE = "e2e-mine-1a2b"
SYSTEM = "millstream-system"
# As `kubectl api-resources --namespaced=false --no-headers` prints it.
KINDS = """\
namespaces  ns  v1  false  Namespace
nodes  no  v1  false  Node
persistentvolumes  pv  v1  false  PersistentVolume
customresourcedefinitions  crd,crds  apiextensions.k8s.io/v1  false  CustomResourceDefinition
clusterroles  rbac.authorization.k8s.io/v1  false  ClusterRole
validatingadmissionpolicies  admissionregistration.k8s.io/v1  false  ValidatingAdmissionPolicy
storageclasses  sc  storage.k8s.io/v1  false  StorageClass
subjectaccessreviews  authorization.k8s.io/v1  false  SubjectAccessReview
"""


@pytest.fixture
def guard() -> Guard:
    """That of a test with one namespace and no mark."""
    guard = Guard()
    guard.own_namespaces.add(MINE)
    guard.cluster_scoped = cluster_scoped_kinds(KINDS)
    guard.begin_test(())
    return guard


def manifest(kind: str, name: str = "x", *, is_labelled: bool = True, **metadata: Any) -> str:
    labels = {LEFTOVER_LABEL: LEFTOVER_VALUE} if is_labelled else {}
    return json.dumps({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": labels, **metadata}})


def a_list(*manifests: str) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [json.loads(one) for one in manifests]})


APPLY, CRDS = "kubectl apply -f -", "customresourcedefinitions"
TWO_KINDS = a_list(manifest("Pod"), manifest("CustomResourceDefinition"))
REFUSED: dict[str, tuple[str, str | None, SharedThing]] = {
    "an upgrade": ("helm upgrade --install millstream chart", None, SharedThing.RELEASE),
    "an uninstall": ("helm uninstall millstream", None, SharedThing.RELEASE),
    "a rollback": ("helm rollback millstream", None, SharedThing.RELEASE),
    "the operator killed": (f"kubectl delete pod -n {SYSTEM} a b --force", None, SharedThing.OPERATOR),
    "the operator scaled": (f"kubectl scale deployment/m -n {SYSTEM} --replicas=0", None, SharedThing.OPERATOR),
    "a command in its pod": (f"kubectl exec a -n {SYSTEM} -- python3 -c x", None, SharedThing.OPERATOR),
    "its pod restarted": (f"kubectl rollout restart deployment/m -n {SYSTEM}", None, SharedThing.OPERATOR),
    "its log": (f"kubectl logs -n {SYSTEM} -l app=operator --prefix", None, SharedThing.OPERATOR),
    "its metrics": (
        f"kubectl get --raw /api/v1/namespaces/{SYSTEM}/pods/a:8080/proxy/metrics",
        None,
        SharedThing.OPERATOR,
    ),
    "its Lease": (f"kubectl get lease millstream -n {SYSTEM} -o json", None, SharedThing.OPERATOR),
    "a node made": (APPLY, manifest("Node"), SharedThing.NODES),
    "a node changed": ("kubectl patch node x --subresource=status --type=merge -p {}", None, SharedThing.NODES),
    "a node cordoned": ("kubectl cordon x", None, SharedThing.NODES),
    "nodes labelled": ("kubectl label nodes x gpu=yes", None, SharedThing.NODES),
    "a kind taken away": ("kubectl delete crd x --ignore-not-found", None, SharedThing.CRDS),
    "a kind by its long name": (
        "kubectl patch customresourcedefinitions.apiextensions.k8s.io x",
        None,
        SharedThing.CRDS,
    ),
    "a kind among others": (
        f"kubectl apply -n {MINE} -f -",
        a_list(manifest("Pod"), manifest("CustomResourceDefinition")),
        SharedThing.CRDS,
    ),
    "a policy": ("kubectl create -f -", manifest("ValidatingAdmissionPolicy"), SharedThing.ADMISSION_POLICIES),
    "a cluster role": (f"kubectl apply -n {MINE} -f -", manifest("ClusterRole"), SharedThing.CLUSTER_RIGHTS),
    "pods of everybody": ("kubectl get pods -A -l millstream.dev/deployment -o json", None, SharedThing.EVERYTHING),
    "every namespace": ("kubectl get namespaces -o json", None, SharedThing.EVERYTHING),
    "pods of everybody deleted": ("kubectl delete pods --all-namespaces -l a=b", None, SharedThing.EVERYTHING),
    "another kind of the cluster": (APPLY, manifest("StorageClass"), SharedThing.OTHER_OBJECTS),
    "somebody's volume": ("kubectl delete pv another", None, SharedThing.OTHER_OBJECTS),
    "somebody's namespace": ("kubectl delete namespace another", None, SharedThing.OTHER_OBJECTS),
    "no namespace given": (APPLY, manifest("ConfigMap"), SharedThing.OTHER_OBJECTS),
    "the namespace of the manifest": (
        f"kubectl apply -n {MINE} -f -",
        manifest("ConfigMap", namespace="kube-system"),
        SharedThing.OTHER_OBJECTS,
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_command_that_touches_what_all_share_needs_the_mark_of_the_thing(guard: Guard, what: str) -> None:
    command, stdin, thing = REFUSED[what]
    with pytest.raises(SharedThingError, match=rf"SharedThing\.{thing.name}\)"):
        guard.check(command.split(), stdin)
    guard.begin_test({*SharedThing} - {thing, SharedThing.RELEASE})
    if thing is not SharedThing.RELEASE:
        with pytest.raises(SharedThingError):
            guard.check(command.split(), stdin)
    guard.begin_test({thing})
    guard.check(command.split(), stdin)
    assert not guard.unused()


ALLOWED: dict[str, tuple[str, str | None]] = {
    "its own objects": (f"kubectl apply -n {MINE} -f -", manifest("Deployment")),
    "its own namespace": (f"kubectl delete namespace {MINE} --wait=false", None),
    "its own volume": (APPLY, manifest("PersistentVolume", f"{MINE}-models")),
    "its helper elsewhere": ("kubectl apply -n default -f -", manifest("Pod", f"{MINE}-models")),
    "a scale": (f"kubectl scale llmd/x -n {MINE} --replicas=2", None),
    "an eviction": (f"kubectl create --raw /api/v1/namespaces/{MINE}/pods/x/eviction -f -", "{}"),
    "a dry run of anything": ("kubectl apply --dry-run=server -f -", manifest("Node", is_labelled=False)),
    "a question": ("kubectl create -o json -f -", manifest("SubjectAccessReview", is_labelled=False)),
    "a question by words": (f"kubectl auth can-i delete pods -n {SYSTEM}", None),
    "one kind read": ("kubectl get crd x -o json", None),
    "nodes read": ("kubectl get nodes -o json", None),
    "the operator's pods read": (f"kubectl get pods -n {SYSTEM} -o json", None),
    "the chart's own test": ("helm test millstream", None),
    "the releases": (f"helm list --namespace {SYSTEM} -o json", None),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_what_is_the_tests_own_or_only_read_needs_no_mark(guard: Guard, what: str) -> None:
    command, stdin = ALLOWED[what]
    guard.check(command.split(), stdin)


UNLABELLED: dict[str, tuple[str, str | None]] = {
    "a node": (APPLY, manifest("Node", is_labelled=False)),
    "its own volume": (APPLY, manifest("PersistentVolume", f"{MINE}-models", is_labelled=False)),
    "its helper elsewhere": ("kubectl apply -n default -f -", manifest("Pod", f"{MINE}-x", is_labelled=False)),
    "a role by words": ("kubectl create clusterrole x --verb=get", None),
}


@pytest.mark.parametrize("what", UNLABELLED)
def test_what_an_interrupted_run_would_leave_needs_the_label_by_which_the_next_one_finds_it(
    guard: Guard, what: str
) -> None:
    command, stdin = UNLABELLED[what]
    guard.begin_test({*SharedThing})
    with pytest.raises(SharedThingError, match=f"{LEFTOVER_LABEL}: {LEFTOVER_VALUE}"):
        guard.check(command.split(), stdin)


def test_a_mark_that_is_not_needed_is_known_after_the_test(guard: Guard) -> None:
    guard.begin_test({SharedThing.NODES, SharedThing.CRDS})
    guard.check(["kubectl", "cordon", "x"])
    assert guard.unused() == {SharedThing.CRDS}


def test_what_prepares_a_run_is_held_back_by_nothing(guard: Guard) -> None:
    command = ["helm", "upgrade", "millstream", "chart"]
    with guard.opened():
        guard.check(command)
    with pytest.raises(SharedThingError):
        guard.check(command)


def test_only_kubectl_and_helm_are_run(guard: Guard) -> None:
    with pytest.raises(ValueError, match="docker"):
        guard.check(["docker", "exec", "node"])


def test_no_end_to_end_test_gets_round_the_guard() -> None:
    """kubectl and helm are started by `Cluster` alone: another process of them would be refused nothing."""
    for path in E2E.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith(
                ("subprocess.", "os.system", "os.exec")
            ):
                tools = {one.value for one in ast.walk(call) if isinstance(one, ast.Constant)} & {"kubectl", "helm"}
                assert not tools or path.name == "cluster.py", f"{path.name}:{call.lineno} starts {tools}"
