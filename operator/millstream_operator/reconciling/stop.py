"""Scale the workloads of deleted LLMDeployments to zero, so that they stop serving while the collector is behind.

    index: a workload runs for a deleted owner -> GET owner: gone -> GET workload: still its own -> PATCH replicas: 0

The garbage collector may take minutes when much is deleted at once. The controllers of the Deployment and of its
ReplicaSets end the pods sooner, each with its grace period; the collector does the rest. Each turn looks again, so a
turn may be killed before or after its write, and an autoscaler that asks for pods again is undone. No finalizer is
involved: while the operator is down the collector alone deletes.
"""

from __future__ import annotations

import logging
from typing import Any

from millstream_operator.children.deleted_owners import is_deleted, running_for
from millstream_operator.kube.client import ApiError, ClusterClient
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import LLM_DEPLOYMENT
from millstream_operator.workloads.deployments import DEPLOYMENTS
from millstream_operator.workloads.workload import Workload

log = logging.getLogger(__name__)
Manifest = dict[str, Any]


class StopStage:
    """Writes through `client`; the answers are put into `index`."""

    def __init__(self, client: ClusterClient, index: Index, workloads: Workload = DEPLOYMENTS) -> None:
        self._client, self._index, self._workloads, self._kind = client, index, workloads, workloads.kind

    async def run(self, key: OwnerKey) -> None:
        """Stop what runs for deleted LLMDeployments of this name. Costs no request where nothing does.

        Raises:
            ApiError, ApiUnreachable: the next turn tries again.
        """
        for workload in self._index.children(key, self._kind):
            uid = running_for(self._workloads, workload)
            known = self._index.get(LLM_DEPLOYMENT, key.namespace, key.name)
            if uid is not None and is_deleted(known, uid):
                await self._stop(key, workload, uid)

    async def _stop(self, key: OwnerKey, workload: Manifest, uid: str) -> None:
        """Scale to zero after live reads: the index may be behind, or wrong about the owner."""
        name = workload["metadata"]["name"]
        if not is_deleted(await self._client.get(LLM_DEPLOYMENT, key.namespace, key.name), uid):
            return
        live = await self._client.get(self._kind, key.namespace, name)
        if live is None:
            self._index.remove(self._kind, workload)
            return
        if running_for(self._workloads, live) == uid:
            # Exactly this state: one whose owner was changed meanwhile is a Conflict.
            change = {"metadata": {"resourceVersion": live["metadata"]["resourceVersion"]}, **self._workloads.to_zero()}
            try:
                live = await self._client.merge(self._kind, key.namespace, name, change)
            except ApiError as error:
                if error.status != 404:
                    raise
                return  # the collector was faster
            log.info("%s is deleted: its %s %s is scaled to 0", key, self._kind.kind, name)
        self._index.put(self._kind, live)
