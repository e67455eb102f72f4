"""Read from pods how many GPUs each holds on which node. Pure; pods without GPUs are dropped."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millstream_operator.inventory.nodes import GPU_RESOURCE, count

ENDED = frozenset({"Succeeded", "Failed"})  # their GPUs are free again, although the object still exists


@dataclass(frozen=True, slots=True)
class GpuPod:
    """A pod that holds GPUs of a node."""

    uid: str
    node: str
    gpus: int
    owner: Hashable | None = None  # the key of the owner, for pods that serve a model of ours
    revision: str = ""


def gpus_of(pod: Mapping[str, Any]) -> int:
    """Return the GPUs that a pod holds: of its containers together, or of the init container with the most.

    An init container that keeps running (`restartPolicy: Always`, a sidecar) counts with the containers. For GPUs,
    requests and limits are equal, and either may be absent.
    """
    spec = pod.get("spec") or {}
    init = spec.get("initContainers") or ()
    sidecars = [one for one in init if one.get("restartPolicy") == "Always"]
    running = sum(map(_gpus, [*(spec.get("containers") or ()), *sidecars]))
    return max([running, *map(_gpus, init)])


def holds_gpus(pod: Mapping[str, Any]) -> tuple[str, int] | None:
    """Node and number of a bound pod that has not ended; None for any other pod."""
    node = (pod.get("spec") or {}).get("nodeName")
    gpus = gpus_of(pod)
    if not node or not gpus or (pod.get("status") or {}).get("phase") in ENDED:
        return None
    return str(node), gpus


def used_by_node(pods: Iterable[GpuPod]) -> dict[str, int]:
    found: dict[str, int] = {}
    for pod in pods:
        found[pod.node] = found.get(pod.node, 0) + pod.gpus
    return found


def _gpus(container: Mapping[str, Any]) -> int:
    resources = container.get("resources") or {}
    return max(count((resources.get(part) or {}).get(GPU_RESOURCE)) for part in ("limits", "requests"))
