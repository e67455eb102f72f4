"""Two operators: one writes. It is killed, and the other writes; and what neither of them may do."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import children, llmd
from e2e.durations import Durations
from e2e.operator_metrics import Replica, replicas
from e2e.release import Release
from e2e.shared_things import SharedThing

TAKEOVER_SECONDS = 20.0
# Allocates more than the container may have: the kernel then kills every process of it, without a word.
BLOW_UP = "b = [bytes([1]) * (1 << 26) for _ in range(1 << 10)]"
# With cgroup v1 the kernel kills one process of it only.
IS_KILLED_WHOLE = "import os, sys; sys.exit(not os.path.exists('/sys/fs/cgroup/cgroup.controllers'))"


def lease(cluster: Cluster, release: Release) -> Object:
    spec: Object = cluster.get("lease", release.name, "-n", release.namespace)["spec"]
    return spec


def leader_pod(cluster: Cluster, release: Release) -> str:
    """The pod that holds the Lease; empty if none does."""
    return str(lease(cluster, release).get("holderIdentity", "")).partition("_")[0]


def wait_for_a_leader(cluster: Cluster, release: Release) -> str:
    """The Lease is held by a pod that runs and says so itself."""

    def agreed() -> str:
        holder = leader_pod(cluster, release)
        return holder if any(one.pod == holder and one.leading for one in replicas(release)) else ""

    return eventually(agreed, bool, what="a leader", timeout_seconds=60)


@contextmanager
def watched(release: Release) -> Iterator[list[list[Replica]]]:
    """What all replicas say, again and again while the block runs."""
    seen: list[list[Replica]] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.append(replicas(release))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def assert_one_writer(seen: list[list[Replica]]) -> None:
    """No replica wrote while another led. A look takes a moment, so two looks that agree are what counts."""
    for before, after in itertools.pairwise(seen):
        leaders = {one.pod for one in before if one.leading} & {one.pod for one in after if one.leading}
        assert len(leaders) <= 1, f"two lead: {leaders}"
        writes = {one.pod: one.writes for one in before}
        for one in after:
            led = one.leading or any(b.pod == one.pod and b.leading for b in before)
            assert led or one.writes == writes.get(one.pod, one.writes), f"{one.pod} wrote without leading"


def restarts(cluster: Cluster, release: Release, pod: str) -> int:
    statuses = cluster.get("pod", pod, "-n", release.namespace)["status"].get("containerStatuses", [])
    return sum(int(status["restartCount"]) for status in statuses)


def delete_a_child(cluster: Cluster, namespace: str, name: str) -> str:
    uid = cluster.get("service", name, "-n", namespace)["metadata"]["uid"]
    cluster.kubectl("delete", "service", name, "-n", namespace)
    return str(uid)


def wait_repaired(cluster: Cluster, namespace: str, name: str, gone: str) -> None:
    eventually(
        lambda: cluster.find("service", name, "-n", namespace),
        lambda found: found is not None and found["metadata"]["uid"] != gone,
        what="the Service made again",
    )


@pytest.mark.shared(SharedThing.OPERATOR)
def test_a_leader_that_gets_a_signal_hands_over_and_never_do_two_write(
    cluster: Cluster, release: Release, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd("kept", replicas=0))
    eventually(lambda: children(cluster, namespace, "kept"), lambda found: len(found) >= 5, what="children")
    leader = wait_for_a_leader(cluster, release)
    before = lease(cluster, release)["leaseTransitions"]
    with watched(release) as seen, durations.measure("leader deleted -> a child repaired by the other"):
        cluster.kubectl("delete", "pod", leader, "-n", release.namespace, "--wait=false")
        gone = delete_a_child(cluster, namespace, "kept")
        eventually(
            lambda: leader_pod(cluster, release),
            lambda pod: pod not in ("", leader),
            what="another leader",
            timeout_seconds=TAKEOVER_SECONDS + 10,
        )
        wait_repaired(cluster, namespace, "kept", gone)
    assert_one_writer(seen)
    assert lease(cluster, release)["leaseTransitions"] > before


@pytest.mark.shared(SharedThing.OPERATOR)
def test_a_leader_that_crashes_is_replaced_within_twenty_seconds(
    cluster: Cluster, release: Release, namespace: str, durations: Durations
) -> None:
    """Killed by the kernel, with no chance to give the Lease up."""
    cluster.apply(namespace, llmd("kept", replicas=0))
    eventually(lambda: children(cluster, namespace, "kept"), lambda found: len(found) >= 5, what="children")
    leader = wait_for_a_leader(cluster, release)
    crashes = restarts(cluster, release, leader)
    holder = lease(cluster, release)["holderIdentity"]
    with watched(release) as seen:
        python = ("kubectl", "exec", leader, "-n", release.namespace, "--", "python3", "-c")
        if cluster.run(*python, IS_KILLED_WHOLE, check=False).returncode:
            pytest.skip("this node does not kill a whole container that is out of memory (cgroup v1)")
        began = time.monotonic()
        cluster.run(*python, BLOW_UP, check=False)
        eventually(lambda: restarts(cluster, release, leader), lambda now: now > crashes, what="a crash")
        eventually(
            lambda: lease(cluster, release)["holderIdentity"],
            lambda now: now not in ("", holder),
            what="another leader",
            timeout_seconds=TAKEOVER_SECONDS + 20,
        )
        took_seconds = time.monotonic() - began
        gone = delete_a_child(cluster, namespace, "kept")
        wait_repaired(cluster, namespace, "kept", gone)
    durations.seconds["leader crashed -> another leads"] = round(took_seconds, 2)
    assert took_seconds <= TAKEOVER_SECONDS
    assert_one_writer(seen)


FORBIDDEN = [
    ("get", "secrets"),
    ("list", "secrets"),
    ("watch", "secrets"),
    ("create", "secrets"),
    ("create", "pods/exec"),
    ("get", "pods/exec"),
    ("get", "pods/log"),
    ("create", "pods/ephemeralcontainers"),
    ("create", "pods"),
    ("delete", "pods"),
    ("create", "services/proxy"),
    ("create", "llmdeployments.millstream.dev"),
    ("update", "llmdeployments.millstream.dev"),
    ("patch", "llmdeployments.millstream.dev"),
    ("delete", "llmdeployments.millstream.dev"),
    ("update", "customresourcedefinitions.apiextensions.k8s.io"),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
    ("escalate", "clusterroles.rbac.authorization.k8s.io"),
    ("impersonate", "users"),
    ("create", "serviceaccounts/token"),
    ("get", "nodes"),
    ("delete", "namespaces"),
    ("delete", "leases.coordination.k8s.io"),
    ("list", "leases.coordination.k8s.io"),
]
NEEDED = [
    ("watch", "llmdeployments.millstream.dev"),
    ("patch", "llmdeployments.millstream.dev/status"),
    ("patch", "deployments.apps"),
    ("delete", "services"),
    ("watch", "pods"),
    ("list", "nodes"),
    ("create", "events"),
]


def may(cluster: Cluster, release: Release, *what: str) -> bool:
    account = f"system:serviceaccount:{release.namespace}:{release.name}"
    # A subresource is named by a flag of its own.
    verb, resource, *rest = what
    resource, _, subresource = resource.partition("/")
    flag = [f"--subresource={subresource}"] if subresource else []
    done = cluster.run("kubectl", "auth", "can-i", verb, resource, *rest, *flag, f"--as={account}", check=False)
    answer = done.stdout.split()
    assert answer[:1] in (["yes"], ["no"]), done.stderr
    return answer[0] == "yes"


@pytest.mark.parametrize(("verb", "resource"), FORBIDDEN)
def test_the_operator_may_not(cluster: Cluster, release: Release, namespace: str, verb: str, resource: str) -> None:
    for place in (namespace, release.namespace):
        assert not may(cluster, release, verb, resource, "-n", place)


def test_the_operator_may_do_what_it_has_to(cluster: Cluster, release: Release, namespace: str) -> None:
    """Or the test above would pass with an account that does not exist."""
    assert [what for what in NEEDED if not may(cluster, release, *what, "-n", namespace)] == []


def test_of_leases_the_operator_may_touch_its_own_alone(cluster: Cluster, release: Release, namespace: str) -> None:
    own = f"leases.coordination.k8s.io/{release.name}"
    account = f"--as=system:serviceaccount:{release.namespace}:{release.name}"

    def answer(verb: str, what: str, place: str) -> str:
        return cluster.run("kubectl", "auth", "can-i", verb, what, "-n", place, account, check=False).stdout.strip()

    assert answer("update", own, release.namespace) == "yes"
    assert answer("update", "leases.coordination.k8s.io/another", release.namespace) == "no"
    assert answer("update", own, namespace) == "no"


def test_the_operator_cannot_change_a_spec(cluster: Cluster, release: Release, namespace: str) -> None:
    """Not only by what the API server says about rights: it refuses the write itself."""
    cluster.apply(namespace, llmd("theirs", replicas=0))
    account = f"--as=system:serviceaccount:{release.namespace}:{release.name}"
    change = ["--type=merge", "--patch", '{"spec":{"replicas":1}}']
    assert "forbidden" in cluster.refused("patch", "llmd", "theirs", "-n", namespace, *change, account)
    assert "forbidden" in cluster.refused("delete", "llmd", "theirs", "-n", namespace, account)
