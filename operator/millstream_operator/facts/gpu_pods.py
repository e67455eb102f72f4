"""Pods as the API server has them -> what is kept of those that hold GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_operator.inventory.pods import GpuPod, holds_gpus
from millstream_operator.kube.index import owner_key
from millstream_operator.kube.kinds import POD
from millstream_operator.rendering.names import LEADER, REVISION_LABEL, role_of


def read_pod(pod: Mapping[str, Any]) -> GpuPod | None:
    """Return what is kept of a pod; None for one that holds no GPU.

    Only a pod that serves belongs to its owner's plan. A Job of ours (quantization, a quality gate) keeps its GPUs when
    the plan changes, so it holds them as a pod of anyone else does.
    """
    held = holds_gpus(pod)
    if held is None:
        return None
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    key = owner_key(POD, dict(pod))
    owner = key if key.name and role_of(pod) == LEADER else None
    return GpuPod(metadata["uid"], held[0], held[1], owner, labels.get(REVISION_LABEL, ""))
