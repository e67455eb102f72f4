"""Find claims that not all pods can mount, before a pod waits forever. Pure.

A ReadWriteOnce claim is mounted by one node, a ReadWriteOncePod claim by one pod. A second pod elsewhere stays in
ContainerCreating, and no condition of it says why. The access modes of a claim never change, so they are read once;
whether it exists and is bound shows in the pods (`VolumePending`).
"""

from __future__ import annotations

import re
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.model import STORAGE_PATTERN, CacheAccessMode, ModelCache
from millstream_operator.api.validation.transitions import TRANSITIONS
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.planning.requires import draft_source

Manifest = dict[str, Any]
SHARED_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})


def shared_source_claims(owner: LLMDeployment) -> dict[str, str]:
    """Return the sources' claims where more than one replica mounts them, so that their access modes matter.

    By the field of the spec that names the claim: of the model and of its draft.
    """
    sources = {"model.source": owner.spec.model.source, "speculation.draftModel.source": draft_source(owner.spec)}
    claims = {field: one.persistent_volume_claim for field, one in sources.items() if one is not None}
    return {field: claim.claim_name for field, claim in claims.items() if claim is not None and owner.spec.replicas > 1}


def source_problem(owner: LLMDeployment, field: str, name: str, modes: frozenset[str]) -> Diagnosis | None:
    """Return why several replicas cannot share the claim `name` of a source, which has these access `modes`."""
    if not modes or modes & SHARED_MODES:
        return None
    return Diagnosis(
        Reason.INFEASIBLE,
        f"spec.replicas is {owner.spec.replicas}, and the claim {name} of {field} is {', '.join(sorted(modes))}: "
        "a replica on another node could never mount it. Set replicas to 1, or use a claim that is ReadOnlyMany or "
        "ReadWriteMany.",
    )


def cache_problem(owner: LLMDeployment, live: Manifest | None, *, surges: bool) -> Diagnosis | None:
    """Return why the cache's claim does not fit. `live`: the claim as it is. `surges`: a rollout runs one pod more."""
    cache = owner.spec.model.cache
    if cache is None:
        return None
    if live is not None and (refused := _refused_change(cache, live)) is not None:
        return refused
    mode = cache.access_mode or CacheAccessMode.READ_WRITE_MANY
    if mode is CacheAccessMode.READ_WRITE_MANY or not surges:
        return None
    return Diagnosis(
        Reason.INFEASIBLE,
        f"model.cache.accessMode is {mode}, and a rollout starts the new pod before the old one ends, perhaps on "
        "another node, where it could not mount the volume. Use ReadWriteMany, or rollout.strategy ResourceAware.",
    )


def _refused_change(cache: ModelCache, live: Manifest) -> Diagnosis | None:
    """Check the transition rules against the claim itself, which may differ from the spec before the change."""
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
            message = f"{rule.path} does not fit the existing claim {live['metadata']['name']}: {rule.message}"
            return Diagnosis(Reason.INVALID_SPEC, message)
    return None
