"""Claims that the pods cannot all mount, told before a pod waits for ever. Pure.

A claim that is ReadWriteOnce is mounted by one node, one that is ReadWriteOncePod by one pod. A second pod elsewhere
stays in ContainerCreating, and no condition of it says why. The access modes of a claim never change, so they are
looked up once; that it is there at all, and bound, is what the pods themselves tell (`VolumePending`).
"""

from __future__ import annotations

import re
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.model import STORAGE_PATTERN, CacheAccessMode, ModelCache
from millstream_operator.api.transitions import TRANSITIONS
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason

Manifest = dict[str, Any]
SHARED_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})


def needs_claim(owner: LLMDeployment) -> str | None:
    """The user's claim whose access modes matter: that of the source, where more than one replica mounts it."""
    claim = owner.spec.model.source.persistent_volume_claim
    return claim.claim_name if claim is not None and owner.spec.replicas > 1 else None


def source_problem(owner: LLMDeployment, modes: frozenset[str]) -> Diagnosis | None:
    """`modes`: of the source's claim. Several replicas need one that several nodes may mount."""
    name = needs_claim(owner)
    if name is None or not modes or modes & SHARED_MODES:
        return None
    return Diagnosis(
        Reason.INFEASIBLE,
        f"spec.replicas is {owner.spec.replicas}, and the claim {name} of model.source is {', '.join(sorted(modes))}: "
        "a replica on another node would wait for it for ever. Set replicas to 1, or use a claim that is "
        "ReadOnlyMany or ReadWriteMany.",
    )


def cache_problem(owner: LLMDeployment, workload: Manifest, live: Manifest | None) -> Diagnosis | None:
    """`workload`: the Deployment as it would be applied. `live`: the cache's claim as it is."""
    cache = owner.spec.model.cache
    if cache is None:
        return None
    if live is not None and (refused := _refused_change(cache, live)) is not None:
        return refused
    mode = cache.access_mode or CacheAccessMode.READ_WRITE_MANY
    if mode is CacheAccessMode.READ_WRITE_MANY or not _surges(workload):
        return None
    return Diagnosis(
        Reason.INFEASIBLE,
        f"model.cache.accessMode is {mode}, and a change brings up the new pod beside the old one, perhaps on another "
        "node, where it could not mount the volume. Use ReadWriteMany, or rollout.strategy ResourceAware.",
    )


def _surges(workload: Manifest) -> bool:
    """Does a rollout of this Deployment run one pod more than the replicas for a while?"""
    strategy = workload["spec"].get("strategy") or {}
    surge = (strategy.get("rollingUpdate") or {}).get("maxSurge", "25%")
    return strategy.get("type") != "Recreate" and surge not in (0, "0", "0%")


def _refused_change(cache: ModelCache, live: Manifest) -> Diagnosis | None:
    """The rules of a change against the claim itself: it may be older than the spec that the API server compared."""
    spec = live["spec"]
    size = spec.get("resources", {}).get("requests", {}).get("storage", "")
    mode = next(iter(spec.get("accessModes") or ()), None)
    before = cache.model_copy(
        update={
            "size": size if re.fullmatch(STORAGE_PATTERN, size) else cache.size,
            # An absent class is the cluster's own, whose name the server wrote into the claim.
            "storage_class_name": cache.storage_class_name and spec.get("storageClassName"),
            "access_mode": mode if mode in list(CacheAccessMode) else cache.access_mode,
        }
    )
    for rule in TRANSITIONS:
        if not rule.holds(before, cache):
            message = f"{rule.path} does not fit the claim {live['metadata']['name']} that is there: {rule.message}"
            return Diagnosis(Reason.INVALID_SPEC, message)
    return None
