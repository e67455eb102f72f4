"""The index: watched objects in memory, by key and by the owner (an LLMDeployment) that they belong to.

Reconciling reads from here, so a steady state costs the API server nothing. Two sources write to it: the watches, and
the answers to our own writes, which come earlier. The higher resourceVersion wins, so neither restores an older state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from millstream_operator.kube.interning import ManifestInterner
from millstream_operator.kube.kinds import (
    CONTROLLER_REVISION,
    HORIZONTAL_POD_AUTOSCALER,
    LLM_DEPLOYMENT,
    OWNER_LABELS,
    OWNERS,
    Kind,
)
from millstream_operator.kube.large_records import LARGE_BYTES, is_thin, thinned, to_thin

Manifest = dict[str, Any]
KUBECTL_COPY = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(frozen=True, slots=True, order=True)
class OwnerKey:
    """An object of our API that owns others, whether it still exists or not: an LLMDeployment, unless `kind` differs.

    Two kinds may have objects of the same name, so the kind is part of every key: in the queue, in the index, and in
    the accounts of GPUs.
    """

    namespace: str
    name: str
    kind: str = LLM_DEPLOYMENT.kind

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def owner_key(kind: Kind, manifest: Manifest) -> OwnerKey:
    """Return the owner that an object of a watched kind belongs to: by its controller, else by its label."""
    metadata = manifest["metadata"]
    if kind in OWNERS:
        return OwnerKey(metadata["namespace"], metadata["name"], kind.kind)
    for reference in metadata.get("ownerReferences") or ():
        if reference.get("controller") and _is_ours(reference):
            return OwnerKey(metadata["namespace"], reference["name"], reference["kind"])
    labels = metadata.get("labels") or {}
    for label, owner in OWNER_LABELS.items():
        if label in labels:
            return OwnerKey(metadata["namespace"], labels[label], owner.kind)
    return OwnerKey(metadata["namespace"], "")


def affected_owners(kind: Kind, manifest: Manifest) -> set[OwnerKey]:
    """Return the owners that a change of an object may concern: by its labels, and by its owner references."""
    metadata = manifest["metadata"]
    labels = metadata.get("labels") or {}
    owners = {
        OwnerKey(metadata["namespace"], reference["name"], reference["kind"])
        for reference in metadata.get("ownerReferences") or ()
        if _is_ours(reference)
    }
    if kind not in OWNERS:
        named = {label: owner for label, owner in OWNER_LABELS.items() if label in labels}
        owners |= {OwnerKey(metadata["namespace"], labels[label], owner.kind) for label, owner in named.items()}
    return {key for key in owners | {owner_key(kind, manifest)} if key.name}


def _is_ours(reference: Manifest) -> bool:
    """Whether an owner reference names a kind of our API, in whichever version."""
    group = str(reference.get("apiVersion", "")).partition("/")[0]
    return any(owner.group == group and owner.kind == reference.get("kind") for owner in OWNERS)


def _slim_metadata(manifest: Manifest) -> Manifest:
    """Return the metadata without what others keep in it: managed fields, and kubectl's copy of the whole object.

    Of the managed fields it has who paused what is paused: a status names the hand.
    """
    slim = {name: value for name, value in manifest["metadata"].items() if name != "managedFields"}
    annotations = slim.get("annotations")
    if annotations and KUBECTL_COPY in annotations:
        slim["annotations"] = {name: value for name, value in annotations.items() if name != KUBECTL_COPY}
    if (manifest.get("spec") or {}).get("paused"):
        entries = manifest["metadata"].get("managedFields") or ()
        hands = [one for one in entries if "f:paused" in ((one.get("fieldsV1") or {}).get("f:spec") or {})]
        slim["managedFields"] = [{"manager": one.get("manager", "")} for one in hands]
    return slim


class Index:
    """Objects by kind, namespace and name. Manifests in it are shared: never change one.

    `on_newer` is called with each newer state, from either source, before it is kept; `on_change` with each object
    that has another state now, or is gone.
    """

    def __init__(
        self,
        on_newer: Callable[[Kind, Manifest], None] = lambda _kind, _manifest: None,
        on_change: Callable[[Kind, Manifest], None] = lambda _kind, _manifest: None,
    ) -> None:
        self._on_newer, self._on_change, self._interner = on_newer, on_change, ManifestInterner()
        self._objects: dict[tuple[str, str, str], Manifest] = {}
        self._large_records: dict[tuple[str, str, str], int] = {}  # about their bytes, also where the data was dropped
        self._children: defaultdict[tuple[OwnerKey, str], set[tuple[str, str, str]]] = defaultdict(set)

    def put(self, kind: Kind, manifest: Manifest) -> bool:
        """Keep an object unless a newer state of it is known. Return whether anything relevant changed."""
        key = _key(kind, manifest)
        known = self._objects.get(key)
        if known is not None and _version(manifest) < _version(known) + (0 if _is_thinned(kind, known) else 1):
            return False
        if known is not None:
            self._unlink(kind, key, known)
        self._on_newer(kind, manifest)
        before = self._interner.num_bytes
        slim = self._interner.copy({**manifest, "metadata": _slim_metadata(manifest)})
        self._objects[key] = slim
        self._children[owner_key(kind, slim), kind.kind].add(key)
        if kind is CONTROLLER_REVISION:
            self._thin_records(owner_key(kind, slim), key, self._interner.num_bytes - before)
        self._on_change(kind, self._objects[key])
        return known is None or _relevant_state(kind, known) != _relevant_state(kind, slim)

    def remove(self, kind: Kind, manifest: Manifest) -> bool:
        """Forget an object, unless another one of its name is known. Return whether something changed."""
        key = _key(kind, manifest)
        known = self._objects.get(key)
        if known is None or known["metadata"]["uid"] != manifest["metadata"]["uid"]:
            return False
        self._unlink(kind, key, known)
        self._large_records.pop(key, None)
        del self._objects[key]
        self._on_change(kind, known)
        return True

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        return self._objects.get((kind.kind, namespace, name))

    def children(self, owner: OwnerKey, kind: Kind) -> list[Manifest]:
        """Return objects of a kind with the owner's label, by name. Only their references say whether it owns them."""
        return [self._objects[key] for key in sorted(self._children.get((owner, kind.kind), ()))]

    def all(self, kind: Kind) -> Iterator[Manifest]:
        return (manifest for key, manifest in list(self._objects.items()) if key[0] == kind.kind)

    def replace(self, kind: Kind, listed: Iterable[Manifest], list_version: str) -> set[OwnerKey]:
        """Replace all objects of a kind by a whole listing. Return the LLMDeployments that the changes concern."""
        manifests = list(listed)
        present = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in manifests}
        return self.put_page(kind, manifests) | self.remove_absent(kind, present, list_version)

    def put_page(self, kind: Kind, listed: Iterable[Manifest]) -> set[OwnerKey]:
        """Keep the objects of a page of a listing. Return the LLMDeployments that the changes concern."""
        changed: set[OwnerKey] = set()
        for manifest in listed:
            if self.put(kind, manifest):
                changed |= affected_owners(kind, manifest)
        return changed

    def remove_absent(self, kind: Kind, present: Collection[tuple[str, str]], list_version: str) -> set[OwnerKey]:
        """Forget what a whole listing does not have; `present`: namespaces and names. Return as `put_page`.

        An object that is newer than the listing stays: the watch delivered it after the listing was made.
        """
        changed: set[OwnerKey] = set()
        for manifest in list(self.all(kind)):
            if _key(kind, manifest)[1:] not in present and _version(manifest) <= int(list_version):
                self.remove(kind, manifest)
                changed |= affected_owners(kind, manifest)
        return changed

    def _thin_records(self, owner: OwnerKey, key: tuple[str, str, str], num_bytes: int) -> None:
        """Note the size of a record that was put, and drop the data of those of its owner that are not kept whole."""
        if num_bytes < LARGE_BYTES:
            self._large_records.pop(key, None)
            return
        self._large_records[key] = num_bytes
        records = self.children(owner, CONTROLLER_REVISION)
        names = [record["metadata"]["name"] for record in records]
        sizes = {name: self._large_records.get((*key[:2], name), 0) for name in names}
        for record in to_thin(records, sizes):
            self._objects[_key(CONTROLLER_REVISION, record)] = thinned(record)

    def _unlink(self, kind: Kind, key: tuple[str, str, str], manifest: Manifest) -> None:
        link = owner_key(kind, manifest), kind.kind
        self._children[link].discard(key)
        if not self._children[link]:
            del self._children[link]


def _key(kind: Kind, manifest: Manifest) -> tuple[str, str, str]:
    return kind.kind, manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _is_thinned(kind: Kind, manifest: Manifest) -> bool:
    """Whether the index dropped the data of an object: the same state, read again, brings it back."""
    return kind is CONTROLLER_REVISION and is_thin(manifest)


def _relevant_state(kind: Kind, manifest: Manifest) -> object:
    """Return what of a state matters. An autoscaler's readings change every few seconds, and nothing here uses them."""
    if kind is not HORIZONTAL_POD_AUTOSCALER:
        return _version(manifest)
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "resourceVersion"}
    conditions = (manifest.get("status") or {}).get("conditions") or []
    verdicts = sorted((one["type"], one.get("status", ""), one.get("reason", "")) for one in conditions)
    return metadata, manifest.get("spec"), verdicts


def _version(manifest: Manifest) -> int:
    """resourceVersions of one kind are ordered integers (guaranteed since Kubernetes 1.35, true with etcd before)."""
    return int(manifest["metadata"]["resourceVersion"])
