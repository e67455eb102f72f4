"""What is in the way of a deployment's volumes, with the one read that this needs.

The claim of a source is the user's own and carries no label of ours, so it is in no watch: one GET tells its access
modes, which Kubernetes never changes, and the answer is remembered. The claim of a cache is a child like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.volumes import cache_problem, needs_claim, source_problem
from millstream_operator.kube.client import ClusterClient
from millstream_operator.kube.index import Index
from millstream_operator.kube.kinds import DEPLOYMENT, PERSISTENT_VOLUME_CLAIM
from millstream_operator.rendering.model_cache import cache_claim_name

Manifest = dict[str, Any]


class VolumeChecks:
    """For the reconciler alone."""

    def __init__(self, client: ClusterClient, index: Index) -> None:
        self._client, self._index = client, index
        self._modes: dict[tuple[str, str], frozenset[str]] = {}  # by the owner's uid and the claim's name

    async def problem(self, owner: LLMDeployment, wanted: Iterable[Manifest]) -> Diagnosis | None:
        """Why the pods that `wanted` would make could not all mount what they need; None: nothing is known against it.

        Raises:
            ApiError, ApiUnreachable: the claim could not be read.
        """
        namespace = owner.metadata.namespace or ""
        workload = next(one for one in wanted if one["kind"] == DEPLOYMENT.kind)
        live = self._index.get(PERSISTENT_VOLUME_CLAIM, namespace, cache_claim_name(owner))
        if (found := cache_problem(owner, workload, live)) is not None:
            return found
        name = needs_claim(owner)
        return None if name is None else source_problem(owner, await self._modes_of(owner, namespace, name))

    async def _modes_of(self, owner: LLMDeployment, namespace: str, name: str) -> frozenset[str]:
        """Empty for a claim that is not there: what its pods then say is the better message."""
        asked = (owner.metadata.uid or "", name)
        if asked not in self._modes:
            claim = await self._client.get(PERSISTENT_VOLUME_CLAIM, namespace, name)
            if claim is None:
                return frozenset()
            self._modes[asked] = frozenset(claim["spec"].get("accessModes") or ())
        return self._modes[asked]

    def forget(self, uid: str) -> None:
        """The owner is gone."""
        for asked in [asked for asked in self._modes if asked[0] == uid]:
            del self._modes[asked]
