"""GPU accounts: which GPUs are free for each deployment.

    free for one deployment = allocatable − held by others − promised to others

Its own pods and promises count as free for its next plan, because that plan replaces them. Updated pod by pod and node
by node; a query walks the GPU nodes once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import replace

from millstream_operator.catalog.gpu import GpuCatalog, GpuPart
from millstream_operator.inventory.demands import ANYWHERE, Demands
from millstream_operator.inventory.node_kinds import Inventory, NodeKind, RefusedNode
from millstream_operator.inventory.nodes import GpuNode, Parts, left_out
from millstream_operator.inventory.packing import Free, Want, without_promised
from millstream_operator.inventory.pods import GpuPod, used_by_node

Owner = Hashable  # the key of an owner: its kind, namespace and name
MAX_REFUSED = 8  # nodes whose reasons are kept for messages


class GpuAccounts:
    """For use in one thread. `generation` grows when there are other GPUs than before, free or not."""

    def __init__(self, catalog: GpuCatalog) -> None:
        self.generation = 0
        self._catalog, self._parts = catalog, Parts(catalog)
        self._nodes: dict[str, GpuNode] = {}
        self._pods: dict[str, GpuPod] = {}
        self._used: Counter[str] = Counter()  # by node
        self._of: defaultdict[Owner, dict[str, GpuPod]] = defaultdict(dict)  # by owner and uid
        self._promised: dict[Owner, tuple[Want, int]] = {}
        self._wanted: Counter[Want] = Counter()
        self._capacities: dict[Demands, Inventory] = {}  # these two are computed again after a change
        self._free: dict[Demands, Free] = {}

    # Nodes and the catalogue

    def put_node(self, name: str, node: GpuNode | None) -> None:
        """Set a node's state; None: it is gone, or has no GPUs."""
        before = self._nodes.get(name)
        if node is not None:
            self._nodes[name] = node
        else:
            self._nodes.pop(name, None)
        if before != node:
            self._free.clear()
        if _lasting(before) != _lasting(node):
            self._other_gpus()

    def replace_nodes(self, nodes: Iterable[GpuNode]) -> None:
        """Replace all nodes."""
        listed = {node.name: node for node in nodes}
        for name in [*self._nodes, *listed]:
            self.put_node(name, listed.get(name))

    def use_catalog(self, catalog: GpuCatalog) -> None:
        """Use other prices or parts; labels are looked up again."""
        self._catalog, self._parts = catalog, Parts(catalog)
        self._other_gpus()

    @property
    def has_nodes(self) -> bool:
        return bool(self._nodes)

    def _other_gpus(self) -> None:
        self.generation += 1
        self._capacities.clear()
        self._free.clear()

    # Pods

    def put_pod(self, uid: str, pod: GpuPod | None) -> set[Owner]:
        """Set what a pod holds; None: nothing. Return the owners whose pods changed."""
        before = self._pods.pop(uid, None)
        if before is not None:
            self._count(before, -1)
        if pod is not None:
            self._pods[uid] = pod
            self._count(pod, 1)
        return {one.owner for one in (before, pod) if one is not None and one.owner is not None and before != pod}

    def replace_pods(self, pods: Iterable[GpuPod]) -> set[Owner]:
        """Replace all pods. Return the owners whose pods changed."""
        listed = {pod.uid: pod for pod in pods}
        return {owner for uid in {*self._pods, *listed} for owner in self.put_pod(uid, listed.get(uid))}

    def bound(self, owner: Owner, revision: str | None = None) -> int:
        """Count an owner's bound pods, of one revision or of all."""
        pods = self._of.get(owner, {}).values()
        return sum(revision is None or pod.revision == revision for pod in pods)

    def _count(self, pod: GpuPod, sign: int) -> None:
        self._free.clear()
        self._used[pod.node] += sign * pod.gpus
        if not self._used[pod.node]:
            del self._used[pod.node]
        if pod.owner is None:
            return
        if sign > 0:
            self._of[pod.owner][pod.uid] = pod
            return
        del self._of[pod.owner][pod.uid]
        if not self._of[pod.owner]:
            del self._of[pod.owner]

    # Promises

    def promise(self, owner: Owner, want: Want | None, times: int) -> None:
        """Set what the owner's plan wants beyond what its pods hold."""
        before = self._promised.pop(owner, None)
        if before is not None:
            self._wanted[before[0]] -= before[1]
            if not self._wanted[before[0]]:
                del self._wanted[before[0]]
        if want is not None and times > 0:
            self._promised[owner] = want, times
            self._wanted[want] += times

    # Queries

    def capacity(self, demands: Demands = ANYWHERE) -> Inventory:
        """Return all GPUs on nodes that admit such a pod, free or not, including nodes that are away for a while."""
        known = self._capacities.get(demands)
        if known is None:
            free: Free = Counter()
            refused: list[RefusedNode] = []
            for node in self._nodes.values():
                part = self._parts.of(node)
                if isinstance(part, str):
                    refused.append(left_out(node, part))
                elif demands.admit(node.labels, node.taints):
                    free[part.name, node.gpus] += 1
            refused.sort(key=lambda one: one.name)
            known = self._capacities[demands] = self._inventory(free, tuple(refused[:MAX_REFUSED]))
        return known

    def free(self, owner: Owner, demands: Demands = ANYWHERE, *, give_up: bool = True) -> Inventory:
        """Return what a new plan of the owner may use now. `give_up`: the GPUs that its pods hold count as free.

        Promises of others are subtracted from these nodes even where their pods might go elsewhere: the result is too
        small rather than too large.
        """
        free = Counter(self._unheld(demands))
        own = used_by_node(self._of.get(owner, {}).values()) if give_up else {}
        for name, gpus in own.items():
            part = self._part_for(self._nodes.get(name), demands)
            if part is not None:
                left = self._nodes[name].gpus - self._used[name]
                free.subtract({(part.name, left): 1 if left > 0 else 0})
                free[part.name, left + gpus] += 1
        free = +free
        wanted = Counter(self._wanted)
        if (mine := self._promised.get(owner)) is not None:
            wanted[mine[0]] -= mine[1]
        remaining = without_promised(free, [(want, times) for want, times in wanted.items() if times > 0])
        return self._inventory(remaining, self.capacity(demands).refused)

    def _unheld(self, demands: Demands) -> Free:
        """Return free GPUs by node for any owner. The result is cached: do not change it."""
        known = self._free.get(demands)
        if known is None:
            known = self._free[demands] = Counter()
            for name, node in self._nodes.items():
                part, left = self._part_for(node, demands), node.gpus - self._used.get(name, 0)
                if part is not None and left > 0:
                    known[part.name, left] += 1
        return known

    def _part_for(self, node: GpuNode | None, demands: Demands) -> GpuPart | None:
        """Return the part of a node's GPUs; None where pods with these demands cannot go now."""
        if node is None or node.away is not None or not demands.admit(node.labels, node.taints):
            return None
        part = self._parts.of(node)
        return part if isinstance(part, GpuPart) else None

    def _inventory(self, free: Free, refused: tuple[RefusedNode, ...]) -> Inventory:
        kinds = []
        for (name, gpus), nodes in sorted(free.items()):
            part = self._catalog.get(name)
            assert isinstance(part, GpuPart)  # noqa: S101 - names in `free` come from this catalogue
            kinds.append(NodeKind(part, gpus, nodes))
        return Inventory(tuple(kinds), refused)


def _lasting(node: GpuNode | None) -> GpuNode | None:
    """Return a node without its temporary state: the cluster still has a drained or rebooting node."""
    return replace(node, away=None) if node is not None else None
