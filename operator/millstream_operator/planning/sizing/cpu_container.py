"""What the container of a replica on a CPU gets: its memory limit and its threads, however the spec says it."""

from __future__ import annotations

import math

from millstream_operator.api.pod_template import ResourceList, ResourceRequirements
from millstream_operator.api.quantity import amount
from millstream_operator.api.spec import LLMDeploymentSpec

CPU_MEMORY_LIMIT = "4Gi"
CPU_CORES_LIMIT = 16  # the runtime starts as many threads; decoding is bound by memory bandwidth before that
MOST_THREADS = 1024  # more than a node has
MOST_BYTES = 2**63 - 1  # the largest number of a status


def memory_limit_bytes(spec: LLMDeploymentSpec) -> int:
    """The memory limit that the runtime container gets: podTemplate's limit, else the planner's or, where it is more,
    podTemplate's request (as `rendering/container_resources.py` merges them)."""
    requests, limits = _given(spec)
    if limits.memory is not None:
        return _bytes(limits.memory)
    return max(_bytes(CPU_MEMORY_LIMIT), _bytes(requests.memory or "0"))


def most_threads(spec: LLMDeploymentSpec) -> int:
    """The threads that the runtime starts at most: as many as its container's limit has cores, at least one."""
    requests, limits = _given(spec)
    if limits.cpu is not None:
        return max(1, _cores(limits.cpu))
    return max(CPU_CORES_LIMIT, _cores(requests.cpu or "0"))


def _given(spec: LLMDeploymentSpec) -> tuple[ResourceList, ResourceList]:
    """podTemplate's requests and limits of the runtime container."""
    template = spec.pod_template.spec if spec.pod_template else None
    container = next(iter((template.containers if template else None) or []), None)
    given = (container.resources if container else None) or ResourceRequirements()
    return given.requests or ResourceList(), given.limits or ResourceList()


def _bytes(quantity: str) -> int:
    return min(math.floor(amount(quantity)), MOST_BYTES)


def _cores(quantity: str) -> int:
    return min(math.ceil(amount(quantity)), MOST_THREADS)
