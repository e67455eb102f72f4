"""Stage "adopt orphans": take back the children that `kubectl delete --cascade=orphan` left, before anything is read.

    LLMDeployment deleted with orphans -> the collector takes the owner references away, the pods serve on
    applied again, another uid         -> GET each: still an orphan -> PATCH its owner reference

With the records of its revisions the new object finds the plan and the pod template that run, so nothing restarts.
Records are adopted last: while one is left, an interrupted turn is finished by the next. ReplicaSets and pods still
have their owners, which are the Deployment and its ReplicaSets.
"""

from __future__ import annotations

import logging
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.children.orphans import is_orphan, possible_orphans
from millstream_operator.kube.client import ApiError, ClusterClient
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import CONTROLLER_REVISION, kind_of
from millstream_operator.rendering.names import owner_reference

log = logging.getLogger(__name__)
Manifest = dict[str, Any]
# An admission plugin says no: the object stays as it is, and the status then names it (`NameConflict`).
REFUSED = (400, 403, 422)


class AdoptOrphansStage:
    """Writes through `client`; the answers are put into `index`."""

    def __init__(self, client: ClusterClient, index: Index) -> None:
        self._client, self._index = client, index

    async def run(self, owner: LLMDeployment, key: OwnerKey) -> None:
        """Adopt the orphans of a former LLMDeployment of this name. Costs no request where there is none.

        Raises:
            ApiError, ApiUnreachable: the next turn tries again.
        """
        possible = possible_orphans(self._index, key, owner.metadata.uid or "")
        live = [found for one in possible if (found := await self._read(one)) is not None]  # the index may be behind
        orphans = [one for one in live if is_orphan(kind_of(one), one, key.name)]
        if any(kind_of(one) is CONTROLLER_REVISION for one in orphans):
            for orphan in orphans:
                await self._adopt(owner, key, orphan)

    async def _read(self, known: Manifest) -> Manifest | None:
        kind, metadata = kind_of(known), known["metadata"]
        live = await self._client.get(kind, metadata["namespace"], metadata["name"])
        if live is None:
            self._index.remove(kind, known)
        else:
            self._index.put(kind, live)
        return live

    async def _adopt(self, owner: LLMDeployment, key: OwnerKey, orphan: Manifest) -> None:
        kind, name = kind_of(orphan), orphan["metadata"]["name"]
        # Exactly this state: one that somebody else adopts meanwhile is a Conflict.
        version = orphan["metadata"]["resourceVersion"]
        change = {"metadata": {"resourceVersion": version, "ownerReferences": [owner_reference(owner)]}}
        try:
            adopted = await self._client.merge(kind, key.namespace, name, change)
        except ApiError as error:
            if error.status not in REFUSED:
                raise
            log.warning("%s: the orphan %s %s cannot be adopted: %s", key, kind.kind, name, error.message)
            return
        log.info("%s: the orphan %s %s is adopted", key, kind.kind, name)
        self._index.put(kind, adopted)
