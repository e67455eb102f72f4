"""Whether a Deployment still asks for pods of an LLMDeployment that was deleted. Pure.

    Deployment               -> the uid of its only owner, while it asks for pods
    LLMDeployment, that uid  -> whether it is deleted together with its children

The garbage collector deletes the children of a deleted object by their owner references. A deletion that asks for
orphans (`propagationPolicy: Orphan`) leaves the finalizer `orphan` on the object, and the collector takes the
references away before the object goes: so a Deployment whose owner is gone, and that still names it, is no orphan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millstream_operator.kube.index import Index, OwnerKey, owner_key
from millstream_operator.kube.kinds import LLM_DEPLOYMENT
from millstream_operator.workloads.workload import Workload

Manifest = dict[str, Any]
# The finalizers by which the API server notes what a deletion asked for.
ORPHANS, FOREGROUND = "orphan", "foregroundDeletion"


def running_for(workloads: Workload, live: Manifest) -> str | None:
    """Return the uid of the LLMDeployment that a workload runs for; None where it must be left as it is.

    That is: it has no owner (orphaned), more than one (the collector keeps it for the others), another kind of owner,
    asks for no pods, or is being deleted: then its controller looks at its replicas no more.
    """
    metadata = live["metadata"]
    references: list[Manifest] = metadata.get("ownerReferences") or []
    if len(references) != 1 or metadata.get("deletionTimestamp") or workloads.read(live).wanted == 0:
        return None
    (reference,) = references
    group = str(reference.get("apiVersion", "")).partition("/")[0]
    is_ours = group == LLM_DEPLOYMENT.group and reference.get("kind") == LLM_DEPLOYMENT.kind
    return str(reference["uid"]) if is_ours and reference.get("controller") else None


def is_deleted(owner: Manifest | None, uid: str) -> bool:
    """Return whether the LLMDeployment of this uid is deleted with its children. `owner`: what has its name now.

    One that waits for another controller's finalizer keeps its pods, as with any owner in Kubernetes: the collector
    does not touch its children yet.
    """
    if owner is None or owner["metadata"]["uid"] != uid:
        return True  # uids never come back
    finalizers = owner["metadata"].get("finalizers") or ()
    is_terminating = bool(owner["metadata"].get("deletionTimestamp"))
    return is_terminating and FOREGROUND in finalizers and ORPHANS not in finalizers


def left_running(index: Index, workloads: Workload) -> Iterator[OwnerKey]:
    """Yield the deleted LLMDeployments of which the index has workloads that ask for pods."""
    for live in index.all(workloads.kind):
        uid, key = running_for(workloads, live), owner_key(workloads.kind, live)
        if uid is not None and is_deleted(index.get(LLM_DEPLOYMENT, key.namespace, key.name), uid):
            yield key
