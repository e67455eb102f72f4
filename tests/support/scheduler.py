"""A fake of kube-scheduler and of a cluster autoscaler, over the nodes and pods of a `FakeCluster`.

    nodes  gpu_node(name, product, gpus, labels, taints, unschedulable)      tests/support/gpu_nodes.py
    pods   what the operator rendered, and gpu_pod(name, node, gpus) of other tenants

`Scheduler.run` binds each pending pod to a node that fits, or gives it the condition PodScheduled=False in the words of
kube-scheduler's plugins. What decides: spec.unschedulable, the node's Ready condition, taints and tolerations,
nodeSelector, required node affinity, and GPUs that no bound pod holds. What is not imitated: other resources,
preemption, volumes, and scores beyond "the node with the most free GPUs first" (`choose` replaces it).

`NodePool`s start new nodes for pods that wait (scale-up from zero), one round after the pod was found unschedulable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.kube.kinds import NODE, POD
from tests.support.fake_cluster import FakeCluster
from tests.support.gpu_nodes import gpu_node

Manifest = dict[str, Any]
GPU = "nvidia.com/gpu"
ENDED = ("Succeeded", "Failed")
CORDONED_KEY = "node.kubernetes.io/unschedulable"


@dataclass(frozen=True)
class NodePool:
    """Nodes that an autoscaler may add: each with `gpus` of a product, at most `most` of them."""

    name: str
    product: str
    gpus: int = 1
    most: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Manifest] = ()

    def node(self, number: int) -> Manifest:
        labels = {"pool": self.name, **self.labels}
        return gpu_node(f"{self.name}-{number}", self.product, self.gpus, labels=labels, taints=list(self.taints))


class Scheduler:
    """`choose` picks one of the nodes that fit, given in the order of their free GPUs, most first."""

    def __init__(
        self,
        cluster: FakeCluster,
        *,
        pools: Iterable[NodePool] = (),
        choose: Callable[[Sequence[str]], str] = lambda names: names[0],
    ) -> None:
        self.cluster, self.pools, self._choose = cluster, tuple(pools), choose
        self.also_short = ""  # another plugin's words about every node, while pods wait for GPUs
        self.now: Callable[[], str] | None = None  # the time of a pod's condition; None: it has none

    def run(self) -> None:
        """Bind each pod that is pending, oldest first, or say why no node takes it; then add nodes for the latter."""
        waiting = []
        for pod in sorted(filter(_is_pending, self.cluster.all(POD)), key=lambda pod: str(pod["metadata"]["uid"])):
            names = self.nodes_for(pod["spec"])
            if names:
                self._bind(pod, self._choose(names))
            else:
                self._refuse(pod)
                waiting.append(pod)
        self._scale_up(waiting)

    def nodes_for(self, pod_spec: Manifest, *, without: Iterable[str] = ()) -> list[str]:
        """Names of the nodes that would take such a pod now, most free GPUs first.

        `without`: names of pods that count as gone. Empty: the pod would stay Pending.
        """
        held = self.held(without)
        nodes = [node for node in self.cluster.all(NODE) if _refusal(node, pod_spec, held) is None]
        return [_name(node) for node in sorted(nodes, key=lambda node: held[_name(node)] - _gpus_on(node))]

    def could_start(self, pod_spec: Manifest, *, without: Iterable[str] = ()) -> bool:
        """Whether such a pod would find a node now, an added one included."""
        return bool(self.nodes_for(pod_spec, without=without)) or self._pool_for(pod_spec) is not None

    def held(self, without: Iterable[str] = ()) -> Counter[str]:
        """GPUs that bound pods hold, by node. Terminating pods hold theirs until they are gone."""
        gone, found = set(without), Counter[str]()
        for pod in self.cluster.all(POD):
            node = pod["spec"].get("nodeName")
            if node and pod.get("status", {}).get("phase") not in ENDED and pod["metadata"]["name"] not in gone:
                found[node] += asked_gpus(pod["spec"])
        return found

    def remove_empty_nodes(self) -> None:
        """Scale the pools down: nodes without GPU pods go."""
        held, pools = self.held(), {pool.name for pool in self.pools}
        for node in self.cluster.all(NODE):
            if node["metadata"]["labels"].get("pool") in pools and not held[_name(node)]:
                self.cluster.remove(NODE, _name(node), namespace="")

    def _bind(self, pod: Manifest, node: str) -> None:
        def bound(live: Manifest) -> None:
            live["spec"]["nodeName"] = node
            live["status"]["conditions"] = [*_others(live), {"type": "PodScheduled", "status": "True"}]

        self.cluster.edit(POD, pod["metadata"]["name"], bound, pod["metadata"]["namespace"])

    def _refuse(self, pod: Manifest) -> None:
        held, nodes = self.held(), self.cluster.all(NODE)
        counted = Counter(_refusal(node, pod["spec"], held) for node in nodes)
        if self.also_short:
            counted[self.also_short] = len(nodes)
        said = ", ".join(sorted(f"{times} {words}" for words, times in counted.items()))
        message = f"0/{len(nodes)} nodes are available: {said}." if nodes else "no nodes available to schedule pods"
        no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        before: Manifest = next(
            (one for one in pod["status"].get("conditions", ()) if one["type"] == "PodScheduled"), {}
        )
        if self.now is not None:
            since = before.get("lastTransitionTime") if before.get("status") == "False" else None
            no["lastTransitionTime"] = since or self.now()
        status = pod.get("status", {}) | {"conditions": [*_others(pod), no]}
        self.cluster.set_status(POD, pod["metadata"]["name"], status, pod["metadata"]["namespace"])

    # The autoscaler

    def _scale_up(self, waiting: Iterable[Manifest]) -> None:
        for pod in waiting:
            if (pool := self._pool_for(pod["spec"])) is not None:
                self.cluster.put(pool.node(self._size(pool)))

    def _pool_for(self, pod_spec: Manifest) -> NodePool | None:
        """The first pool whose next node would take the pod."""
        for pool in self.pools:
            if self._size(pool) < pool.most and _refusal(pool.node(0), pod_spec, Counter()) is None:
                return pool
        return None

    def _size(self, pool: NodePool) -> int:
        return sum(node["metadata"]["labels"].get("pool") == pool.name for node in self.cluster.all(NODE))


def asked_gpus(pod_spec: Manifest) -> int:
    """GPUs that the containers of a pod ask for together."""
    asked = 0
    for container in pod_spec.get("containers") or ():
        resources = container.get("resources") or {}
        amounts = [(resources.get(part) or {}).get(GPU) for part in ("limits", "requests")]
        asked += max(int(amount or 0) for amount in amounts)
    return asked


# Why a node does not take a pod, in the order of the scheduler's plugins


def _refusal(node: Manifest, pod_spec: Manifest, held: Mapping[str, int]) -> str | None:
    tolerations = pod_spec.get("tolerations") or ()
    if node["spec"].get("unschedulable") and not _is_tolerated(_taint(CORDONED_KEY), tolerations):
        return "node(s) were unschedulable"
    for taint in _taints(node):
        if taint["effect"] != "PreferNoSchedule" and not _is_tolerated(taint, tolerations):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    if not _selects(pod_spec, node["metadata"].get("labels") or {}):
        return "node(s) didn't match Pod's node affinity/selector"
    if asked_gpus(pod_spec) > _gpus_on(node) - held.get(_name(node), 0):
        return f"Insufficient {GPU}"
    return None


def _taints(node: Manifest) -> list[Manifest]:
    """Those of the spec, and the one that the node controller sets on a node that is not Ready."""
    ready = next((one["status"] for one in node["status"].get("conditions", ()) if one["type"] == "Ready"), "True")
    lost = [] if ready == "True" else [_taint("node.kubernetes.io/not-ready")]
    return [*(node["spec"].get("taints") or ()), *lost]


def _taint(key: str) -> Manifest:
    return {"key": key, "effect": "NoSchedule"}


def _is_tolerated(taint: Manifest, tolerations: Iterable[Manifest]) -> bool:
    return any(
        one.get("key", "") in ("", taint["key"])
        and (one.get("operator") == "Exists" or one.get("value", "") == taint.get("value", ""))
        and one.get("effect", "") in ("", taint["effect"])
        for one in tolerations
    )


def _selects(pod_spec: Manifest, labels: Mapping[str, str]) -> bool:
    selector = pod_spec.get("nodeSelector") or {}
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms")
    return all(labels.get(key) == value for key, value in selector.items()) and (
        not terms or any(all(_matches(one, labels) for one in term.get("matchExpressions", ())) for term in terms)
    )


def _matches(expression: Manifest, labels: Mapping[str, str]) -> bool:
    found, values = labels.get(expression["key"]), expression.get("values") or ()
    answers = {
        "In": found in values,
        "NotIn": found not in values,
        "Exists": found is not None,
        "DoesNotExist": found is None,
    }
    return answers[expression["operator"]]


def _gpus_on(node: Manifest) -> int:
    return int(node["status"]["allocatable"].get(GPU, "0"))


def _name(manifest: Manifest) -> str:
    return str(manifest["metadata"]["name"])


def _is_pending(pod: Manifest) -> bool:
    is_done = pod.get("status", {}).get("phase") in ENDED or pod["metadata"].get("deletionTimestamp")
    return not pod["spec"].get("nodeName") and not is_done and not pod["spec"].get("schedulingGates")


def _others(pod: Manifest) -> list[Manifest]:
    return [one for one in pod["status"].get("conditions", ()) if one["type"] != "PodScheduled"]
