"""Write a status; where the API server refuses it, write one that it accepts, and say what is missing.

What was refused is remembered, so that a steady state does not try it again in every turn. After a restart it is tried
once more, which changes nothing in the cluster.

A status belongs to one object, and not to the next one of its name: a turn may be slow, and the object deleted and
created again meanwhile. The API server ignores a uid in the body of a status (its strategy restores the metadata of
the stored object), so every write names the resourceVersion that it was made for, and a Conflict is tried again only
where the stored object still has the same uid and no other release has taken it over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from millstream_operator.kube.client import ApiError, ClusterClient, refused_fields
from millstream_operator.kube.index import Index
from millstream_operator.kube.kinds import LLM_DEPLOYMENT
from millstream_operator.leadership.ownership import MANAGED_BY, Release, manager_of
from millstream_operator.status.accepted_status import LEVELS, Refusal, accepted, refusal_of

log = logging.getLogger(__name__)
Manifest = dict[str, Any]
INVALID = (400, 422)
CONFLICTS = 5  # in a row: somebody writes this object as fast as we do, and the next turn begins from its newest state


class StatusWriter:
    """For use within one event loop. `now` is RFC 3339, UTC. `release`: recorded in every status; None: in none."""

    def __init__(
        self, client: ClusterClient, index: Index, now: Callable[[], str], release: Release | None = None
    ) -> None:
        self._client, self._index, self._now, self._release = client, index, now, release
        self._refused: dict[str, Refusal] = {}  # by the owner's uid

    def acceptable(self, uid: str, status: Manifest, previous: Manifest) -> Manifest:
        """Return the status with the release that writes it, and without what is known to be refused."""
        if self._release is not None:
            status = {**status, MANAGED_BY: self._release.as_json()}
        known = self._refused.get(uid)
        if known is None or not known.is_about(status):
            self._refused.pop(uid, None)
            return status
        return accepted(status, known, previous.get("conditions") or (), self._now())

    async def write(self, subject: Manifest, status: Manifest, previous: Manifest) -> Manifest:
        """Write and return what was accepted. `subject` has apiVersion, kind, and metadata with name and uid.

        Raises:
            ApiError: refused for another reason than its content, or even without its optional parts.
        """
        try:
            await self._apply(subject, status)
            return status
        except ApiError as error:
            if error.status not in INVALID:
                raise
            refused = error
        for level in LEVELS:
            refusal = refusal_of(status, refused.message, refused_fields(refused), level)
            smaller = accepted(status, refusal, previous.get("conditions") or (), self._now())
            try:
                await self._apply(subject, smaller)
            except ApiError as error:
                if error.status not in INVALID:
                    raise
                refused = error
                continue
            name = f"{subject['metadata']['namespace']}/{subject['metadata']['name']}"
            log.error("%s: the API server refuses a part of its status, which is left out: %s", name, refusal.message)
            self._refused[subject["metadata"]["uid"]] = refusal
            return smaller
        raise refused

    def forget(self, uid: str) -> None:
        self._refused.pop(uid, None)

    async def _apply(self, subject: Manifest, status: Manifest) -> None:
        """Raises ApiError, with 404 where the object is gone, be there another one of its name or not."""
        name, namespace = subject["metadata"]["name"], subject["metadata"]["namespace"]
        live = self._index.get(LLM_DEPLOYMENT, namespace, name)
        for attempt in range(CONFLICTS):
            if live is None or live["metadata"]["uid"] != subject["metadata"]["uid"]:
                raise ApiError(
                    404, "NotFound", f"LLMDeployment {namespace}/{name} was deleted before its status was written"
                )
            manager = manager_of(live.get("status") or {})
            if self._release is not None and manager not in (None, self._release):
                raise ApiError(409, "Conflict", f"the release with the Lease {manager} has taken it over")
            metadata = {"name": name, "namespace": namespace, "resourceVersion": live["metadata"]["resourceVersion"]}
            body = {**{key: subject[key] for key in ("apiVersion", "kind")}, "metadata": metadata, "status": status}
            try:
                self._index.put(LLM_DEPLOYMENT, await self._client.apply(body, subresource="status"))
                return
            except ApiError as error:
                if error.status != 409 or attempt == CONFLICTS - 1:
                    raise
            live = await self._client.get(LLM_DEPLOYMENT, namespace, name)
