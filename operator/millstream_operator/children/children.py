"""Children of one LLMDeployment: apply those that differ, delete those not wanted, leave objects of other owners alone.

Reads come from the index; a live GET precedes a forced apply and a delete. Every method may be interrupted before or
after any of its writes: the next turn compares again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.admission import admission_refusal
from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.kube.client import ApiError, ClusterClient, refused_fields
from millstream_operator.kube.diff import LastApplied, with_digest
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import Kind, kind_of
from millstream_operator.queue.work_queue import RetryLater

Manifest = dict[str, Any]
# Refusals that a retry does not change; any other error may pass, and is retried.
REFUSED = (400, 403, 422)


class Children:
    """Reads and writes of children, for the reconciler alone."""

    def __init__(self, client: ClusterClient, index: Index) -> None:
        self._client, self._index = client, index
        self._last_applied = LastApplied()
        self._foreign: set[tuple[str, str, str]] = set()  # names that are taken: read first, do not try to create

    def list_owned(self, owner: LLMDeployment, key: OwnerKey, kind: Kind) -> list[Manifest]:
        """List the children of a kind that the owner controls, by name."""
        return [child for child in self._index.children(key, kind) if controlled_by(child, owner)]

    def get_owned(self, owner: LLMDeployment, key: OwnerKey, kind: Kind, name: str | None = None) -> Manifest | None:
        """Return the child of that name (the owner's name by default), or None where the owner does not control it."""
        live = self._index.get(kind, key.namespace, name or key.name)
        return live if live is not None and controlled_by(live, owner) else None

    async def apply_all(self, owner: LLMDeployment, wanted: Iterable[Manifest]) -> Diagnosis | None:
        """Apply what differs, in this order. Return why the first one that cannot be applied is refused, or what its
        name waits for, else None.

        Raises:
            ApiError, ApiUnreachable: an error that a retry may not meet again.
            RetryLater: a stranger's object of the same name is still being deleted.
        """
        for manifest in map(with_digest, wanted):
            try:
                problem = await self._apply(owner, manifest)
            except ApiError as error:
                problem = _refusal(error, manifest)
                if problem is None or namespace_is_terminating(error):
                    raise
            if problem is not None:
                return problem
        return None

    async def delete(self, owner: LLMDeployment, to_delete: Iterable[Manifest]) -> None:
        """Delete children, each after a live read that shows it is still ours."""
        for child in to_delete:
            kind = kind_of(child)
            live = await self._client.get(kind, owner.metadata.namespace or "", child["metadata"]["name"])
            if live is not None and controlled_by(live, owner):
                await self._client.delete(kind, live)
            self._index.remove(kind, child)
            self._last_applied.forget(child["metadata"]["uid"])

    async def _apply(self, owner: LLMDeployment, wanted: Manifest) -> Diagnosis | None:
        kind, metadata = kind_of(wanted), wanted["metadata"]
        live = self._index.get(kind, metadata["namespace"], metadata["name"])
        if live is not None and controlled_by(live, owner) and not self._last_applied.needs_apply(live, wanted):
            return None
        place = kind.kind, metadata["namespace"], metadata["name"]
        # An object that is not in the index most likely does not exist; where it does, this changes nothing.
        if live is None and place not in self._foreign and (made := await self._client.apply_new(wanted)) is not None:
            self._record_applied(kind, made, wanted)
            return None
        # The index holds labelled objects only and may lag: read who owns the object before a forced apply.
        live = await self._client.get(kind, metadata["namespace"], metadata["name"])
        self._foreign.discard(place)
        if live is not None and not controlled_by(live, owner):
            self._foreign.add(place)
            if (waits := _waits_for_finalizers(kind.kind, live)) is not None:
                return waits
            if _belonged_to_namesake(live, owner):
                return _waits_for_collector(kind.kind, live)
            if live["metadata"].get("deletionTimestamp"):
                raise RetryLater(f"waiting for the old {kind.kind} {metadata['name']} to be deleted", 1.0)
            return _name_conflict(kind.kind, live)
        if live is not None and not self._last_applied.needs_apply(live, wanted):
            self._index.put(kind, live)
            return None
        self._record_applied(kind, await self._write(kind, live, wanted), wanted)
        return None

    def _record_applied(self, kind: Kind, answer: Manifest, wanted: Manifest) -> None:
        """Remember the answer to an apply."""
        self._last_applied.applied(answer, wanted)
        self._index.put(kind, answer)

    async def _write(self, kind: Kind, live: Manifest | None, wanted: Manifest) -> Manifest:
        """Server-side apply, with a merge patch before it where the server refuses the apply alone.

        An edit of a Service's port from 80 to 81 makes a second port that belongs to the editor. Ours would be added
        with the same name, which the server refuses. A merge patch replaces whole lists, so it restores ours.
        """
        try:
            return await self._client.apply(wanted)
        except ApiError as error:
            if error.status != 422 or live is None or "spec" not in wanted:
                raise
        metadata = wanted["metadata"]
        await self._client.merge(kind, metadata["namespace"], metadata["name"], {"spec": wanted["spec"]})
        return await self._client.apply(wanted)


def _controller(manifest: Manifest) -> Manifest:
    references = manifest["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), {})


def controller_uid(manifest: Manifest) -> str | None:
    """Return the uid of the object's controller; None where it has none."""
    found: str | None = _controller(manifest).get("uid")
    return found


def controlled_by(manifest: Manifest, owner: LLMDeployment) -> bool:
    return controller_uid(manifest) == owner.metadata.uid


def _belonged_to_namesake(manifest: Manifest, owner: LLMDeployment) -> bool:
    """Return whether it is a child of a deleted LLMDeployment of the same name, not garbage-collected yet."""
    controller = _controller(manifest)
    return controller.get("kind") == owner.kind and controller.get("name") == owner.name


def _waits_for_finalizers(kind: str, live: Manifest) -> Diagnosis | None:
    """Return why an object that is being deleted is still there; None where only the garbage collector is awaited.

    A finalizer may take minutes (a claim that a pod still mounts), or for ever where its controller is gone.
    """
    metadata = live["metadata"]
    finalizers = ", ".join(metadata.get("finalizers") or ())
    if not finalizers or not metadata.get("deletionTimestamp"):
        return None
    return Diagnosis(
        Reason.STARTING,
        f"The name of {kind} {metadata['name']} is taken by an object that is being deleted since "
        f"{metadata['deletionTimestamp']} and waits for its finalizers: {finalizers}.",
        "If it stays, look for the controller that removes them, or choose another metadata.name.",
    )


def _waits_for_collector(kind: str, live: Manifest) -> Diagnosis:
    """Its deletion is an event of the watch, which begins the next turn."""
    return Diagnosis(
        Reason.STARTING,
        f"The name of {kind} {live['metadata']['name']} is taken by that of a deleted LLMDeployment of the same name, "
        "which waits to be deleted by the garbage collector.",
        "That takes minutes where much is deleted at once. If it stays, look whether kube-controller-manager runs.",
    )


def _name_conflict(kind: str, live: Manifest) -> Diagnosis:
    name = live["metadata"]["name"]
    controller = _controller(live)
    whose = f"it belongs to {controller['kind']} {controller['name']}" if controller else "it has no owner"
    return Diagnosis(
        Reason.NAME_CONFLICT,
        f"A {kind} named {name} already exists and {whose}; it is left alone. Delete it, or choose another "
        "metadata.name for the LLMDeployment.",
    )


def _refusal(error: ApiError, wanted: Manifest) -> Diagnosis | None:
    """Return why the API server refuses a child as it is; None for an error that may pass."""
    what = f"{wanted['kind']} {wanted['metadata']['name']}"
    if (found := admission_refusal(error.message, what)) is not None:
        return found
    if error.status not in REFUSED:
        return None
    fields = ", ".join(field for field in refused_fields(error) if field not in error.message)
    said = f"{what}{f' ({fields})' if fields else ''}: {error.message}"
    if error.status == 403:
        return Diagnosis(Reason.ADMISSION_DENIED, sentence(f"The cluster does not admit the {said}"))
    return Diagnosis(Reason.APPLY_REFUSED, sentence(f"The API server refuses the {said}"))


def namespace_is_terminating(error: ApiError) -> bool:
    return error.status == 403 and "being terminated" in error.message
