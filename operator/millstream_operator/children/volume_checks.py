"""Check the claims that a deployment's pods mount: the checks of `diagnosis/volumes.py`, with the one read they need.

The claim of a source belongs to the user and has no label of ours, so it is in no watch: one GET reads its access
modes, which Kubernetes never changes, and the answer is kept. The claim of a cache is a child like any other.
"""

from __future__ import annotations

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.volumes import cache_problem, shared_source_claims, source_problem
from millstream_operator.kube.client import ClusterClient
from millstream_operator.kube.index import Index
from millstream_operator.kube.kinds import PERSISTENT_VOLUME_CLAIM
from millstream_operator.rendering.model_cache import cache_claim_name


class VolumeChecks:
    """Checks claims, for the reconciler."""

    def __init__(self, client: ClusterClient, index: Index) -> None:
        self._client, self._index = client, index
        self._modes: dict[tuple[str, str], frozenset[str]] = {}  # by the owner's uid and the claim's name

    async def problem(self, owner: LLMDeployment, *, surges: bool) -> Diagnosis | None:
        """Return why its pods could not all mount their volumes; None where no problem is known.

        `surges`: a rollout runs more pods than the replicas for a while.

        Raises:
            ApiError, ApiUnreachable: the claim could not be read.
        """
        namespace = owner.metadata.namespace or ""
        live = self._index.get(PERSISTENT_VOLUME_CLAIM, namespace, cache_claim_name(owner))
        if (found := cache_problem(owner, live, surges=surges)) is not None:
            return found
        for field, name in shared_source_claims(owner).items():
            modes = await self._modes_of(owner, namespace, name)
            if (found := source_problem(owner, field, name, modes)) is not None:
                return found
        return None

    async def _modes_of(self, owner: LLMDeployment, namespace: str, name: str) -> frozenset[str]:
        """Return the claim's access modes; none for a missing claim, which its pods report with a better message."""
        cached_key = (owner.metadata.uid or "", name)
        if cached_key not in self._modes:
            claim = await self._client.get(PERSISTENT_VOLUME_CLAIM, namespace, name)
            if claim is None:
                return frozenset()
            self._modes[cached_key] = frozenset(claim["spec"].get("accessModes") or ())
        return self._modes[cached_key]

    def forget(self, uid: str) -> None:
        """Forget a deleted owner."""
        for cached_key in [cached_key for cached_key in self._modes if cached_key[0] == uid]:
            del self._modes[cached_key]
