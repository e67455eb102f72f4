"""Every verb of the operator's ClusterRole is needed: the operator's own code makes a request that has no other right.

The requests are collected from what it does to a fake cluster, in situations that need each of them. A verb that
nothing here asks for is one too many, and a request that the role does not grant is one too few.
"""

from __future__ import annotations

import copy
from typing import Any

from millstream_operator.kube.event_queue import EventWriter
from millstream_operator.kube.kinds import (
    BY_KIND,
    CONFIG_MAP,
    HORIZONTAL_POD_AUTOSCALER,
    LEASE,
    LLM_DEPLOYMENT,
    OPTIONAL,
    OWNED,
    POD,
    REPLICA_SET,
    WATCHED,
)
from millstream_operator.kube.watch_freshness import OVERDUE_SECONDS, WatchFreshness
from millstream_operator.kube.watch_verification import WatchVerification
from millstream_operator.leadership.ownership import Release
from millstream_operator.leadership.release_leases import ReleaseLeases
from millstream_operator.probing.pod_owners import PodOwners
from millstream_operator.rendering.companions import CompanionDefaults
from millstream_operator.rollout.pruning import HISTORY_LIMIT
from tests.support.fake_cluster import FakeClusterClient, Request
from tests.support.fake_operator import FakeOperator, respec, world
from tests.support.helm_chart import of_kind, render
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
Right = tuple[str, str]  # verb, resource
# An apply of what is not there creates, too.
VERBS = {"get": ("get",), "list": ("list",), "apply": ("patch",), "merge": ("patch",), "delete": ("delete",)}
CACHED = {"source": {"huggingFace": {"repository": "org/model"}}, "cache": {"size": "20Gi"}}
# Kinds of the API server that are no children.
RESOURCES = {kind.kind: kind.plural for kind in (*BY_KIND.values(), LEASE, REPLICA_SET)}


def granted() -> set[Right]:
    """By the ClusterRole of a release that reads no nodes: those are the inventory's."""
    documents = render("inventory.mode=Disabled")
    (binding,) = of_kind(documents, "ClusterRoleBinding")
    (role,) = (
        one for one in of_kind(documents, "ClusterRole") if one["metadata"]["name"] == binding["roleRef"]["name"]
    )
    return {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}


def asked(requests: list[Request]) -> set[Right]:
    """The rights that these requests need."""
    rights: set[Right] = set()
    for request in requests:
        if request.kind not in RESOURCES:
            continue  # the API server's list of its kinds, which everybody may read
        resource = RESOURCES[request.kind] + (f"/{request.subresource}" if request.subresource else "")
        verbs = ("create",) if request.verb == "create" else VERBS[request.verb]
        rights |= {(verb, resource) for verb in (*verbs, *(("create",) if request.unless_there else ()))}
    return rights


async def life_of_children() -> list[Request]:
    """Made, edited by hand, copied by hand, and stopped when the LLMDeployment is gone."""
    cluster = world(manifest(model={"servedName": "m", **CACHED}, replicas=2, autoscaling={"maxReplicas": 4}))
    operator = FakeOperator(cluster, companions=CompanionDefaults("http://prometheus:9090"))
    await operator.inspect()  # a Job, which is deleted again
    await operator.settle()
    cluster.installed |= set(OPTIONAL)
    await operator.settle()
    children = [live for kind in (*OWNED, HORIZONTAL_POD_AUTOSCALER, *OPTIONAL) for live in cluster.all(kind)]
    for live in children:
        cluster.edit(BY_KIND[live["kind"]], live["metadata"]["name"], _without_mark)
        cluster.put(_copy_of(live))
    await operator.settle()
    respec(cluster, autoscaling=None, replicas=1)
    await operator.settle()
    for length in range(1024, 1024 + HISTORY_LIMIT + 2):  # the oldest record of a revision goes
        respec(cluster, engine={"maxModelLen": length})
        await operator.settle()
    cluster.remove(LLM_DEPLOYMENT, "demo")
    await operator.turn()
    return [*operator.client.requests, *operator.looker.requests]


def _without_mark(live: Manifest) -> None:
    live["metadata"].pop("annotations", None)


def _copy_of(live: Manifest) -> Manifest:
    """As `kubectl get … -o yaml` with another name, applied."""
    stray = copy.deepcopy(live)
    stray["metadata"]["name"] = f"{live['metadata']['name']}-stray"
    for field in ("uid", "resourceVersion", "creationTimestamp", "generation"):
        stray["metadata"].pop(field, None)
    return stray


async def questions() -> list[Request]:
    """About pods, their owners, and the Lease of another release; and Events."""
    client = FakeClusterClient(world())
    freshness, moment = WatchFreshness(WATCHED, 0.0), [0.0]
    verification = WatchVerification(client, freshness, lambda: moment[0])
    listed = {"metadata": {"name": "demo-1", "namespace": "team", "resourceVersion": "7"}}
    verification.expect(POD, listed)  # its listing was newer than what the watch of pods has delivered
    moment[0] = 2 * OVERDUE_SECONDS
    await verification.verify()
    reference = {"kind": "ReplicaSet", "controller": True, "uid": "1", "name": "demo-1"}
    await PodOwners(client).deployment_of({"metadata": {"namespace": "team", "ownerReferences": [reference]}})
    await ReleaseLeases(client, lambda: 0.0, lambda: "").look(Release("others", "millstream"))
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e", "namespace": "team"}}
    await EventWriter(client).publish(event)
    return client.requests


async def test_the_operator_asks_for_each_verb_that_it_has_and_for_no_other() -> None:
    needed = asked([*await life_of_children(), *await questions()])
    # What kopf does with each watched kind; `operator/test_app.py` has the watches.
    needed |= {(verb, kind.plural) for kind in WATCHED for verb in ("list", "watch")}
    # No request: the API server asks for it where owner references may block a deletion (see the next test).
    needed |= {("update", "llmdeployments/finalizers")}
    assert needed - granted() == set(), "missing"
    assert granted() - needed == set(), "not needed"


async def test_each_child_blocks_the_deletion_of_its_owner_for_which_finalizers_must_be_writable() -> None:
    operator = FakeOperator(world())
    await operator.settle()
    (reference,) = operator.cluster.all(CONFIG_MAP)[0]["metadata"]["ownerReferences"]
    assert reference["blockOwnerDeletion"] is True
