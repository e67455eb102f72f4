"""What the tests of one cluster share, and which command touches it. Pure.

A test that changes one of these, or reads it as a whole, says so by `@pytest.mark.shared(SharedThing.X)` and runs alone
(`--lane alone`). All others have their own namespace and run in several processes (`--lane own`). `guard.py` refuses
the command of a test without the mark.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from e2e.kubectl_command import KubectlCommand, Target, parse

RELEASE_NAMESPACE = "millstream-system"
# On each object outside the tests' namespaces: by it the next run finds what an interrupted one left.
LEFTOVER_LABEL, LEFTOVER_VALUE, KEPT_VALUE = "millstream.dev/e2e", "test", "kept"


class SharedThing(StrEnum):
    """The value says what it is, in the words of an error."""

    RELEASE = "the Helm release (upgraded, rolled back, uninstalled)"
    OPERATOR = "the operator (killed, scaled, or its log, metrics and Lease read)"
    NODES = "the cluster's nodes"
    CRDS = "the kinds that the API server has (CRDs)"
    ADMISSION_POLICIES = "policies and webhooks that judge every request"
    CLUSTER_RIGHTS = "cluster roles and their bindings"
    EVERYTHING = "everything that runs, in every namespace"
    OTHER_OBJECTS = "objects without a namespace, or in a namespace of others"


OF_KIND: Mapping[str, SharedThing] = {
    "Node": SharedThing.NODES,
    "CustomResourceDefinition": SharedThing.CRDS,
    "APIService": SharedThing.CRDS,
    "ValidatingAdmissionPolicy": SharedThing.ADMISSION_POLICIES,
    "ValidatingAdmissionPolicyBinding": SharedThing.ADMISSION_POLICIES,
    "MutatingAdmissionPolicy": SharedThing.ADMISSION_POLICIES,
    "MutatingAdmissionPolicyBinding": SharedThing.ADMISSION_POLICIES,
    "ValidatingWebhookConfiguration": SharedThing.ADMISSION_POLICIES,
    "MutatingWebhookConfiguration": SharedThing.ADMISSION_POLICIES,
    "ClusterRole": SharedThing.CLUSTER_RIGHTS,
    "ClusterRoleBinding": SharedThing.CLUSTER_RIGHTS,
}
# Questions: "creating" one stores nothing.
REVIEWS = re.compile(r"(Self)?Subject(Access|Rules)?Review|TokenReview|LocalSubjectAccessReview")
NODE_VERBS = frozenset({"cordon", "uncordon", "drain", "taint"})
HELM_WRITES = frozenset({"install", "upgrade", "rollback", "uninstall", "delete", "del", "un"})
LISTED_BY_ALL = frozenset({"Namespace", "PersistentVolume"})  # each test adds its own


@dataclass(frozen=True, slots=True)
class Touched:
    """`what`: in words. `things`: a mark with any of them allows it; the first is the one to recommend."""

    things: tuple[SharedThing, ...]
    what: str


def touched(
    command: Sequence[str], stdin: str | None, own_namespaces: Collection[str], cluster_scoped: Mapping[str, str]
) -> list[Touched]:
    """Return what a command touches of what all tests share.

    `cluster_scoped`: names of a kind without a namespace, as kubectl takes them, in small letters -> the kind.

    Raises:
        ValueError: neither kubectl nor helm.
    """
    tool, *words = command
    if tool == "helm":
        writes = words and words[0] in HELM_WRITES
        return [Touched((SharedThing.RELEASE,), f"helm {words[0]}")] if writes else []
    if tool != "kubectl":
        raise ValueError(f"{tool} is not a command of Cluster.run: it runs kubectl and helm.")
    parsed = parse(words, stdin)
    if not parsed.is_write:
        return list(_read(parsed, cluster_scoped))
    if parsed.verb in NODE_VERBS:
        return [Touched((SharedThing.NODES,), f"kubectl {parsed.verb}")]
    if parsed.all_namespaces:
        return [Touched((SharedThing.EVERYTHING,), f"kubectl {parsed.verb} in all namespaces")]
    return list(_written(parsed, own_namespaces, cluster_scoped))


def unlabelled(
    command: Sequence[str], stdin: str | None, own_namespaces: Collection[str], cluster_scoped: Mapping[str, str]
) -> list[str]:
    """Name what a command makes outside the test's namespaces, and what the next run could not find again."""
    if command[0] != "kubectl":
        return []
    parsed = parse(command[1:], stdin)
    if not parsed.makes_objects:
        return []
    return [
        f"{target.kind} {target.name}"
        for target in parsed.targets
        if not REVIEWS.fullmatch(target.kind)
        and cluster_scoped.get(target.kind.lower()) != "Namespace"
        and (target.kind.lower() in cluster_scoped or _namespace(parsed, target) not in own_namespaces)
        and target.labels.get(LEFTOVER_LABEL) != LEFTOVER_VALUE
    ]


def _read(parsed: KubectlCommand, cluster_scoped: Mapping[str, str]) -> Iterable[Touched]:
    if parsed.all_namespaces:
        yield Touched((SharedThing.EVERYTHING,), f"kubectl {parsed.verb} in all namespaces")
    for target in parsed.targets:
        kind = cluster_scoped.get(target.kind.lower(), target.kind)
        if kind in LISTED_BY_ALL and not target.name:
            yield Touched((SharedThing.EVERYTHING,), f"the list of every {kind}")
        if _namespace(parsed, target) == RELEASE_NAMESPACE and kind.lower() in ("lease", "leases"):
            yield Touched((SharedThing.OPERATOR, SharedThing.RELEASE), "the operator's Lease")
    if parsed.verb == "logs" and parsed.namespace == RELEASE_NAMESPACE:
        yield Touched((SharedThing.OPERATOR, SharedThing.RELEASE), "the operator's log")
    if f"/namespaces/{RELEASE_NAMESPACE}/" in parsed.raw_path:
        yield Touched((SharedThing.OPERATOR, SharedThing.RELEASE), "what the operator answers")


def _written(
    parsed: KubectlCommand, own_namespaces: Collection[str], cluster_scoped: Mapping[str, str]
) -> Iterable[Touched]:
    for target in parsed.targets:
        what = f"kubectl {parsed.verb} {target.kind} {target.name}".strip()
        kind = cluster_scoped.get(target.kind.lower())
        if REVIEWS.fullmatch(target.kind) or _is_own(target, kind, own_namespaces):
            continue
        namespace = _namespace(parsed, target)
        if kind is not None:
            yield Touched((OF_KIND.get(kind, SharedThing.OTHER_OBJECTS),), what)
        elif namespace == RELEASE_NAMESPACE:
            yield Touched((SharedThing.OPERATOR, SharedThing.RELEASE), f"{what} in {namespace}")
        elif namespace not in own_namespaces:
            yield Touched((SharedThing.OTHER_OBJECTS,), f"{what} in {namespace or 'default'}")


def _is_own(target: Target, kind: str | None, own_namespaces: Collection[str]) -> bool:
    """Whether an object outside the test's namespaces is the test's: it is one, or its name begins with one's name."""
    if kind == "Namespace":
        return target.name in own_namespaces
    may_be_own = kind in (None, "PersistentVolume")
    return may_be_own and any(target.name.startswith(f"{own}-") for own in own_namespaces)


def _namespace(parsed: KubectlCommand, target: Target) -> str:
    return target.namespace or parsed.namespace
