"""Of two releases one manages an LLMDeployment: what each concludes from the status and from the other's Lease."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import LEASE
from millstream_operator.leadership.ownership import (
    LeaseSight,
    LeaseState,
    ManagerDecision,
    Release,
    decide_manager,
    manager_of,
    without_others,
)
from millstream_operator.leadership.release_leases import READ_SECONDS, ReleaseLeases
from tests.support.fake_cluster import FakeCluster, FakeClusterClient, Fault

Manifest = dict[str, Any]
OWN, OTHER = Release("team-a", "a-millstream"), Release("team-b", "b-millstream")
ABSENT, UNREADABLE, PRESENT = LeaseState.ABSENT, LeaseState.UNREADABLE, LeaseState.PRESENT


@pytest.mark.parametrize(
    ("recorded", "sight", "decision"),
    [
        (None, None, ManagerDecision.CLAIM),
        (OWN, None, ManagerDecision.KEEP),
        (OTHER, LeaseSight(ABSENT), ManagerDecision.CLAIM),
        (OTHER, LeaseSight(UNREADABLE), ManagerDecision.LEAVE),
        (OTHER, LeaseSight(UNREADABLE, 6000.0), ManagerDecision.LEAVE),
        # Its clock and ours agree: ten minutes since renewTime, of which this process has seen one.
        (OTHER, LeaseSight(PRESENT, 0.0, 2.0), ManagerDecision.LEAVE),
        (OTHER, LeaseSight(PRESENT, 59.9, 86400.0), ManagerDecision.LEAVE),
        (OTHER, LeaseSight(PRESENT, 60.0, 599.9), ManagerDecision.LEAVE),
        (OTHER, LeaseSight(PRESENT, 60.0, 600.0), ManagerDecision.CLAIM),
        # They do not: ten minutes without a change are enough, whatever renewTime says.
        (OTHER, LeaseSight(PRESENT, 599.9, -3600.0), ManagerDecision.LEAVE),
        (OTHER, LeaseSight(PRESENT, 600.0, -3600.0), ManagerDecision.CLAIM),
        # A renewTime that cannot be read is old.
        (OTHER, LeaseSight(PRESENT, 59.9, None), ManagerDecision.LEAVE),
        (OTHER, LeaseSight(PRESENT, 60.0, None), ManagerDecision.CLAIM),
    ],
)
def test_who_manages_it(recorded: Release | None, sight: LeaseSight | None, decision: ManagerDecision) -> None:
    assert decide_manager(recorded, OWN, sight) is decision


@pytest.mark.parametrize(
    ("status", "release"),
    [
        ({}, None),
        ({"managedBy": {"namespace": "team-a", "name": "a-millstream"}}, OWN),
        ({"managedBy": None}, None),
        ({"managedBy": "a"}, None),
        ({"managedBy": {"namespace": "team-a"}}, None),
    ],
)
def test_who_is_recorded(status: dict[str, Any], release: Release | None) -> None:
    assert manager_of(status) == release


def test_what_another_release_manages_is_counted_by_that_one_alone() -> None:
    ours: Manifest = {"status": {"managedBy": OWN.as_json()}}
    others: Manifest = {"status": {"managedBy": OTHER.as_json()}}
    nobodys: Manifest = {}
    assert list(without_others([ours, others, nobodys], OWN)) == [ours, nobodys]


class Sight:
    """ReleaseLeases with clocks that a test moves."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.cluster, self.seconds, self.now = FakeCluster(), 0.0, "2025-01-01T00:00:00Z"
        self.client = FakeClusterClient(self.cluster, fault)
        self.leases = ReleaseLeases(self.client, lambda: self.seconds, lambda: self.now)

    def renew(self, at: str) -> None:
        metadata = {"namespace": OTHER.namespace, "name": OTHER.name}
        self.cluster.put(
            {"apiVersion": LEASE.api_version, "kind": "Lease", "metadata": metadata, "spec": {"renewTime": at}}
        )


async def test_a_lease_is_read_every_ten_seconds_however_often_it_is_asked_for() -> None:
    sight = Sight()
    assert await sight.leases.look(OTHER) == LeaseSight(ABSENT)
    sight.renew("2025-01-01T00:00:00.000000Z")
    for _ in range(50):
        assert await sight.leases.look(OTHER) == LeaseSight(ABSENT)
    assert len(sight.client.requests) == 1
    sight.seconds, sight.now = READ_SECONDS, "2025-01-01T00:00:10Z"
    assert await sight.leases.look(OTHER) == LeaseSight(PRESENT, 0.0, 10.0)
    assert len(sight.client.requests) == 2


async def test_the_time_without_a_change_begins_anew_with_each_renewal() -> None:
    sight = Sight()
    sight.renew("2025-01-01T00:00:00Z")
    await sight.leases.look(OTHER)
    sight.seconds = 400.0
    assert (await sight.leases.look(OTHER)).unchanged_seconds == 400.0
    sight.renew("2025-01-01T00:06:40Z")
    sight.seconds = 410.0
    assert (await sight.leases.look(OTHER)).unchanged_seconds == 0.0
    sight.seconds = 1010.0
    assert (await sight.leases.look(OTHER)).unchanged_seconds == 600.0


async def test_a_lease_that_may_not_be_read_is_not_one_that_is_absent() -> None:
    sight = Sight(Fault(0, ApiError(403, "Forbidden", "leases is forbidden"), writes_only=False))
    assert (await sight.leases.look(OTHER)).state is UNREADABLE
    broken = Sight(Fault(0, ApiError(500, "InternalError", "etcd"), writes_only=False))
    with pytest.raises(ApiError):
        await broken.leases.look(OTHER)
