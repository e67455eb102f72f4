"""Whether a pod would start now, and which pods could be given up for it. Pure.

    nodes, what their pods hold, promises to others, what the pod needs, pods that may be given up -> Room

A pod that serves may be given up only if its successor would find its GPUs then: on a node that takes pods now, with
the labels and taints that the successor asks for, with as many GPUs free as it needs, after the promises to others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from millstream_operator.inventory.nodes import GpuNode
from millstream_operator.inventory.packing import Free, Want, without_promised
from millstream_operator.inventory.pod_needs import PodNeeds
from millstream_operator.inventory.pods import GpuPod

Promised = Sequence[tuple[Want, int]]


@dataclass(frozen=True, slots=True)
class Room:
    """Room for one more pod of a revision.

    `now`: it would start now, once pods that end are gone, and so would those that wait already. None: not known.
    `kept`: by the uid of a pod that serves, why giving it up makes no room; a pod that is absent makes room.
    `pool`: a declared node pool may add a node for it.
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

    def fits(self, needs: PodNeeds, gone: Collection[str] = ()) -> int:
        """How many such pods would start. `gone`: uids of pods that count as ended."""
        held = self._held(gone)
        free: Free = Free()
        for node in self.nodes.values():
            left = node.gpus - held.get(node.name, 0)
            if left > 0 and _takes(node, needs):
                free[self.part_of(node), left] += 1
        left_over = +without_promised(free, self.promised)
        return sum(nodes * (gpus // needs.gpus) for (_, gpus), nodes in left_over.items())

    def may_grow(self, needs: PodNeeds) -> bool:
        """Whether a node that a declared pool may add would take such a pod."""
        return any(node.gpus >= needs.gpus and _takes(node, needs) for node in self.may_come)

    def why_kept(self, needs: PodNeeds, pod: str, node_name: str, gone: Collection[str], enough: int) -> str | None:
        """Why giving up a pod makes no room for `enough` such pods in all; None where it does."""
        given_up = {*gone, pod}
        if self.fits(needs, given_up) >= enough:
            return None
        node = self.nodes.get(node_name)
        if node is None:
            return f"node {node_name} offers no nvidia.com/gpu now"
        if node.away is not None:
            return f"node {node_name} takes no pods now ({node.away.problem})"
        if not needs.selects(node.labels):
            return f"node {node_name} ({node.product or 'unlabelled GPUs'}) is not one that the new pods may use"
        if not needs.tolerates(node.taints):
            return f"node {node_name} has a taint that the new pods do not tolerate"
        left = node.gpus - self._held(given_up).get(node_name, 0)
        if left < needs.gpus:
            return f"node {node_name} would have {left} free, and {needs.gpus} are needed"
        return f"another LLMDeployment waits for the GPUs of node {node_name}"

    def _held(self, gone: Collection[str]) -> dict[str, int]:
        held = dict(self.used)
        for pod in (self.pods[uid] for uid in gone if uid in self.pods):
            held[pod.node] = held.get(pod.node, 0) - pod.gpus
        return held


def room_on(
    nodes: Nodes, needs: PodNeeds, serving: Iterable[tuple[str, str]], ending: Collection[str], waiting: int
) -> Room:
    """Look for room.

    `serving`: uid and node of the pods that could be given up; `ending`: uids of those that end. `waiting`: new pods
    without a node. Those that would start anyway take their GPUs first, so they do not count as the successor.
    """
    fits = nodes.fits(needs, ending)
    enough = min(waiting, fits) + 1
    kept = {uid: why for uid, node in serving if (why := nodes.why_kept(needs, uid, node, ending, enough)) is not None}
    now = fits >= max(waiting, 1) if nodes.nodes else None
    return Room(str(needs), now, kept, nodes.may_grow(needs))


def room_unseen(needs: PodNeeds, before: Mapping[str, PodNeeds], why: str) -> Room:
    """Room where nodes are not known: a pod makes room for a successor that needs no more than it has."""
    kept = {
        uid: f"{why.removesuffix('.')}, and the new pods need other nodes or more GPUs than the old ones"
        for uid, held in before.items()
        if not needs.at_most(held)
    }
    return Room(str(needs), None, kept)


def _takes(node: GpuNode, needs: PodNeeds) -> bool:
    return node.away is None and needs.selects(node.labels) and needs.tolerates(node.taints)
