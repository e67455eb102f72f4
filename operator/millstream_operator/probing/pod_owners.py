"""Whose a pod is, by the uids of its owners: Pod -> ReplicaSet -> Deployment. Labels alone prove nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from millstream_operator.children.children import controller_uid
from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.kinds import REPLICA_SET

log = logging.getLogger(__name__)
Manifest = Mapping[str, Any]
MAX_REMEMBERED = 8192


class PodOwners:
    """For use within one event loop. Which Deployment a ReplicaSet belongs to never changes: it is read once."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._deployments: dict[str, str | None] = {}  # by the ReplicaSet's uid: the uid of its controller

    async def deployment_of(self, pod: Manifest) -> str | None:
        """Return the uid of the Deployment whose ReplicaSet controls the pod; None where there is none."""
        references = pod["metadata"].get("ownerReferences") or ()
        found = next((one for one in references if one.get("controller") and one.get("kind") == REPLICA_SET.kind), None)
        if found is None:
            return None
        uid, name = str(found.get("uid", "")), str(found.get("name", ""))
        if uid not in self._deployments:
            try:
                replica_set = await self._client.get(REPLICA_SET, pod["metadata"]["namespace"], name)
            except (ApiError, ApiUnreachable) as error:
                log.debug("ReplicaSet %s cannot be read: %s", name, error)
                return None
            while len(self._deployments) >= MAX_REMEMBERED:
                del self._deployments[next(iter(self._deployments))]
            is_it = replica_set is not None and replica_set["metadata"].get("uid") == uid
            self._deployments[uid] = controller_uid(dict(replica_set)) if replica_set is not None and is_it else None
        return self._deployments[uid]
