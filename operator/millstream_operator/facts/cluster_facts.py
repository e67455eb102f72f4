"""The facts that plans are made from in the cluster: free GPUs, prices, the model's shape. One `Facts` per plan.

    GpuWatch ─▶ accounts ─┐
    catalogue file ───────┼─▶ ClusterFacts.of(owner) ─▶ Facts ─▶ planner
    shapes ───────────────┘        ▲
    index (records, owners) ───────┘ promises: GPUs that other pinned plans want and do not have yet

All of it is rebuilt after a restart: promises follow from the records of the other LLMDeployments, and from plans whose
record is not in the index yet. A change only marks its owner; the next call updates the sums, so a thousand plans cost
a thousand small updates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.model import ModelSource
from millstream_operator.api.spec import Accelerator, AcceleratorType
from millstream_operator.catalog.gpu import GpuCatalog, load_catalog
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.inventory.accounts import GpuAccounts
from millstream_operator.inventory.demands import Demands, read_tolerations
from millstream_operator.inventory.node_affinity import read_terms
from millstream_operator.inventory.node_pools import NodePool
from millstream_operator.inventory.nodes import GpuNode
from millstream_operator.inventory.packing import Want
from millstream_operator.inventory.pod_needs import read_needs
from millstream_operator.inventory.pods import GpuPod
from millstream_operator.inventory.replica_needs import ReplicaNeeds
from millstream_operator.inventory.room import Room, room_on, room_unseen
from millstream_operator.inventory.unknown_gpus import UnknownGpus, no_gpu_nodes, none_usable, not_looked_at
from millstream_operator.kube.index import Index, OwnerKey, owner_key
from millstream_operator.kube.kinds import CONTROLLER_REVISION, LLM_DEPLOYMENT, Kind
from millstream_operator.planning.calibration import NO_CALIBRATION, Calibration
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanReason
from millstream_operator.planning.scaling_cost import affordable_replicas
from millstream_operator.rendering.affinity import pod_affinity
from millstream_operator.rendering.names import REVISION_LABEL
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import Revision
from millstream_operator.workloads.deployments import DEPLOYMENTS
from millstream_operator.workloads.replica import Replica
from millstream_operator.workloads.workload import Workload

Manifest = dict[str, Any]
HUB_VARIABLE = "HF_ENDPOINT"  # names another hub, where a repository of the same name may be another model
NOT_LISTED = "The cluster's nodes are not listed yet."


class FactsSource(Protocol):
    """A source of the facts that plans are made from."""

    def of(self, owner: LLMDeployment) -> Facts:
        """Return what is known for a new plan of this LLMDeployment."""
        ...

    def promise(self, owner: LLMDeployment, revision: Revision) -> None:
        """Reserve the GPUs of a new plan, whose record is not in the index yet."""
        ...

    def holds_gpus(self, owner: LLMDeployment, digest: str | None = None) -> bool:
        """Return whether any of its pods is bound to a node. `digest`: those of one revision."""
        ...

    def could_start(self, owner: LLMDeployment, revision: Revision, *, give_up: bool) -> bool:
        """Return whether a pod of a revision would find its GPUs now; True where that is not known.

        `give_up`: the GPUs that the owner's pods hold count as free.
        """
        ...

    @property
    def lacks_gpus(self) -> bool:
        """Whether no node offers a GPU, and no node pool with GPUs is declared; False where that is not known."""
        ...

    @property
    def stamp(self) -> int:
        """A number that changes when plans may have become outdated."""
        ...


class Shapes(Protocol):
    """A source of model shapes."""

    def __call__(self, owner: LLMDeployment, source: ModelSource) -> ModelShape | None:
        """Return the shape of the owner's model, or of its draft; None while it is not known."""
        ...


def shape_from_catalogue(owner: LLMDeployment, source: ModelSource) -> ModelShape | None:
    """Return the shape from the table of known models, only where it is certain to be that model.

    An inspection of the model in the cluster takes precedence. A revision other than main, another hub or a
    `model.configMapRef` may all mean another shape than the table's.
    """
    hub = source.hugging_face
    if hub is None or hub.revision not in (None, "main") or owner.spec.model.config_map_ref is not None:
        return None
    pod = owner.spec.pod_template.spec if owner.spec.pod_template else None
    variables = {
        variable.name for container in (pod.containers if pod else None) or () for variable in container.env or ()
    }
    return None if HUB_VARIABLE in variables else known_shape(hub.repository)


class ClusterFacts:
    """Facts about the cluster, updated by the watches. For use within one event loop.

    `problem` says why the GPUs are not known; None where they are. `on_change` is called after each change of a node or
    of a pod with GPUs.
    """

    def __init__(
        self,
        index: Index,
        pods: PodDefaults | None = None,
        catalog: GpuCatalog | None = None,
        shapes: Shapes = shape_from_catalogue,
        node_pools: Sequence[NodePool] = (),
        on_change: Callable[[], object] = lambda: None,
        workloads: Workload = DEPLOYMENTS,
    ) -> None:
        self._index, self._pods, self._shapes = index, pods or PodDefaults(), shapes
        self._on_change, self.workloads = on_change, workloads
        self._catalog = catalog or load_catalog()
        self._accounts = GpuAccounts(self._catalog, node_pools)
        self._promises: dict[OwnerKey, tuple[str, Revision]] = {}  # with the owner's uid, until the record is seen
        self._changed_owners: set[OwnerKey] = set()
        self._closed_nodes: dict[str, str] = {}  # by name: why they take no pods, with GPUs or without
        self._seen_generation = -1
        self.problem: str | None = NOT_LISTED
        self.stamp = 0
        self.calibration = NO_CALIBRATION  # for new plans alone: another one makes no plan outdated

    # Updates

    def changed(self, kind: Kind, manifest: Manifest) -> None:
        """The index has another state of an object, or removed it."""
        if kind is LLM_DEPLOYMENT or kind is CONTROLLER_REVISION:
            self._changed_owners.add(owner_key(kind, manifest))

    def put_node(self, name: str, node: GpuNode | None, closed: str | None = None) -> None:
        """Set a node's state. `node` None: it has no GPUs, or is gone; `closed`: why it takes no pods now."""
        self._accounts.put_node(name, node)
        if closed is not None:
            self._closed_nodes[name] = closed
        else:
            self._closed_nodes.pop(name, None)
        self._on_change()

    def replace_nodes(self, nodes: Iterable[GpuNode], closed: Mapping[str, str] | None = None) -> None:
        self._accounts.replace_nodes(nodes)
        self._closed_nodes = dict(closed or {})
        self._on_change()

    def put_pod(self, uid: str, pod: GpuPod | None) -> None:
        self._mark_changed(self._accounts.put_pod(uid, pod))
        self._on_change()

    def replace_pods(self, pods: Iterable[GpuPod]) -> None:
        self._mark_changed(self._accounts.replace_pods(pods))
        self._on_change()

    def use_catalog(self, catalog: GpuCatalog) -> None:
        """Use other prices or parts."""
        self._catalog = catalog
        self._accounts.use_catalog(catalog)

    def use_calibration(self, calibration: Calibration) -> None:
        """Use other corrections for the plans that are made from now on."""
        self.calibration = calibration

    @property
    def catalog(self) -> GpuCatalog:
        return self._catalog

    def advance(self) -> bool:
        """Move `stamp` on if there are other GPUs or prices than at the last call. Return whether it moved."""
        if self._accounts.generation == self._seen_generation:
            return False
        self._seen_generation = self._accounts.generation
        self.stamp += 1
        return True

    # Queries

    @property
    def lacks_gpus(self) -> bool:
        return self.problem is None and self._accounts.is_empty

    def of(self, owner: LLMDeployment) -> Facts:
        draft = owner.spec.speculation.draft_model if owner.spec.speculation else None
        shape = self._shapes(owner, owner.spec.model.source)
        known = Facts(
            shape=shape,
            draft_shape=self._shapes(owner, draft.source) if draft is not None else None,
            catalog=self._catalog,
            calibration=self.calibration,
        )
        if (owner.spec.accelerator or Accelerator()).type is AcceleratorType.CPU:
            return known
        unknown = []
        if shape is None:
            why = "The model's config.json has not been read, so memory and speed are not predicted."
            unknown.append(PlanReason("model.source", why))
        demands = self._demands(owner)
        if (unseen := self._unknown_gpus(demands)) is not None:
            declared = self._accounts.declared(demands)
            then = f" The declared node pools are planned for: {declared}." if declared.kinds else ""
            unknown.append(PlanReason("inventory", f"{unseen.why}{then}"))
            return replace(
                known, inventory=declared if declared.kinds else None, unknown=tuple(unknown), unknown_gpus=unseen
            )
        self._update_promises()
        free = self._accounts.free(_key_of(owner), demands)
        capacity = self._accounts.capacity(demands)
        return replace(known, inventory=free, capacity=capacity, may_grow=True, unknown=tuple(unknown))

    def promise(self, owner: LLMDeployment, revision: Revision) -> None:
        key = _key_of(owner)
        self._promises[key] = (owner.metadata.uid or "", revision)
        self._changed_owners.add(key)

    def holds_gpus(self, owner: LLMDeployment, digest: str | None = None) -> bool:
        return self._accounts.bound(_key_of(owner), digest) > 0

    def could_start(self, owner: LLMDeployment, revision: Revision, *, give_up: bool) -> bool:
        needs = self.workloads.needs(revision.template)
        if self.problem is not None or not needs.gpus:
            return True
        self._update_promises()
        key = _key_of(owner)
        nodes = self._accounts.nodes_for(key)
        return not nodes.nodes or nodes.fits(needs, self._accounts.pods_of(key) if give_up else ()) > 0

    def room(
        self,
        owner: LLMDeployment,
        revision: Revision,
        serving: Sequence[Replica],
        ending: Sequence[Manifest] = (),
        waiting: int = 0,
    ) -> Room:
        """Return the room for one more replica of a revision, and which of the `serving` could be given up for it.

        `ending`: pods of the owner that are being deleted; their GPUs count as free. `waiting`: replicas of the
        revision that have no node yet.
        """
        needs = self.workloads.needs(revision.template)
        if self.problem is not None or not needs.gpus:
            why = self.problem or "The operator does not know how much CPU and memory the nodes have free"
            return self._with_lost_nodes(room_unseen(needs, {one.uid: _needs_of(one) for one in serving}, why), serving)
        self._update_promises()
        nodes = self._accounts.nodes_for(_key_of(owner))
        on_nodes = {one.uid: one.nodes for one in serving if one.nodes}
        return room_on(nodes, needs, on_nodes, [_uid(pod) for pod in ending], waiting)

    def _with_lost_nodes(self, room: Room, serving: Sequence[Replica]) -> Room:
        """The same room, where replicas on nodes that take no pods now are kept."""
        kept = dict(room.kept)
        for one in serving:
            for _, node in one.nodes:
                if node in self._closed_nodes:
                    kept[one.uid] = f"node {node} takes no pods now ({self._closed_nodes[node]})"
        return replace(room, kept=kept)

    def _unknown_gpus(self, demands: Demands) -> UnknownGpus | None:
        """Return why the GPUs for a pod with these demands are not known; None where they are."""
        if self.problem is not None:
            return not_looked_at(self.problem)
        capacity = self._accounts.capacity(demands)
        if capacity.kinds:
            return None
        return none_usable(capacity.refused) if capacity.refused else no_gpu_nodes()

    def _demands(self, owner: LLMDeployment) -> Demands:
        """As `rendering/pod_template.py` writes them."""
        pod = owner.spec.pod_template.spec if owner.spec.pod_template else None
        selector = {**self._pods.node_selector, **((pod.node_selector if pod else None) or {})}
        given = [*self._pods.tolerations, *((pod.tolerations if pod else None) or [])]
        tolerations = (one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in given)
        terms = read_terms(pod_affinity(pod.affinity if pod else None, ()))
        return Demands(frozenset(selector.items()), read_tolerations(tolerations), terms)

    # Promises

    def _mark_changed(self, owners: Iterable[Hashable]) -> None:
        self._changed_owners |= {owner for owner in owners if isinstance(owner, OwnerKey)}

    def _update_promises(self) -> None:
        while self._changed_owners:
            key = self._changed_owners.pop()
            want, times = self._wanted(key)
            self._accounts.promise(key, want, times)

    def _wanted(self, key: OwnerKey) -> tuple[Want | None, int]:
        """Return what a plan wants beyond its bound pods: GPUs per pod, and the number of pods of all its replicas."""
        owner = self._index.get(LLM_DEPLOYMENT, key.namespace, key.name)
        if owner is None or owner["metadata"].get("deletionTimestamp"):
            self._promises.pop(key, None)
            return None, 0
        pinned = self._newest_plan(key, owner["metadata"]["uid"])
        if pinned is None:
            return None, 0
        digest, plan, template = pinned
        replicas, budget = owner.get("spec", {}).get("replicas", 1), owner.get("spec", {}).get("budget") or {}
        gpus, part = plan.get("gpusPerReplica") or 0, plan.get("accelerator")
        if gpus <= 0 or not isinstance(replicas, int):
            return None, 0
        if isinstance(paid := budget.get("maxMonthlyUSD"), int) and budget.get("enforcement") != "Observe":
            limit = affordable_replicas(plan, paid)  # more are never made
            replicas = replicas if limit is None else min(replicas, limit)
        pods = self.workloads.needs(template).pods
        missing = replicas * pods - self._accounts.bound(key, digest)
        return Want(gpus // pods, None if part == AcceleratorType.GPU else part), missing

    def _newest_plan(self, key: OwnerKey, uid: str) -> tuple[str, Mapping[str, Any], Manifest] | None:
        """Return digest, plan and pod template of the wanted revision: just made, else of the newest record."""
        records = [
            record
            for record in self._index.children(key, CONTROLLER_REVISION)
            if any(one.get("uid") == uid for one in record["metadata"].get("ownerReferences", ()))
        ]
        if (made := self._promises.get(key)) is not None:
            if made[0] == uid and all(record["metadata"]["name"] != made[1].name for record in records):
                return made[1].digest, made[1].plan, made[1].template
            del self._promises[key]  # its record is in the index, or it was of another object of this name
        if not records:
            return None
        newest = max(records, key=lambda record: (int(record["revision"]), record["metadata"]["name"]))
        data = newest.get("data") or {}
        return newest["metadata"]["labels"].get(REVISION_LABEL, ""), data.get("plan") or {}, data.get("template") or {}


def _uid(pod: Manifest) -> str:
    return str(pod["metadata"].get("uid", ""))


def _needs_of(replica: Replica) -> ReplicaNeeds:
    """What a replica that runs has of its nodes."""
    held = [needs for pod in replica.pods if (needs := read_needs(pod)).gpus]
    return ReplicaNeeds(held[0], len(held)) if held else ReplicaNeeds(read_needs(replica.pods[0]))


def _key_of(owner: LLMDeployment) -> OwnerKey:
    return OwnerKey(owner.metadata.namespace or "", owner.name, owner.kind)
