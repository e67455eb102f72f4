"""The hash that decides whether a plan still holds: of the part of the spec that reaches the pods.

Scaling, another Service port or a longer progress deadline must not restart a pod, so they stay out. A field that
is absent stays out too: a later version of the API may add fields without changing the hash of any stored object.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment

HASH_LENGTH = 16
BESIDE_THE_PODS: dict[str, Any] = {
    "model": {"cache": {"size": True, "storage_class_name": True, "access_mode": True}},  # that there is one counts
    "replicas": True,
    "service": True,
    "rollout": {"progress_deadline": True},
}


def input_hash(deployment: LLMDeployment) -> str:
    """Sixteen hex digits: equal for equal plans' inputs, on every machine."""
    spec = deployment.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=BESIDE_THE_PODS)
    if not spec.get("rollout"):  # nothing of it is left
        spec.pop("rollout", None)
    text = json.dumps({"name": deployment.name, "spec": spec}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
