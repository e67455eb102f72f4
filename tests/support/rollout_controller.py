"""A fake of the Deployment controller and the kubelets, one step at a time, with pods that fail.

It imitates `kube-controller-manager`'s rolling update (`pkg/controller/deployment/rolling.go`): scale the new
ReplicaSet up within maxSurge, then the old ones down within maxUnavailable, those that are not available first. A
ReplicaSet keeps the minReadySeconds that the Deployment had while it was the new one; as no time passes, its ready pods
are available if that is 0. Other replicas are shared out in proportion first (`sync.go`, `scale`). Pods start one step
after they were made, where the scheduler finds a node: `tests/support/scheduler.py`, or a count of GPUs that are all
alike. Of ReplicaSets only the references of pods are there, where `owned` says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from millstream_operator.kube.kinds import DEPLOYMENT, POD
from tests.support.fake_cluster import FakeCluster, pod_of
from tests.support.scheduler import ENDED, Scheduler

Manifest = dict[str, Any]
NO_GPU = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
}


def ended(message: str, *, restarts: int = 0, code: int = 1) -> Manifest:
    """The status of a pod whose runtime ended with these last words."""
    terminated = {"exitCode": code, "message": message}
    return {
        "containerStatuses": [{"name": "runtime", "restartCount": restarts, "lastState": {"terminated": terminated}}]
    }


class RolloutController:
    """The controllers of one namespace.

    `failing`: by the container's image or the name of a volume, the status that its pods come to instead of Ready.
    `gpus`: how many there are, of one kind, or `scheduler`, which knows nodes. `drain_steps`: how long a deleted pod
    ends and keeps its GPUs.
    `on_drain` is called before a pod that is ready is deleted, with it and the Deployment.
    """

    def __init__(
        self,
        cluster: FakeCluster,
        *,
        failing: Mapping[str, Manifest] | None = None,
        gpus: int | None = None,
        scheduler: Scheduler | None = None,
        drain_steps: int = 0,
        on_drain: Callable[[Manifest, Manifest], object] = lambda pod, workload: None,
    ) -> None:
        self.cluster, self.failing, self.gpus = cluster, dict(failing or {}), gpus
        self.scheduler, self.drain_steps, self.on_drain = scheduler, drain_steps, on_drain
        self.owned = False  # pods name their ReplicaSet, so that the operator believes what they report
        self._ending: dict[str, int] = {}  # steps that are left to a deleted pod, by name
        self._min_ready_seconds: dict[str, int] = {}  # of each ReplicaSet, by its digest
        self._sized: dict[str, int] = {}  # by name: the replicas that were shared out last
        self.most_pods = 0
        self.fewest_available = 1 << 10  # while the rollout was watched
        self.made: list[str] = []  # revisions of the pods, in the order in which they were made

    def pods(self, name: str = "demo") -> list[Manifest]:
        """Without those that end or have ended."""
        wanted = {"millstream.dev/deployment": name, "millstream.dev/role": "leader"}
        return [
            pod
            for pod in self.cluster.all(POD)
            if wanted.items() <= pod["metadata"]["labels"].items()
            and not pod["metadata"].get("deletionTimestamp")
            and pod["status"].get("phase") not in ENDED
        ]

    def available(self, name: str = "demo") -> list[Manifest]:
        """Those that serve."""
        return [pod for pod in self.pods(name) if _is_ready(pod)]

    def _is_available(self, pod: Manifest) -> bool:
        """In the words of the Deployment controller: ready for minReadySeconds."""
        return _is_ready(pod) and not self._min_ready_seconds.get(_digest(pod), 0)

    def step(self, name: str = "demo") -> None:
        """Let pods of the step before start, then move the rollout on by one decision."""
        workload = self.cluster.get(DEPLOYMENT, name)
        if workload is None:
            return
        self._end_pods()
        if self.scheduler is not None:
            self.scheduler.run()
        self._start_pods(name)
        self._scale(workload)
        self._update_status(name)
        self.most_pods = max(self.most_pods, len(self.pods(name)))
        self.fewest_available = min(self.fewest_available, len(self.available(name)))

    def _end_pods(self) -> None:
        for pod, steps in list(self._ending.items()):
            self._ending[pod] = steps - 1
            if steps <= 1:
                del self._ending[pod]
                self.cluster.remove(POD, pod)

    def _delete(self, pod: Manifest, workload: Manifest) -> None:
        name = pod["metadata"]["name"]
        if _is_ready(pod):
            self.on_drain(pod, workload)
        if self.drain_steps and pod["spec"].get("nodeName"):
            self._ending[name] = self.drain_steps
            self.cluster.edit(POD, name, lambda live: live["metadata"].update(deletionTimestamp="2025-01-01T00:00:00Z"))
        else:
            self.cluster.remove(POD, name)

    def _start_pods(self, name: str) -> None:
        running = sum(1 for pod in self.pods(name) if _is_scheduled(pod))
        for pod in self.pods(name):
            if _is_ready(pod) or pod["status"].get("containerStatuses"):
                continue
            if not _is_scheduled(pod):
                if self.scheduler is not None:
                    continue
                if self.gpus is not None and running >= self.gpus:
                    self._set(pod, {"conditions": [{"type": "Ready", "status": "False"}, NO_GPU]})
                    continue
                running += 1
            scheduled = {"type": "PodScheduled", "status": "True"}
            names = (pod["spec"]["containers"][0]["image"], *(one["name"] for one in pod["spec"].get("volumes") or ()))
            failure = next((self.failing[name] for name in names if name in self.failing), None)
            ready = {"type": "Ready", "status": "False" if failure is not None else "True"}
            self._set(pod, {"conditions": [ready, scheduled]} | copy.deepcopy(dict(failure or {})))

    def _scale(self, workload: Manifest) -> None:
        spec = workload["spec"]
        wanted, rolling = spec["replicas"], spec["strategy"]["rollingUpdate"]
        digest, name = _digest(spec["template"]), workload["metadata"]["name"]
        self._min_ready_seconds[digest] = spec.get("minReadySeconds", 0)
        self._share_out(workload)
        pods = self.pods(name)
        new = [pod for pod in pods if _digest(pod) == digest]
        old = sorted((pod for pod in pods if _digest(pod) != digest), key=self._is_available)  # not available first
        for _ in range(min(wanted - len(new), wanted + rolling["maxSurge"] - len(pods))):
            self._make(workload)
        for pod in sorted(new, key=_is_ready)[: max(0, len(new) - wanted)]:
            self._delete(pod, workload)
        least = wanted - rolling["maxUnavailable"]
        waiting = sum(1 for pod in new if not self._is_available(pod))
        may_go = len(pods) - least - waiting
        for pod in old[: max(0, may_go)]:
            if self._is_available(pod) and sum(map(self._is_available, self.pods(name))) <= least:
                break
            self._delete(pod, workload)

    def _share_out(self, workload: Manifest) -> None:
        """Scale every ReplicaSet in proportion where the replicas changed in the middle of a rollout."""
        name, spec = workload["metadata"]["name"], workload["spec"]
        wanted, before = spec["replicas"], self._sized.get(workload["metadata"]["name"])
        self._sized[name] = wanted
        sets: dict[str, list[Manifest]] = {}
        for pod in self.pods(name):
            sets.setdefault(_digest(pod), []).append(pod)
        if before in (None, wanted) or len(sets) < 2 or not wanted:
            return
        pods = sum(map(len, sets.values()))
        surge = spec["strategy"]["rollingUpdate"]["maxSurge"]
        left = wanted + surge - pods
        for members in sorted(sets.values(), key=len, reverse=True):
            share = round(len(members) * (wanted + surge) / (before + surge)) - len(members)
            change = max(min(share, left), 0) if left > 0 else min(max(share, left), 0)
            left -= change
            for _ in range(change):
                self._make(workload, members[0])
            for pod in sorted(members, key=_is_ready)[: max(0, -change)]:
                self._delete(pod, workload)

    def _make(self, workload: Manifest, like: Manifest | None = None) -> None:
        """`like`: another pod of an older ReplicaSet."""
        template = workload["spec"]["template"]
        if like is not None:
            template = {"metadata": {"labels": like["metadata"]["labels"]}, "spec": like["spec"]}
        name = f"{workload['metadata']['name']}-{_digest(template)}-{self.cluster.version}"
        unscheduled = [{"type": "Ready", "status": "False"}]
        pod = pod_of(name, template, conditions=unscheduled)
        if self.owned:
            pod["metadata"]["ownerReferences"] = [self.cluster.replica_set(workload, _digest(template))]
        self.cluster.put(pod)
        self.made.append(_digest(template))

    def _update_status(self, name: str) -> None:
        workload = self.cluster.the(DEPLOYMENT, name)
        pods, digest = self.pods(name), _digest(workload["spec"]["template"])
        counts = {
            "observedGeneration": workload["metadata"]["generation"],
            "replicas": len(pods),
            "updatedReplicas": sum(1 for pod in pods if _digest(pod) == digest),
            "readyReplicas": sum(map(_is_ready, pods)),
            "availableReplicas": sum(map(self._is_available, pods)),
        }
        self.cluster.set_status(DEPLOYMENT, name, {**counts, **self._late(workload)})

    @staticmethod
    def _late(workload: Manifest) -> Manifest:
        """A deadline that a test let pass stays passed until the template changes."""
        kept = workload.get("status", {})
        if kept.get("observedGeneration") != workload["metadata"]["generation"] or "conditions" not in kept:
            return {}
        return {"conditions": kept["conditions"]}

    def let_the_deadline_pass(self, name: str = "demo") -> None:
        late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
        self.cluster.edit(DEPLOYMENT, name, lambda live: live["status"].update(conditions=[late]))

    def _set(self, pod: Manifest, status: Manifest) -> None:
        self.cluster.set_status(POD, pod["metadata"]["name"], status)


def _digest(manifest: Manifest) -> str:
    return str(manifest["metadata"]["labels"]["millstream.dev/revision"])


def _condition(pod: Manifest, kind: str) -> Manifest:
    return next((one for one in pod["status"].get("conditions", []) if one["type"] == kind), {})


def _is_ready(pod: Manifest) -> bool:
    return bool(_condition(pod, "Ready").get("status") == "True")


def _is_scheduled(pod: Manifest) -> bool:
    return bool(_condition(pod, "PodScheduled").get("status") == "True")
