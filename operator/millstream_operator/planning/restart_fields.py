"""The hash that decides whether a plan still holds: of the part of the spec that reaches the pods.

Scaling, monitoring, another Service port, a longer progress deadline or another update policy must not restart a pod,
so they stay out. A field that is absent stays out too: a later version of the API may add fields without changing the
hash of any stored object.

What the runtime takes over while it serves (heartbeats, the log level) stays out as well, but not for pods of record
format 1: they were told everything by flags, and hear of such a change only when they are replaced.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment

HASH_LENGTH = 16
Fields = dict[str, Any]
BESIDE_THE_PODS: Fields = {
    "model": {"cache": {"size": True, "storage_class_name": True, "access_mode": True}},  # that there is one counts
    "replicas": True,
    "autoscaling": True,
    "service": True,
    "monitoring": True,
    "rollout": {"progress_deadline": True, "strategy": True},
    "runtime": {"update_policy": True},
}
LIVE: Fields = {"warmup": {"heartbeat_interval": True}, "runtime": {"log_level": True}}
PARENTS = ("rollout", "warmup", "runtime")


def input_hash(deployment: LLMDeployment) -> str:
    """Sixteen hex digits: equal for equal plans' inputs, on every machine."""
    return _hash(deployment, _both(BESIDE_THE_PODS, LIVE))


def input_hash_of_format_1(deployment: LLMDeployment) -> str:
    """As `input_hash`, for pods that are told their live configuration by flags."""
    return _hash(deployment, BESIDE_THE_PODS)


def _both(one: Fields, other: Fields) -> Fields:
    """What either excludes."""
    merged = one | other
    for parent in one.keys() & other.keys():
        mine, theirs = one[parent], other[parent]
        merged[parent] = mine | theirs if isinstance(mine, dict) and isinstance(theirs, dict) else True
    return merged


def _hash(deployment: LLMDeployment, excluded: Fields) -> str:
    spec = deployment.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=excluded)
    for parent in PARENTS:
        if parent in excluded and not spec.get(parent):  # nothing of it is left
            spec.pop(parent, None)
    text = json.dumps({"name": deployment.name, "spec": spec}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
