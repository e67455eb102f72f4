"""Whether a replica would start now, and which ones could be given up for it. Pure.

    nodes, what their pods hold, promises to others, what a replica needs, those that may be given up -> Room

A replica that serves may be given up only if its successor would find its GPUs then: on nodes that take pods now, with
the labels and taints that the successor asks for, with as many GPUs free as it needs, after the promises to others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from millstream_operator.inventory.nodes import GpuNode
from millstream_operator.inventory.packing import Free, Want, without_promised
from millstream_operator.inventory.pod_needs import PodNeeds
from millstream_operator.inventory.pods import GpuPod
from millstream_operator.inventory.replica_needs import ReplicaNeeds

Promised = Sequence[tuple[Want, int]]
GivenUp = Sequence[tuple[str, str]]  # the uid and node of each bound pod of a replica


@dataclass(frozen=True, slots=True)
class Room:
    """Room for one more replica of a revision.

    `now`: it would start now, once pods that end are gone, and so would those that wait already. None: not known.
    `kept`: by the uid of a replica that serves, why giving it up makes no room; one that is absent makes room.
    `pool`: declared node pools may add nodes for it.
    """

    needs: str = "a GPU"
    now: bool | None = None
    kept: Mapping[str, str] = field(default_factory=dict)
    pool: bool = False


@dataclass(frozen=True, slots=True)
class Nodes:
    """The GPU nodes at one moment, as one owner sees them. `part_of` names the GPUs of a node as promises do."""

    nodes: Mapping[str, GpuNode]
    used: Mapping[str, int]  # GPUs that pods hold, by node
    pods: Mapping[str, GpuPod]  # those pods, by uid
    promised: Promised  # to others
    part_of: Callable[[GpuNode], str]
    may_come: Sequence[GpuNode] = ()  # that declared node pools may add

    def fits(self, needs: ReplicaNeeds, gone: Collection[str] = ()) -> int:
        """How many such replicas would start. `gone`: uids of pods that count as ended."""
        held = self._held(gone)
        free: Free = Free()
        for node in self.nodes.values():
            left = node.gpus - held.get(node.name, 0)
            if left > 0 and _takes(node, needs.pod):
                free[self.part_of(node), left] += 1
        left_over = +without_promised(free, self.promised)
        return sum(nodes * (gpus // needs.pod.gpus) for (_, gpus), nodes in left_over.items()) // needs.pods

    def may_grow(self, needs: PodNeeds) -> bool:
        """Whether a node that a declared pool may add would take such a pod."""
        return any(node.gpus >= needs.gpus and _takes(node, needs) for node in self.may_come)

    def why_kept(self, needs: ReplicaNeeds, given_up: GivenUp, gone: Collection[str], enough: int) -> str | None:
        """Why giving up a replica makes no room for `enough` such replicas in all; None where it does."""
        ended = {*gone, *(uid for uid, _ in given_up)}
        if self.fits(needs, ended) >= enough:
            return None
        nodes = dict.fromkeys(node for _, node in given_up)
        found = (why for name in nodes if (why := self._why_no_room(needs.pod, name, ended)) is not None)
        return next(found, f"another LLMDeployment waits for the GPUs of node {' or '.join(nodes)}")

    def _why_no_room(self, needs: PodNeeds, node_name: str, ended: Collection[str]) -> str | None:
        """Why a node would not take such a pod; None where it would, but for the promises to others."""
        node = self.nodes.get(node_name)
        if node is None:
            return f"node {node_name} offers no nvidia.com/gpu now"
        if node.away is not None:
            return f"node {node_name} takes no pods now ({node.away.problem})"
        if not needs.selects(node.labels):
            return f"node {node_name} ({node.product or 'unlabelled GPUs'}) is not one that the new pods may use"
        if not needs.tolerates(node.taints):
            return f"node {node_name} has a taint that the new pods do not tolerate"
        left = node.gpus - self._held(ended).get(node_name, 0)
        if left < needs.gpus:
            return f"node {node_name} would have {left} free, and {needs.gpus} are needed"
        return None

    def _held(self, gone: Collection[str]) -> dict[str, int]:
        held = dict(self.used)
        for pod in (self.pods[uid] for uid in gone if uid in self.pods):
            held[pod.node] = held.get(pod.node, 0) - pod.gpus
        return held


def room_on(
    nodes: Nodes, needs: ReplicaNeeds, serving: Mapping[str, GivenUp], ending: Collection[str], waiting: int
) -> Room:
    """Look for room.

    `serving`: the bound pods of the replicas that could be given up, by the replica's uid; `ending`: uids of pods that
    end. `waiting`: new replicas without a node. Those that would start anyway take their GPUs first, so they do not
    count as the successor.
    """
    fits = nodes.fits(needs, ending)
    enough = min(waiting, fits) + 1
    kept = {
        uid: why for uid, pods in serving.items() if (why := nodes.why_kept(needs, pods, ending, enough)) is not None
    }
    now = fits >= max(waiting, 1) if nodes.nodes else None
    return Room(str(needs), now, kept, nodes.may_grow(needs.pod))


def room_unseen(needs: ReplicaNeeds, before: Mapping[str, ReplicaNeeds], why: str) -> Room:
    """Room where nodes are not known: a replica makes room for a successor that needs no more than it has."""
    kept = {
        uid: f"{why.removesuffix('.')}, and the new pods need other nodes or more GPUs than the old ones"
        for uid, held in before.items()
        if not needs.at_most(held)
    }
    return Room(str(needs), None, kept)


def _takes(node: GpuNode, needs: PodNeeds) -> bool:
    return node.away is None and needs.selects(node.labels) and needs.tolerates(node.taints)
