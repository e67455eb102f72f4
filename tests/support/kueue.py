"""A fake of Kueue for plain pods: each pod of a queue is gated when it is made, and admitted while there is quota.

What is imitated: the scheduling gate, the condition PodScheduled=False (SchedulingGated), quota in GPUs, and that a pod
that ends frees its quota. What is not: ClusterQueues, cohorts, preemption, and quota of other resources.
"""

from __future__ import annotations

import functools

from millstream_operator.kube.kinds import POD
from millstream_operator.rendering.kueue import QUEUE_LABEL
from tests.support.fake_cluster import FakeCluster, Manifest
from tests.support.scheduler import ENDED, Scheduler, asked_gpus

GATE = {"name": "kueue.x-k8s.io/admission"}
GATED = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}


class QueuedScheduler(Scheduler):
    """A scheduler behind Kueue. `quota`: the GPUs of all queues together."""

    def __init__(self, cluster: FakeCluster, quota: int) -> None:
        super().__init__(cluster)
        self.quota = quota
        self._admitted: set[str] = set()  # uids

    def run(self) -> None:
        queued = [pod for pod in self.cluster.all(POD) if _is_queued(pod)]
        self._admitted &= {pod["metadata"]["uid"] for pod in queued}
        used = sum(asked_gpus(pod["spec"]) for pod in queued if pod["metadata"]["uid"] in self._admitted)
        for pod in sorted(queued, key=lambda pod: int(pod["metadata"]["uid"].removeprefix("uid-"))):
            if pod["metadata"]["uid"] in self._admitted:
                continue
            used += asked_gpus(pod["spec"])
            admitted = used <= self.quota
            if admitted:
                self._admitted.add(pod["metadata"]["uid"])
            self.cluster.edit(POD, pod["metadata"]["name"], functools.partial(_gate, admitted=admitted))
        super().run()


def _is_queued(pod: Manifest) -> bool:
    return QUEUE_LABEL in pod["metadata"].get("labels", {}) and pod.get("status", {}).get("phase") not in ENDED


def _gate(live: Manifest, *, admitted: bool) -> None:
    others = [one for one in live["status"].get("conditions", ()) if one["type"] != "PodScheduled"]
    live["spec"]["schedulingGates"] = [] if admitted else [GATE]
    live["status"]["conditions"] = others if admitted else [*others, GATED]
