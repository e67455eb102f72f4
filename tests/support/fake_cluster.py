"""A fake API server in memory: enough of server-side apply, versions and owners for the reconciler to be held to.

`FakeCluster` is the world (its objects, and the controllers that would act in it), `FakeClusterClient` stands in for
`kube/client.py` and counts, fails or is killed at the n-th request. What is imitated: uid,
resourceVersion, generation, defaulted fields, list-maps and field ownership, no-op applies that change nothing,
preconditions of a delete, immutable fields, and the garbage collector. What is not: validation beyond that, watches
(tests list), and more than one foreign field manager.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from millstream_operator.kube.client import NO_VERSION, ApiError, ClusterClient, Page
from millstream_operator.kube.kinds import DEPLOYMENT, JOB, OPTIONAL, POD, REPLICA_SET, Kind
from millstream_operator.rendering.preparation_record import CACHE_UID_ANNOTATION
from tests.support.fake_admission import defaulted, refuse, validate
from tests.support.fake_server_side_apply import merge, take_away

Manifest = dict[str, Any]
Answer = TypeVar("Answer")
Key = tuple[str, str, str]
NOW = "2025-01-01T00:00:00Z"


class Killed(Exception):
    """The operator's process ends here. Nothing in the operator may catch it."""


@dataclass(frozen=True)
class Request:
    """One request that reached the fake."""

    verb: str
    kind: str
    name: str
    subresource: str | None = None
    unless_there: bool = False  # an apply that an object of that name refuses

    @property
    def is_write(self) -> bool:
        return self.verb not in ("get", "list")


@dataclass(frozen=True)
class Fault:
    """Raise `error` at the n-th request (0 is the first), before it takes effect or after it."""

    at: int
    error: Exception
    after: bool = False
    writes_only: bool = True


class FakeCluster:
    """Objects by kind, namespace and name. What is taken in is copied."""

    def __init__(self) -> None:
        self.objects: dict[Key, Manifest] = {}
        self.events: list[Manifest] = []
        self.now = NOW  # when objects are created
        self.installed: set[Kind] = set()  # of the optional kinds: their CRDs
        self.refusing: dict[str, ApiError] = {}  # by kind: what an admission plugin or the validation says of a write
        self._owned: dict[tuple[Key, str], Manifest] = {}  # by object and part ("", "status"): what we applied last
        self._version = 100
        self._uids = 0

    # People and other controllers

    def put(self, manifest: Manifest) -> Manifest:
        """`kubectl apply` of somebody else: create an object, or replace everything but its metadata and status."""
        key = _key(manifest)
        live = self.objects.get(key)
        if live is None:
            return self._create(key, copy.deepcopy(manifest))
        changed = {**copy.deepcopy(manifest), "metadata": live["metadata"]}
        if "status" in live:
            changed["status"] = live["status"]
        return self._store(key, changed)

    def edit(self, kind: Kind, name: str, change: Callable[[Manifest], object], namespace: str = "team") -> Manifest:
        """Somebody's hand: `change` alters a copy of the live object in place."""
        key = (kind.kind, namespace, name)
        edited = copy.deepcopy(self.objects[key])
        change(edited)
        return self._store(key, edited)

    def remove(self, kind: Kind, name: str, namespace: str = "team") -> None:
        del self.objects[kind.kind, namespace, name]
        self._version += 1
        for part in ("", "status"):
            self._owned.pop(((kind.kind, namespace, name), part), None)

    def uninstall(self, kind: Kind) -> None:
        """`kubectl delete crd`: the kind goes, and every object of it."""
        self.installed.discard(kind)
        for live in self.all(kind):
            self.remove(kind, live["metadata"]["name"], live["metadata"]["namespace"])
        self._version += 1

    def resources_of(self, path: str) -> Manifest:
        """The discovery document of an optional group and version."""
        found = [kind for kind in self.installed if path == f"/apis/{kind.group}/{kind.version}"]
        if not found:
            refuse(404, "", "404 page not found")
        names = [{"name": kind.plural, "kind": kind.kind} for kind in found]
        return {"kind": "APIResourceList", "resources": [*names, *({"name": f"{n['name']}/status"} for n in names)]}

    def get(self, kind: Kind, name: str, namespace: str = "team") -> Manifest | None:
        return copy.deepcopy(self.objects.get((kind.kind, namespace, name)))

    def the(self, kind: Kind, name: str = "demo", namespace: str = "team") -> Manifest:
        """As `get`, for an object that has to be there."""
        return copy.deepcopy(self.objects[kind.kind, namespace, name])

    def all(self, kind: Kind) -> list[Manifest]:
        """Not copies: a stored state is replaced and never changed, by the fake as by the operator."""
        return [live for key, live in sorted(self.objects.items()) if key[0] == kind.kind]

    def collect_garbage(self) -> None:
        """Delete what a controller owned that is no longer there."""
        uids = {live["metadata"]["uid"] for live in self.objects.values()}
        for key, live in list(self.objects.items()):
            owners = live["metadata"].get("ownerReferences", [])
            if owners and not any(owner["uid"] in uids for owner in owners):
                del self.objects[key]
                self._version += 1

    def roll_out(self, namespace: str = "team") -> None:
        """The Deployment controller, the scheduler and the kubelets on a good day: every pod is ready."""
        for deployment in self.all(DEPLOYMENT):
            template, wanted = deployment["spec"]["template"], deployment["spec"]["replicas"]
            labels = template["metadata"]["labels"]
            name, digest = deployment["metadata"]["name"], labels["millstream.dev/revision"]
            owner = self.replica_set(deployment, digest)
            kept = {f"{name}-{digest}-{number}" for number in range(wanted)}
            for pod in self.all(POD):
                ours = pod["metadata"]["labels"].get("millstream.dev/deployment") == name and _serves(pod)
                if ours and pod["metadata"]["name"] not in kept:
                    self.remove(POD, pod["metadata"]["name"], namespace)
            for pod_name in sorted(kept):
                if self.get(POD, pod_name) is None:
                    pod = pod_of(pod_name, template)
                    pod["metadata"] |= {"ownerReferences": [owner]}
                    self.put(pod)
            self.set_status(
                DEPLOYMENT,
                name,
                {
                    "observedGeneration": deployment["metadata"]["generation"],
                    "replicas": wanted,
                    "updatedReplicas": wanted,
                    "readyReplicas": wanted,
                    "availableReplicas": wanted,
                },
            )

    def replica_set(self, deployment: Manifest, digest: str) -> Manifest:
        """Make the ReplicaSet of a revision where there is none. Returns a reference to it, as its controller."""
        metadata = deployment["metadata"]
        name = f"{metadata['name']}-{digest}"
        if self.get(REPLICA_SET, name) is None:
            of = {"kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"], "controller": True}
            uid = f"uid-of-{name}"  # the same in each run, so that pods of two runs can be compared
            meta = {"name": name, "namespace": metadata["namespace"], "uid": uid, "ownerReferences": [of]}
            self.put({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": meta})
        uid = self.the(REPLICA_SET, name)["metadata"]["uid"]
        return {"kind": "ReplicaSet", "name": name, "uid": uid, "controller": True}

    def run_jobs(
        self, answer: str | Callable[[Manifest], str], code: int = 0, at: str = NOW, started: str = "", **ended: Any
    ) -> None:
        """The Job controller, the scheduler and the kubelet: every Job that has not ended runs to its end.

        `started`: when its pod did; by default as it was created. `ended`: what else the kubelet says about the
        container's end.
        """
        for job in self.all(JOB):
            if job.get("status", {}).get("conditions"):
                continue
            name = job["metadata"]["name"]
            said = answer if isinstance(answer, str) else answer(job)
            state = {"terminated": {"exitCode": code, "message": said, "finishedAt": at, **ended}}
            (first,) = job["spec"]["template"]["spec"]["containers"]
            container = {"name": first["name"], "state": state}
            status = {"startTime": started or job["metadata"]["creationTimestamp"], "containerStatuses": [container]}
            pod = pod_of(f"{name}-x", job["spec"]["template"], ready=False, **status)
            pod["metadata"]["ownerReferences"] = [{"kind": "Job", "name": name, "uid": job["metadata"]["uid"]}]
            self.put(pod)
            kind = "Failed" if code else "Complete"
            self.set_status(
                JOB, name, {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": at}]}, "team"
            )

    def set_status(self, kind: Kind, name: str, status: Manifest, namespace: str = "team") -> None:
        self.edit(kind, name, lambda live: live.update(status=copy.deepcopy(status)), namespace)

    def snapshot(self) -> dict[Key, Manifest]:
        """Every object without what differs between two equal worlds: versions, uids of children, counters."""
        return {key: _comparable(live) for key, live in sorted(self.objects.items())}

    # The API server

    def apply(self, manifest: Mapping[str, Any], subresource: str | None) -> Manifest:
        key, given = _key(manifest), copy.deepcopy(dict(manifest))
        live = self.objects.get(key)
        if live is None and subresource is not None:
            refuse(404, "NotFound", f"{key[0].lower()}s {key[2]!r} not found")
        version = given["metadata"].pop("resourceVersion", None)
        if live is not None and version not in (None, live["metadata"]["resourceVersion"]):
            refuse(409, "Conflict", f"{key[2]!r}: the object has been modified")
        given["metadata"] = {k: v for k, v in given["metadata"].items() if k not in ("name", "namespace")}
        part = subresource or ""
        content = {"status": given["status"]} if subresource else {k: v for k, v in given.items() if k != "status"}
        before = self._owned.get((key, part), {})
        if live is None:
            created = self._create(key, {**copy.deepcopy(dict(manifest))})
            self._owned[key, part] = content
            return created
        merged = copy.deepcopy(live)
        take_away(merged, before, content)
        merged = merge(merged, content)
        stored = self._store(key, merged)
        self._owned[key, part] = content
        return stored

    def _create(self, key: Key, manifest: Manifest) -> Manifest:
        self._uids += 1
        manifest["metadata"].setdefault("uid", f"uid-{self._uids}")
        manifest["metadata"].setdefault("creationTimestamp", self.now)
        manifest["metadata"]["generation"] = 1
        return self._store(key, manifest)

    def _store(self, key: Key, manifest: Manifest) -> Manifest:
        manifest = defaulted(manifest)
        live = self.objects.get(key)
        validate(manifest, live)
        if key[0] in self.refusing and manifest != live:
            raise self.refusing[key[0]]
        if live is not None:
            if manifest == live:
                return copy.deepcopy(live)  # a no-op bumps nothing
            if manifest.get("spec") != live.get("spec"):
                manifest["metadata"]["generation"] = live["metadata"]["generation"] + 1
        self._version += 1
        manifest["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = manifest
        return copy.deepcopy(manifest)

    @property
    def version(self) -> str:
        return str(self._version)


class FakeClusterClient(ClusterClient):
    """The operator's connection to a `FakeCluster`. A new one stands for a new process."""

    def __init__(self, cluster: FakeCluster, fault: Fault | None = None) -> None:
        super().__init__(_no_login)
        self.cluster, self.fault = cluster, fault
        self.requests: list[Request] = []

    @property
    def written(self) -> list[Request]:
        return [request for request in self.requests if request.is_write]

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        return self._do(Request("get", kind.kind, name), lambda: self.cluster.get(kind, name, namespace))

    async def list(self, kind: Kind, namespace: str | None, selector: str | None) -> tuple[list[Manifest], str]:
        def found() -> tuple[list[Manifest], str]:
            items = [
                live
                for live in self.cluster.all(kind)
                if (namespace is None or live["metadata"]["namespace"] == namespace)
                and (selector is None or selector in live["metadata"].get("labels", {}))
            ]
            return items, self.cluster.version

        return self._do(Request("list", kind.kind, ""), found)

    async def pages(
        self, kind: Kind, namespace: str | None, query: Mapping[str, str], limit: int = 500
    ) -> AsyncIterator[Page]:
        yield Page(*await self.list(kind, namespace, query.get("labelSelector")))

    async def apply(self, manifest: Mapping[str, Any], subresource: str | None = None) -> Manifest:
        self.writes += 1
        metadata = manifest["metadata"]
        unless_there = metadata.get("resourceVersion") == NO_VERSION
        request = Request("apply", manifest["kind"], metadata["name"], subresource, unless_there)
        return self._do(request, lambda: self.cluster.apply(manifest, subresource))

    async def create(self, manifest: Mapping[str, Any]) -> Manifest:
        self.writes += 1

        def do() -> Manifest:
            assert manifest["kind"] == "Event", "the operator creates nothing else"
            self.cluster.events.append(copy.deepcopy(dict(manifest)))
            return dict(manifest)

        return self._do(Request("create", manifest["kind"], manifest["metadata"].get("name", "")), do)

    async def merge(self, kind: Kind, namespace: str, name: str, change: Mapping[str, Any]) -> Manifest:
        self.writes += 1

        def do() -> Manifest:
            live = self.cluster.get(kind, name, namespace)
            if live is None:
                refuse(404, "NotFound", f"{kind.plural} {name!r} not found")
            version = change.get("metadata", {}).get("resourceVersion")
            if version not in (None, live["metadata"]["resourceVersion"]):
                refuse(409, "Conflict", f"{name!r}: the object has been modified")
            return self.cluster.edit(kind, name, lambda live: _merge_patch(live, change), namespace)

        return self._do(Request("merge", kind.kind, name), do)

    async def delete(self, kind: Kind, manifest: Mapping[str, Any]) -> None:
        self.writes += 1
        metadata = manifest["metadata"]

        def do() -> None:
            live = self.cluster.get(kind, metadata["name"], metadata["namespace"])
            if live is None:
                return
            for field in ("uid", "resourceVersion"):
                if live["metadata"][field] != metadata[field]:
                    refuse(409, "Conflict", f"the {field} in the precondition differs from the one in the record")
            self.cluster.remove(kind, metadata["name"], metadata["namespace"])

        self._do(Request("delete", kind.kind, metadata["name"]), do)

    async def get_raw(self, path: str, timeout_seconds: float) -> Manifest:
        return self._do(Request("get", "APIResourceList", path), lambda: self.cluster.resources_of(path))

    def _do(self, request: Request, act: Callable[[], Answer]) -> Answer:
        fault = self.fault
        counted = self.written if fault is not None and fault.writes_only else self.requests
        hit = fault is not None and fault.at == len(counted) and (request.is_write or not fault.writes_only)
        self.requests.append(request)
        if request.verb != "get" and request.kind in {k.kind for k in OPTIONAL if k not in self.cluster.installed}:
            refuse(404, "NotFound", "the server could not find the requested resource")
        if hit and fault is not None and not fault.after:
            raise fault.error
        answer = act()
        if hit and fault is not None:
            raise fault.error
        return answer


def pod_of(name: str, template: Manifest, *, ready: bool = True, **status: Any) -> Manifest:
    """A pod from a template, ready or with a status of the caller's."""
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "labels": dict(template["metadata"]["labels"])},
        "spec": copy.deepcopy(template["spec"]),
        "status": {"conditions": conditions} | status,
    }


def _serves(pod: Manifest) -> bool:
    """Is it a pod of the Deployment, and not of a Job?"""
    return bool(pod["metadata"]["labels"].get("millstream.dev/role") == "leader")


def _no_login() -> NoReturn:
    raise AssertionError("the fake never connects")


def _key(manifest: Mapping[str, Any]) -> Key:
    return manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _merge_patch(live: Manifest, change: Mapping[str, Any]) -> None:
    for key, value in change.items():
        if value is None:
            live.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(live.get(key), dict):
            _merge_patch(live[key], value)
        else:
            live[key] = copy.deepcopy(value)


def _comparable(live: Manifest) -> Manifest:
    live = copy.deepcopy(live)
    for varying in ("uid", "resourceVersion", "generation"):
        live["metadata"].pop(varying, None)
    live["metadata"].get("annotations", {}).pop(CACHE_UID_ANNOTATION, None)
    for reference in live["metadata"].get("ownerReferences", ()):
        if reference["kind"] == DEPLOYMENT.kind:
            reference.pop("uid", None)
    if live["kind"] == DEPLOYMENT.kind:
        live.get("status", {}).pop("observedGeneration", None)
    return live
