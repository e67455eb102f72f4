"""The claim of `spec.model.cache`: a volume for downloads, which outlives the pods and is deleted with the owner.

A lock in the folder lets one pod at a time fill it (`millstream_runtime/sources/lock.py`), so several
pods on several nodes make one download.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.names import child
from millstream_operator.rendering.quantity import canonical

DEFAULT_ACCESS_MODE = "ReadWriteMany"


def cache_claim_name(owner: LLMDeployment) -> str:
    return cache_claim_of(owner.name)


def cache_claim_of(owner_name: str) -> str:
    return f"{owner_name}-model-cache"


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
