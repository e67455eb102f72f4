"""The claim of `spec.model.cache`: a volume for downloads, which outlives the pods and is deleted with the owner.

A lock in the folder lets one pod at a time fill it (`millstream_runtime/sources/lock.py`), so several
pods on several nodes make one download.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.quantity import canonical
from millstream_operator.rendering.names import DEPLOYMENT_LABEL, child

DEFAULT_ACCESS_MODE = "ReadWriteMany"
CLAIM_SUFFIX = "-model-cache"


def cache_claim_name(owner: LLMDeployment) -> str:
    return f"{owner.name}{CLAIM_SUFFIX}"


def is_cache_of(pod: Mapping[str, Any], claim_name: str) -> bool:
    """Whether a claim that a pod mounts is the cache of its LLMDeployment. Claims of users are mounted read-only."""
    volumes = (one.get("persistentVolumeClaim") or {} for one in pod.get("spec", {}).get("volumes") or ())
    deployment = (pod["metadata"].get("labels") or {}).get(DEPLOYMENT_LABEL)
    return claim_name == f"{deployment}{CLAIM_SUFFIX}" and any(
        one.get("claimName") == claim_name and not one.get("readOnly") for one in volumes
    )


def model_cache(owner: LLMDeployment) -> dict[str, Any] | None:
    """Return the claim, or None without `spec.model.cache`. The API server lets only its size change, and only grow."""
    cache = owner.spec.model.cache
    if cache is None:
        return None
    spec: dict[str, Any] = {
        "accessModes": [(cache.access_mode or DEFAULT_ACCESS_MODE) + ""],
        "resources": {"requests": {"storage": canonical(cache.size)}},
    }
    if cache.storage_class_name is not None:
        spec["storageClassName"] = cache.storage_class_name
    return child(owner, "v1", "PersistentVolumeClaim", name=cache_claim_name(owner)) | {"spec": spec}
