"""What a replica takes of the nodes: GPUs over nodes, and not on one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.inventory.pod_needs import PodNeeds


@dataclass(frozen=True, slots=True)
class ReplicaNeeds:
    """`pods` pods that each need the same of their node. Two of them may share a node that has room for both.

    Pods of the replica without GPUs are not counted: they find a node where GPUs are short, too.
    """

    pod: PodNeeds
    pods: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of the whole replica."""
        return self.pods * self.pod.gpus

    def __str__(self) -> str:
        """`2 × NVIDIA-L4 on one node`, and for a group `2 pods of 8 × NVIDIA-H100 on one node`."""
        return str(self.pod) if self.pods == 1 else f"{self.pods} pods of {self.pod}"

    def at_most(self, other: ReplicaNeeds) -> bool:
        """Whether nodes that have room for `other` have room for this."""
        return self.pods <= other.pods and self.pod.at_most(other.pod)
