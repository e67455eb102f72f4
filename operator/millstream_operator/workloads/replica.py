"""A replica: the pods that answer requests together. Pure.

With a Deployment it is one pod. With a kind that spreads a model over several nodes it is a group, which serves only as
a whole: a group that lacks a pod holds GPUs and answers nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream_operator.diagnosis.pod_facts import digest_of_pod, is_ready, is_scheduled, is_terminating

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replica:
    """`pods`: those that exist, at least one, the leader first if it exists. `size`: how many pods make it whole."""

    pods: tuple[Manifest, ...]
    size: int = 1

    @property
    def uid(self) -> str:
        """The uid of its first pod."""
        return str(self.pods[0]["metadata"].get("uid", ""))

    @property
    def name(self) -> str:
        """The name of its first pod, for messages."""
        return str(self.pods[0]["metadata"]["name"])

    @property
    def digest(self) -> str | None:
        """The digest of the revision that it runs."""
        return digest_of_pod(self.pods[0])

    @property
    def is_whole(self) -> bool:
        return len(self.pods) >= self.size

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return self.is_whole and all(map(is_ready, self.pods))

    @property
    def is_terminating(self) -> bool:
        """Whether it ends: one pod that goes takes the others' work away."""
        return any(map(is_terminating, self.pods))

    @property
    def is_scheduled(self) -> bool:
        """Whether each of its pods has a node."""
        return self.is_whole and all(map(is_scheduled, self.pods))

    @property
    def is_on_a_node(self) -> bool:
        """Whether one of its pods has a node, so that giving it up may free GPUs."""
        return any(map(is_scheduled, self.pods))

    @property
    def nodes(self) -> tuple[tuple[str, str], ...]:
        """The uid of each bound pod, with its node."""
        bound = [(pod, (pod.get("spec") or {}).get("nodeName")) for pod in self.pods]
        return tuple((str(pod["metadata"].get("uid", "")), str(node)) for pod, node in bound if node)
