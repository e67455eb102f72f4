"""The hash that decides whether a plan still holds: of the part of the spec that reaches the pods.

Scaling, another Service port, a longer progress deadline or another update policy must not restart a pod, so they stay
out. A field that
is absent stays out too: a later version of the API may add fields without changing the hash of any stored object.
"""

from __future__ import annotations

import hashlib
import json

from millstream_operator.api.llmdeployment import LLMDeployment

HASH_LENGTH = 16
BESIDE_THE_PODS: dict[str, bool | dict[str, bool]] = {
    "replicas": True,
    "service": True,
    "rollout": {"progress_deadline": True},
    "runtime": {"update_policy": True},
}


def input_hash(deployment: LLMDeployment) -> str:
    """Sixteen hex digits: equal for equal plans' inputs, on every machine."""
    spec = deployment.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=BESIDE_THE_PODS)
    for part in ("rollout", "runtime"):
        if not spec.get(part):  # nothing of it is left
            spec.pop(part, None)
    text = json.dumps({"name": deployment.name, "spec": spec}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
