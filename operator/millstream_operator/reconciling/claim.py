"""Stage "claim": before anything is written, whether this release manages the LLMDeployment.

Nobody's: `status.managedBy` is written in a request of its own, which names the resourceVersion: of two releases that
find it unmanaged at once, one gets a Conflict and looks again. Another's: nothing is written but one Event, and the
key comes back. The first Event keeps its name over restarts of the operator, so that it is not written again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

from millstream_operator.kube.client import ApiError, ClusterClient
from millstream_operator.kube.event_queue import EventPublisher, EventWriter
from millstream_operator.kube.index import Index, OwnerKey, owner_key
from millstream_operator.kube.kinds import LLM_DEPLOYMENT
from millstream_operator.leadership.ownership import (
    MANAGED_BY,
    LeaseSight,
    ManagerDecision,
    Release,
    decide_manager,
    managed_by_another,
    manager_of,
)
from millstream_operator.leadership.release_leases import ReleaseLeases
from millstream_operator.status.events import managed_by_another_event

log = logging.getLogger(__name__)
Manifest = dict[str, Any]
INVALID = (400, 422)


class ClaimStage:
    """`release`: this one. `left_to_others`: by uid, what another release manages."""

    def __init__(
        self,
        client: ClusterClient,
        index: Index,
        release: Release,
        now: Callable[[], str],
        clock: Callable[[], float],
        events: EventPublisher | None = None,
    ) -> None:
        self._client, self._index, self._release, self._now = client, index, release, now
        self._leases = ReleaseLeases(client, clock, now)
        self._events = events or EventWriter(client)
        self.left_to_others: dict[str, OwnerKey] = {}

    async def run(self, manifest: Manifest) -> Manifest | None:
        """Return the object as it is now; None where another release manages it.

        Raises:
            ApiError, ApiUnreachable: it is not known, or the claim was not written; the next turn looks again.
        """
        recorded, uid = manager_of(manifest.get("status") or {}), manifest["metadata"]["uid"]
        is_others = recorded is not None and recorded != self._release
        sight = await self._leases.look(recorded) if recorded is not None and is_others else None
        decision = decide_manager(recorded, self._release, sight)
        if decision is ManagerDecision.LEAVE and recorded is not None and sight is not None:
            await self._leave(manifest, recorded, sight)
            return None
        self.left_to_others.pop(uid, None)
        return manifest if decision is ManagerDecision.KEEP else await self._claim(manifest, recorded)

    def forget(self, uid: str) -> None:
        self.left_to_others.pop(uid, None)

    async def _claim(self, manifest: Manifest, former: Release | None) -> Manifest:
        metadata = manifest["metadata"]
        # The whole status: an apply takes away what it leaves out and this field manager wrote.
        body = {
            "apiVersion": LLM_DEPLOYMENT.api_version,
            "kind": LLM_DEPLOYMENT.kind,
            "metadata": {name: metadata[name] for name in ("name", "namespace", "resourceVersion")},
            "status": {**(manifest.get("status") or {}), MANAGED_BY: self._release.as_json()},
        }
        key = owner_key(LLM_DEPLOYMENT, manifest)
        try:
            stored = await self._client.apply(body, subresource="status")
        except ApiError as error:
            if error.status not in INVALID:
                raise
            log.error("%s: status.managedBy is refused; apply the CRD of this release: %s", key, error.message)
            return manifest
        self._index.put(LLM_DEPLOYMENT, stored)
        if former is not None:
            log.warning("%s: taken over from the release with the Lease %s, which does not renew it", key, former)
        return self._index.get(LLM_DEPLOYMENT, key.namespace, key.name) or manifest

    async def _leave(self, manifest: Manifest, recorded: Release, sight: LeaseSight) -> None:
        metadata, key = manifest["metadata"], owner_key(LLM_DEPLOYMENT, manifest)
        if metadata["uid"] in self.left_to_others:
            return
        self.left_to_others[metadata["uid"]] = key
        message = managed_by_another(str(key), recorded, self._release, sight)
        log.warning("ManagedByAnother: %s", message)
        mark = hashlib.sha256(f"{metadata['uid']} {recorded} {self._release}".encode()).hexdigest()[:16]
        await self._events.publish(
            managed_by_another_event(metadata, f"{metadata['name']}.{mark}", message, self._now())
        )
