"""The hash of the spec's fields that reach the pods: another hash needs a new plan and restarts them.

Scaling, monitoring, another Service port, a longer progress deadline or another update policy must not restart a pod,
so they are excluded. An absent field is excluded too: a later version of the API may add fields without changing the
hash of a stored object.

Fields that the runtime applies while it serves (heartbeats, the log level, the governor) are excluded as well, except
for pods of record format 1: they get all configuration as flags, so such a change must replace them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.stored import UnknownField

HASH_LENGTH = 16
Fields = dict[str, Any]
NOT_IN_PODS: Fields = {
    "model": {"cache": {"size": True, "storage_class_name": True, "access_mode": True}},  # that there is one counts
    "quantization": {"quality_gate": True},  # what a new revision must pass; it changes no pod
    "speculation": {"tuning": True},  # the draft that comes of it is a revision of its own
    "replicas": True,
    "autoscaling": True,
    "service": True,
    "auth": {"mode": True},
    "network": True,
    "monitoring": True,
    "rollout": {
        "progress_deadline": True,
        "strategy": True,
        "evidence_timeout": True,
        "on_insufficient_evidence": True,
        "retry": True,
    },
    "runtime": {"update_policy": True},
}
APPLIED_LIVE: Fields = {
    "warmup": {"heartbeat_interval": True},
    "runtime": {"log_level": True},
    "speculation": {"governor": True},
}
PARENTS = ("auth", "rollout", "warmup", "runtime")


def input_hash(deployment: LLMDeployment) -> str:
    """Return sixteen hex digits: equal for equal inputs of a plan, on every machine."""
    return _hash(deployment, _both(NOT_IN_PODS, APPLIED_LIVE))


def input_hash_of_newer(deployment: LLMDeployment, unknown: Sequence[UnknownField]) -> str:
    """Return the `input_hash` that a newer operator computed, which knew these fields and counted them."""
    return _hash(deployment, _both(NOT_IN_PODS, APPLIED_LIVE), unknown)


def input_hash_of_format_1(deployment: LLMDeployment) -> str:
    """Return the `input_hash` for pods that get their live configuration as flags."""
    return _hash(deployment, NOT_IN_PODS)


def _both(one: Fields, other: Fields) -> Fields:
    """Return the fields that either excludes."""
    merged = one | other
    for parent in one.keys() & other.keys():
        mine, theirs = one[parent], other[parent]
        merged[parent] = mine | theirs if isinstance(mine, dict) and isinstance(theirs, dict) else True
    return merged


def _hash(deployment: LLMDeployment, excluded: Fields, unknown: Sequence[UnknownField] = ()) -> str:
    spec = deployment.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=excluded)
    for parent in PARENTS:
        if parent in excluded and not spec.get(parent):  # nothing of it is left
            spec.pop(parent, None)
    quantization = deployment.spec.quantization
    if quantization is not None and quantization.quality_gate is not None and not spec["quantization"]:
        del spec["quantization"]  # an empty one that was stored before there were gates stays
    for one in unknown:
        _put(spec, one.path[1:], one.value)
    text = json.dumps({"name": deployment.name, "spec": spec}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


def _put(spec: Any, path: Sequence[str | int], value: Any) -> None:
    """Set a field where its parent is part of the hash."""
    for step in path[:-1]:
        present = step < len(spec) if isinstance(step, int) else step in spec
        if not present:
            return
        spec = spec[step]
    spec[path[-1]] = value
