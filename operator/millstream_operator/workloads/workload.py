"""The contract between what runs replicas and the kind of object that makes their pods.

    Workload.render   owner, pod template, strategy -> the object: its scale, and whether it surges or replaces in place
    Workload.read     the live object -> WorkloadState: which revision it makes, its counts, its failures
    Workload.replicas pods -> Replicas: a replica is a group of one or more pods, on one or more nodes
    Workload.needs    pod template -> ReplicaNeeds: the GPUs that a replica takes, over nodes
    Workload.to_zero  the change of the live object that ends all its pods

Implemented once per kind of object: `deployments.py` (a replica is one pod). Called by `reconciling/` (reads and
writes the object), `rollout/` (decides by state and replicas), `facts/` (claims GPUs and looks for room) and `status/`.
None of these may assume that a replica has one pod, or that its GPUs are on one node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.status import AppliedStrategy
from millstream_operator.inventory.replica_needs import ReplicaNeeds
from millstream_operator.kube.kinds import Kind
from millstream_operator.workloads.replica import Replica

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkloadState:
    """What a live object says. `counts` are of replicas, by their names in `status`; empty before there are any.

    `is_observed`: its controller has seen its last generation; otherwise the counts and failures are of an earlier one.
    """

    digest: str | None  # of the revision that it makes replicas of
    wanted: int | None  # replicas
    is_observed: bool
    counts: Mapping[str, int] = field(default_factory=dict)
    is_late: bool = False  # no progress within `rollout.progressDeadline`
    failure: str | None = None  # why pods cannot be created, in the words of Kubernetes
    failed_at: str = ""  # when that was seen last, RFC 3339; "" where it is not known
    held: int | None = None  # new replicas that its rollout holds at; None: it does not hold
    held_of: int | None = None  # of how many replicas, as it was rendered; None: not recorded
    paused_by: str | None = None  # the field manager that paused it, "" where it is not known; None: it is not paused


class Workload(Protocol):
    """A kind of object that makes the pods of replicas. Pure, and without state."""

    @property
    def kind(self) -> Kind:
        """The kind of the object, which has the owner's name. `kube/kinds.py` has it watched and owned."""
        ...

    @property
    def roles(self) -> frozenset[str]:
        """The roles of the pods that make up replicas. Pods of ours with another role are of no replica."""
        ...

    def render(
        self, owner: LLMDeployment, template: Manifest, strategy: AppliedStrategy, held: int | None = None
    ) -> Manifest:
        """Return the object for `spec.replicas` replicas of a pinned pod template.

        Availability: a whole replica more comes up before an old one goes. ResourceAware: an old one goes first.
        `held`: with Availability, that many replicas are of this template, one more replica than wanted exists, and
        the rollout goes no further by itself. It is rendered one higher only while all of these are ready: an old one
        may go before its successor comes.
        """
        ...

    def read(self, live: Manifest) -> WorkloadState: ...

    def to_zero(self) -> Manifest:
        """Return the merge patch that scales the live object to zero: its pods end, each with its grace period."""
        ...

    def templates(self, live: Manifest) -> Sequence[Manifest]:
        """Return the pod templates that the live object makes pods of."""
        ...

    def replicas(self, pods: Sequence[Manifest]) -> list[Replica]:
        """Group an owner's pods. An incomplete group is a replica that is not whole; ended pods are of no replica."""
        ...

    def needs(self, template: Manifest) -> ReplicaNeeds:
        """Return what a replica of a pinned pod template takes of the nodes."""
        ...


def state_of(workloads: Workload, live: Manifest | None) -> WorkloadState | None:
    """Return the state of an object that may not exist."""
    return workloads.read(live) if live is not None else None
