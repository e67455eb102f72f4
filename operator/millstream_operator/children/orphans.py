"""Which objects without an owner are children that a deleted LLMDeployment of the same name left behind. Pure.

An orphan has no owner reference at all, the labels of a child of that name, the mark of the operator's last apply, and
a name that the operator gives. Without the record of a revision none is adopted: nothing but the records shows which
pods ran, and an object that somebody labelled by hand is not taken.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.kube.diff import APPLIED_ANNOTATION
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import (
    CONTROLLER_REVISION,
    DEPLOYMENT,
    HORIZONTAL_POD_AUTOSCALER,
    OPTIONAL,
    OWNED,
    Kind,
)
from millstream_operator.rendering.names import common_labels
from millstream_operator.rendering.revision import read_revision

Manifest = dict[str, Any]
# Records come last: they are what shows that the others are orphans.
KINDS = tuple(
    sorted((*OWNED, HORIZONTAL_POD_AUTOSCALER, *OPTIONAL), key=lambda kind: kind is CONTROLLER_REVISION),
)


def is_orphan(kind: Kind, manifest: Manifest, name: str) -> bool:
    """Return whether the object was left by a deleted LLMDeployment of this name."""
    metadata = manifest["metadata"]
    if metadata.get("ownerReferences") or metadata.get("deletionTimestamp"):
        return False
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    is_named_so = metadata["name"] == name or (kind is not DEPLOYMENT and metadata["name"].startswith(f"{name}-"))
    is_labelled = all(labels.get(label) == value for label, value in common_labels(name).items())
    is_known = kind is not CONTROLLER_REVISION or _is_readable(manifest)
    return is_named_so and is_labelled and APPLIED_ANNOTATION in annotations and is_known


def possible_orphans(index: Index, key: OwnerKey, uid: str) -> list[Manifest]:
    """Return what may be an orphan of this name, records last; none where the index knows no orphan for certain.

    Kinds are watched apart, and some are listed once a minute: while one orphan is known, what still names the deleted
    owner may be one, too. `uid`: of the LLMDeployment that has the name now.
    """
    known = [(kind, live) for kind in KINDS for live in index.children(key, kind)]
    if not any(is_orphan(kind, live, key.name) for kind, live in known):
        return []
    return [live for kind, live in known if is_orphan(kind, _without_namesake(live, key, uid), key.name)]


def _without_namesake(manifest: Manifest, key: OwnerKey, uid: str) -> Manifest:
    """Return the object without its references to a deleted LLMDeployment of this name."""
    references = manifest["metadata"].get("ownerReferences") or ()
    kept = [one for one in references if (one["kind"], one["name"]) != (key.kind, key.name) or one["uid"] == uid]
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": kept}}


def _is_readable(record: Manifest) -> bool:
    """Return whether this version knows the record's format, and it is whole: anybody may have written it."""
    try:
        return read_revision(record) is not None
    except (KeyError, TypeError, AttributeError):
        return False
