"""Everything that a namespace holds, in words that two runs share: the fault-free state against the one after faults.

Every namespaced kind that the API server knows is read, so a forgotten object of any kind is found. What differs from
run to run for good reason (uids, times, versions) is left out; what the operator has no hand in (ReplicaSets and pods
of the Deployment controller, endpoints) is counted, not compared. Pure, but for the reading.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from millstream_operator.rendering.revision_marks import JOURNALED_ANNOTATION
from millstream_runtime.config_files import LIVE_FILE
from tests.soak.api import Api, Object

Snapshot = dict[str, Object]
# Made by Kubernetes itself for everybody, or news rather than state.
_NOT_OURS = frozenset({"events", "endpoints", "endpointslices", "leases", "bindings", "localsubjectaccessreviews"})
_COUNTED = frozenset({"pods", "replicasets"})
_KUBERNETES_OWN = frozenset({("configmaps", "kube-root-ca.crt"), ("serviceaccounts", "default")})
_VARYING_METADATA = (
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "managedFields",
    "generation",
    "namespace",
    "selfLink",
)
_VARYING_FIELDS = frozenset(
    {"lastTransitionTime", "lastUpdateTime", "lastHeartbeatTime", "observedGeneration", "uid", "time", "at"}
)
_ALLOCATED = frozenset({"clusterIP", "clusterIPs", "nodePort", "healthCheckNodePort", "volumeName"})
_DEPLOYMENT_REVISION = "deployment.kubernetes.io/revision"


async def kinds(admin: Api) -> list[tuple[str, str]]:
    """(path, plural) of every namespaced kind that can be listed, in its preferred version."""
    groups = (await admin.request("GET", "/apis"))["groups"]
    versions = ["/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)]
    found = []
    for version in versions:
        for resource in (await admin.request("GET", version))["resources"]:
            name = resource["name"]
            if resource["namespaced"] and "list" in resource["verbs"] and "/" not in name and name not in _NOT_OURS:
                found.append((version, name))
    return found


async def read_all(admin: Api, known: Iterable[tuple[str, str]]) -> dict[str, list[tuple[str, Object]]]:
    """(plural, object) of everything there is, by namespace: one listing a kind."""
    found: dict[str, list[tuple[str, Object]]] = {}
    for version, plural in known:
        for item in await admin.items(f"{version}/{plural}"):
            found.setdefault(item["metadata"]["namespace"], []).append((plural, item))
    return found


async def read_one(admin: Api, known: Iterable[tuple[str, str]], namespace: str) -> list[tuple[str, Object]]:
    """The same of one namespace."""

    async def one(version: str, plural: str) -> list[tuple[str, Object]]:
        return [(plural, item) for item in await admin.items(f"{version}/namespaces/{namespace}/{plural}")]

    return [found for kind in await asyncio.gather(*(one(*kind) for kind in known)) for found in kind]


def of_namespace(objects: Iterable[tuple[str, Object]], *, history: bool = True) -> Snapshot:
    """The comparable state of one namespace.

    `history=False` forgets what an LLMDeployment remembers of its earlier specs (old ControllerRevisions with their
    boot ConfigMaps, how many there were, and what was read of models), and its journal: two LLMDeployments of one spec
    may have come to it by different ways.
    """
    objects = list(objects)
    current = {
        item["status"].get("rollout", {}).get("updateRevision")
        for plural, item in objects
        if plural == "llmdeployments" and item.get("status")
    }
    mounted = {name for plural, item in objects if plural == "deployments" for name in _mounted(item)}
    snapshot: Snapshot = {}
    counted: Counter[str] = Counter()
    for plural, item in objects:
        name = item["metadata"]["name"]
        if (plural, name) in _KUBERNETES_OWN:
            continue
        if plural in _COUNTED:
            counted[plural] += _counts(plural, item)
            continue
        if not history and plural == "controllerrevisions" and name not in current:
            continue
        if not history and plural == "configmaps" and item.get("immutable") and name not in mounted:
            continue
        snapshot[f"{plural}/{name}"] = comparable(item, history=history)
    snapshot["counted"] = dict(counted)
    return snapshot


def _mounted(deployment: Object) -> set[str]:
    """Names of the ConfigMaps that its pods are given."""
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or ()
    sources = [source for volume in volumes for source in volume.get("projected", {}).get("sources", ())]
    return {one["configMap"]["name"] for one in (*volumes, *sources) if "configMap" in one}


def _counts(plural: str, item: Object) -> bool:
    """Pods that are not on their way out; ReplicaSets that want pods (the others are history)."""
    if "deletionTimestamp" in item["metadata"]:
        return False
    return plural != "replicasets" or bool(item["spec"].get("replicas"))


def comparable(item: Object, *, history: bool = True) -> Object:
    """One object without what varies."""
    item = copy.deepcopy(item)
    metadata = item["metadata"]
    namespace = metadata["namespace"]
    for name in _VARYING_METADATA:
        metadata.pop(name, None)
    metadata.get("annotations", {}).pop(_DEPLOYMENT_REVISION, None)
    # The operator's digest of what it applied covers the owner's uid.
    metadata.get("annotations", {}).pop("millstream.dev/applied", None)
    _without_probe_key(item)
    _without_lease_name(item, namespace)
    if not history:
        item.pop("revision", None)
        item.get("status", {}).pop("decisions", None)
        metadata.get("annotations", {}).pop(JOURNALED_ANNOTATION, None)
    if metadata.get("ownerReferences"):
        item.pop("status", None)  # other controllers' word; the LLMDeployment's own status sums it up
    cleaned: Object = json.loads(json.dumps(_without(item)).replace(f".{namespace}.svc", ".NAMESPACE.svc"))
    return cleaned


def _without_probe_key(item: Object) -> None:
    """Every LLMDeployment has a probe key that is derived from its uid; its digest stands in the live settings."""
    for name, text in (item.get("data") or {}).items():
        if name == LIVE_FILE:
            live = json.loads(text)
            live.pop("probe_key_digests", None)
            item["data"][name] = json.dumps(live)


def _without_lease_name(item: Object, namespace: str) -> None:
    """The Lease of an operator that serves one namespace alone has the name of that namespace (`matrices`)."""
    manager = (item.get("status") or {}).get("managedBy", {})
    if manager.get("name") == namespace:
        manager["name"] = "NAMESPACE"


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(inner) for key, inner in value.items() if key not in _VARYING_FIELDS | _ALLOCATED}
    if isinstance(value, list):
        return [_without(inner) for inner in value]
    return value


def differences(expected: Snapshot, found: Snapshot) -> list[str]:
    """What is not the same, in a sentence each; empty when all is well."""
    found_differences = [f"{key} is missing" for key in expected.keys() - found.keys()]
    found_differences += [f"{key} should not be there" for key in found.keys() - expected.keys()]
    for key in sorted(expected.keys() & found.keys()):
        found_differences += [f"{key}: {line}" for line in _diff(expected[key], found[key], "")]
    return found_differences


def _diff(one: Any, other: Any, path: str) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        lines = []
        for key in sorted(one.keys() | other.keys()):
            lines += _diff(one.get(key), other.get(key), f"{path}.{key}")
        return lines
    if path.endswith(".conditions"):
        return _diff(_by_type(one), _by_type(other), path)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [line for i, (a, b) in enumerate(zip(one, other, strict=True)) for line in _diff(a, b, f"{path}[{i}]")]
    return [] if one == other else [f"{path} is {_short(other)} and not {_short(one)}"]


def _by_type(conditions: Any) -> dict[str, Object]:
    """A list of conditions is a map: what there is, not where it stands."""
    return {one["type"]: one for one in conditions or ()}


def _short(value: Any) -> str:
    return json.dumps(value)[:200]
