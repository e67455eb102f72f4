"""The API server's addresses: of its Service and behind it."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.facts.api_servers import ApiServers
from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import ENDPOINT_SLICE
from millstream_operator.rendering.closed_addresses import ApiServer
from tests.support.fake_cluster import FakeCluster, FakeClusterClient, Fault

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
SERVICE = ApiServer("10.96.0.1", 443)


def cluster_with(*addresses: str) -> FakeCluster:
    cluster = FakeCluster()
    found: dict[str, Any] = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kubernetes", "namespace": "default"},
        "ports": [{"name": "https", "port": 6443, "protocol": "TCP"}],
        "endpoints": [{"addresses": [one]} for one in addresses],
    }
    cluster.put(found)
    return cluster


async def test_every_address_is_known_and_a_change_is_noticed() -> None:
    cluster = cluster_with("10.0.0.5")
    servers = ApiServers(FakeClusterClient(cluster), IN_A_POD)
    assert servers.known == (SERVICE,)
    assert await servers.refresh()
    assert not await servers.refresh()
    assert set(servers.known) == {SERVICE, ApiServer("10.0.0.5", 6443)}
    cluster.put(cluster_with("10.0.0.6", "10.0.0.5", "not-an-address").the(ENDPOINT_SLICE, "kubernetes", "default"))
    assert await servers.refresh()
    assert {one.address for one in servers.known} == {"10.96.0.1", "10.0.0.5", "10.0.0.6"}


@pytest.mark.parametrize("error", [ApiError(403, "Forbidden", "no"), None])
async def test_where_it_cannot_be_read_the_service_alone_is_known(error: ApiError | None) -> None:
    client = FakeClusterClient(FakeCluster(), Fault(0, error, writes_only=False) if error is not None else None)
    servers = ApiServers(client, IN_A_POD)
    assert not await servers.refresh()
    assert servers.known == (SERVICE,)
    assert ApiServers(client, {"KUBERNETES_SERVICE_HOST": "a.example.com"}).known == ()
