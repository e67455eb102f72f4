"""Pods as the API server has them -> what is kept of those that hold GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_operator.inventory.pods import GpuPod, holds_gpus
from millstream_operator.kube.index import owner_key
from millstream_operator.kube.kinds import POD
from millstream_operator.rendering.names import REVISION_LABEL, role_of
from millstream_operator.workloads.deployments import DEPLOYMENTS
from millstream_operator.workloads.workload import Workload


def read_pod(pod: Mapping[str, Any], workloads: Workload = DEPLOYMENTS) -> GpuPod | None:
    """Return what is kept of a pod; None for one that holds no GPU.

    Only a pod of a replica belongs to its owner's plan. A Job of ours (quantization, a quality gate) keeps its GPUs
    when the plan changes, so it holds them as a pod of anyone else does.
    """
    held = holds_gpus(pod)
    if held is None:
        return None
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    key = owner_key(POD, dict(pod))
    owner = key if key.name and role_of(pod) in workloads.roles else None
    return GpuPod(metadata["uid"], held[0], held[1], owner, labels.get(REVISION_LABEL, ""))
