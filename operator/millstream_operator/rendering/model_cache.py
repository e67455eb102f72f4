"""The claim of `spec.model.cache`: a volume for what is downloaded, which outlives the pods and goes with the owner.

The pods take turns by the lock in the folder that they fill (`millstream_runtime/sources/lock.py`), so several of
them on several nodes make one download.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.names import child
from millstream_operator.rendering.quantity import canonical

DEFAULT_ACCESS_MODE = "ReadWriteMany"


def cache_claim_name(owner: LLMDeployment) -> str:
    return f"{owner.name}-model-cache"


def model_cache(owner: LLMDeployment) -> dict[str, Any] | None:
    """None without `spec.model.cache`. Of its spec the server lets only the size change, and that only upwards."""
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
