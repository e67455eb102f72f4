"""GPU accounts: which GPUs are free for each deployment.

    free for one deployment = allocatable − held by others − promised to others

Its own pods and promises count as free for its next plan, because that plan replaces them. Updated pod by pod and node
by node; a query walks the GPU nodes once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from millstream_operator.catalog.gpu import GpuCatalog, GpuPart
from millstream_operator.inventory.demands import ANYWHERE, Demands
from millstream_operator.inventory.left_out import Excluded, LeftOut, Why, grouped
from millstream_operator.inventory.node_kinds import Inventory, NodeKind
from millstream_operator.inventory.node_pools import NodePool
from millstream_operator.inventory.nodes import PRODUCT_LABEL, GpuNode, Parts
from millstream_operator.inventory.packing import Free, Want, without_promised
from millstream_operator.inventory.pods import GpuPod, used_by_node
from millstream_operator.inventory.room import Nodes

Owner = Hashable  # the key of an owner: its kind, namespace and name


class GpuAccounts:
    """For use in one thread. `generation` grows when there are other GPUs than before, free or not.

    `pools` are declared node pools: they count as capacity, and never as free.
    """

    def __init__(self, catalog: GpuCatalog, pools: Sequence[NodePool] = ()) -> None:
        self.generation = 0
        self._catalog, self._parts, self._pools = catalog, Parts(catalog), tuple(pools)
        self._nodes: dict[str, GpuNode] = {}
        self._pods: dict[str, GpuPod] = {}
        self._used: Counter[str] = Counter()  # by node
        self._of: defaultdict[Owner, dict[str, GpuPod]] = defaultdict(dict)  # by owner and uid
        self._promised: dict[Owner, tuple[Want, int]] = {}
        self._wanted: Counter[Want] = Counter()
        self._capacities: dict[Demands, Inventory] = {}  # these two are computed again after a change
        self._free: dict[Demands, tuple[Free, tuple[LeftOut, ...]]] = {}

    # Nodes and the catalogue

    @property
    def is_empty(self) -> bool:
        """Whether no node has GPUs, and no declared pool may bring any."""
        return not self._nodes and not self._pools

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
        """Return all GPUs on nodes that admit such a pod, free or not, including nodes that are away for a while.

        A declared pool counts with its most nodes, of which those that exist are a part.
        """
        known = self._capacities.get(demands)
        if known is None:
            present: Free = Counter()
            refused: list[Excluded] = []
            for node in self._nodes.values():
                part = self._part_or_why(node, demands)
                if isinstance(part, Why):
                    refused.append(self._excluded(node, part, node.gpus))
                else:
                    present[part.name, node.gpus] += 1
            declared, unusable = self._declared(demands)
            absent = {kind: nodes - present[kind] for kind, nodes in declared.items() if nodes > present[kind]}
            every = self._inventory(present | declared, (*grouped(refused), *unusable))
            known = replace(every, absent=self._inventory(Counter(absent), ()).kinds)
            self._capacities[demands] = known
        return known

    def declared(self, demands: Demands = ANYWHERE) -> Inventory:
        """Return the declared node pools alone, for where nodes are not known."""
        return self._inventory(*self._declared(demands))

    def _declared(self, demands: Demands) -> tuple[Free, tuple[LeftOut, ...]]:
        found: Free = Counter()
        unusable: list[Excluded] = []
        for pool in self._pools:
            part = self._parts.of_product(pool.product)
            why = part if isinstance(part, Why) else _why_not_in(pool, part, demands)
            if isinstance(part, GpuPart) and why is None:
                found[part.name, pool.gpus_per_node] += pool.max_nodes
            elif why is not None:
                gpus = (part.name, pool.gpus_per_node) if isinstance(part, GpuPart) else None
                unusable.append(Excluded(pool.name, why, gpus, pool.max_nodes))
        return found, grouped(unusable, "Node pool")

    def free(self, owner: Owner, demands: Demands = ANYWHERE, *, give_up: bool = True) -> Inventory:
        """Return what a new plan of the owner may use now. `give_up`: the GPUs that its pods hold count as free.

        Promises of others are subtracted from these nodes even where their pods might go elsewhere: the result is too
        small rather than too large.
        """
        unheld, refused = self._unheld(demands)
        free = Counter(unheld)
        own = used_by_node(self._of.get(owner, {}).values()) if give_up else {}
        for name, gpus in own.items():
            node = self._nodes.get(name)
            part = self._part_or_why(node, demands) if node is not None and node.away is None else None
            if node is not None and isinstance(part, GpuPart):
                left = node.gpus - self._used[name]
                free.subtract({(part.name, left): 1 if left > 0 else 0})
                free[part.name, left + gpus] += 1
        free = +free
        wanted = Counter(self._wanted)
        if (mine := self._promised.get(owner)) is not None:
            wanted[mine[0]] -= mine[1]
        remaining = without_promised(free, [(want, times) for want, times in wanted.items() if times > 0])
        return self._inventory(remaining, refused)

    def nodes_for(self, owner: Owner) -> Nodes:
        """Return the nodes as they are now for the owner, to look for room on. Do not keep it."""
        wanted = Counter(self._wanted)
        if (mine := self._promised.get(owner)) is not None:
            wanted[mine[0]] -= mine[1]
        promised = [(want, times) for want, times in wanted.items() if times > 0]
        return Nodes(self._nodes, self._used, self._pods, promised, self._part_name, self._may_come())

    def pods_of(self, owner: Owner, revision: str | None = None) -> tuple[str, ...]:
        """Return the uids of an owner's bound pods, of one revision or of all."""
        pods = self._of.get(owner, {}).values()
        return tuple(pod.uid for pod in pods if revision is None or pod.revision == revision)

    def _part_name(self, node: GpuNode) -> str:
        part = self._parts.of(node)
        return part.name if isinstance(part, GpuPart) else ""

    def _may_come(self) -> tuple[GpuNode, ...]:
        """Return the next node of each declared pool that can still grow, once per label of its product."""
        found = []
        present = Counter((self._part_name(node), node.gpus) for node in self._nodes.values())
        for pool in self._pools:
            part = self._parts.of_product(pool.product)
            if isinstance(part, GpuPart) and present[part.name, pool.gpus_per_node] < pool.max_nodes:
                found += [
                    GpuNode(
                        pool.name,
                        label,
                        pool.gpus_per_node,
                        labels={**pool.labels, PRODUCT_LABEL: label},
                        taints=pool.repelling_taints,
                    )
                    for label in part.product_labels
                ]
        return tuple(found)

    def _unheld(self, demands: Demands) -> tuple[Free, tuple[LeftOut, ...]]:
        """Return free GPUs by node for any owner, and nodes that do not count now: those that are away come first.

        Of each such node only the free GPUs are given. The result is cached: do not change it.
        """
        known = self._free.get(demands)
        if known is None:
            free: Free = Counter()
            away: list[Excluded] = []
            refused: list[Excluded] = []
            for name, node in self._nodes.items():
                part, left = self._part_or_why(node, demands), node.gpus - self._used.get(name, 0)
                if isinstance(part, Why):
                    refused.append(self._excluded(node, part, left if node.away is None else 0))
                elif node.away is not None:
                    away.append(self._excluded(node, node.away, left))
                elif left > 0:
                    free[part.name, left] += 1
            pools = self._declared(demands)[1]
            known = self._free[demands] = free, (*grouped(away), *grouped(refused), *pools)
        return known

    def _excluded(self, node: GpuNode, why: Why, gpus: int) -> Excluded:
        """A node that does not count; `gpus` of its GPUs would, if the reason was gone and its product is known."""
        name = self._part_name(node)
        return Excluded(node.name, why, (name, gpus) if name else None)

    def _part_or_why(self, node: GpuNode, demands: Demands) -> GpuPart | Why:
        """Return the part of a node's GPUs, or why pods with these demands cannot use them, now or later."""
        part = self._parts.of(node)
        return part if isinstance(part, Why) else demands.why_not(node.labels, node.taints) or part

    def _inventory(self, free: Free, refused: tuple[LeftOut, ...]) -> Inventory:
        kinds = []
        for (name, gpus), nodes in sorted(free.items()):
            part = self._catalog.get(name)
            assert isinstance(part, GpuPart)  # noqa: S101 - names in `free` come from this catalogue
            kinds.append(NodeKind(part, gpus, nodes))
        return Inventory(tuple(kinds), refused)


def _why_not_in(pool: NodePool, part: GpuPart, demands: Demands) -> Why | None:
    """What keeps pods off the pool's nodes, which will have one of the labels of its product."""
    reasons = [
        demands.why_not({PRODUCT_LABEL: label, **pool.labels}, pool.repelling_taints)
        for label in part.product_labels or (part.name,)
    ]
    return None if None in reasons else reasons[0]


def _lasting(node: GpuNode | None) -> GpuNode | None:
    """Return a node without its temporary state: the cluster still has a drained or rebooting node."""
    return replace(node, away=None) if node is not None else None
